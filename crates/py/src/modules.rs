//! `owned_tensors`: what a step may change, found in one walk over a model's modules.

use std::collections::HashSet;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyList};

/// The parameters in a module tree, each once and in the model's order, and the module and name of each
/// buffer; without what stands in for another rank's, by its exact type.
///
/// This runs in every step, so it reads the modules' own dictionaries and asks torch for nothing.
#[pyfunction]
#[pyo3(signature = (module: "torch.nn.Module", stand_ins: "frozenset[type]", /) -> "tuple[list[torch.nn.Parameter], list[tuple[torch.nn.Module, str]]]")]
pub(crate) fn owned_tensors<'py>(
    module: Bound<'py, PyAny>,
    stand_ins: &Bound<'py, PyFrozenSet>,
) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
    let py = module.py();
    let (parameters, buffers) = (PyList::empty(py), PyList::empty(py));
    let mut seen = HashSet::new();
    let mut seen_parameters = HashSet::new();
    let mut stack = vec![module];
    while let Some(module) = stack.pop() {
        if !seen.insert(module.as_ptr()) {
            continue;
        }
        for_each(&module.getattr(intern!(py, "_parameters"))?, |_, value| {
            if is_owned(&value, stand_ins)? && seen_parameters.insert(value.as_ptr()) {
                parameters.append(value)?;
            }
            Ok(())
        })?;
        for_each(&module.getattr(intern!(py, "_buffers"))?, |name, value| {
            if is_owned(&value, stand_ins)? {
                buffers.append((&module, name))?;
            }
            Ok(())
        })?;
        let first = stack.len();
        for_each(&module.getattr(intern!(py, "_modules"))?, |_, child| {
            if !child.is_none() {
                stack.push(child);
            }
            Ok(())
        })?;
        stack[first..].reverse();
    }
    Ok((parameters, buffers))
}

/// Those of the parameters that have a gradient, or hooks of any kind.
#[pyfunction]
#[pyo3(signature = (parameters: "list[torch.nn.Parameter]", /) -> "list[torch.nn.Parameter]")]
pub(crate) fn parameters_in_use<'py>(
    parameters: &Bound<'py, PyList>,
) -> PyResult<Bound<'py, PyList>> {
    let py = parameters.py();
    let in_use = PyList::empty(py);
    for parameter in parameters {
        if !parameter.getattr(intern!(py, "grad"))?.is_none()
            || parameter
                .getattr(intern!(py, "_backward_hooks"))?
                .is_truthy()?
            || parameter
                .getattr(intern!(py, "_post_accumulate_grad_hooks"))?
                .is_truthy()?
        {
            in_use.append(parameter)?;
        }
    }
    Ok(in_use)
}

fn is_owned<'py>(value: &Bound<'py, PyAny>, stand_ins: &Bound<'py, PyFrozenSet>) -> PyResult<bool> {
    Ok(!value.is_none() && !stand_ins.contains(value.get_type())?)
}

/// The items of a dictionary; of what a scripted module has in place of one, too.
fn for_each<'py>(
    items: &Bound<'py, PyAny>,
    mut function: impl FnMut(Bound<'py, PyAny>, Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    if let Ok(dictionary) = items.cast::<PyDict>() {
        for (name, value) in dictionary {
            function(name, value)?;
        }
        return Ok(());
    }
    for item in items
        .call_method0(intern!(items.py(), "items"))?
        .try_iter()?
    {
        let (name, value) = item?.extract()?;
        function(name, value)?;
    }
    Ok(())
}
