//! How tensors are made of others that are there: `Recipe`, `View`, `Composite`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_wire::Base;

/// How the caller finds a result: it is an argument, or a view of an argument or of another tensor of the answer.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct Recipe(pub(crate) shardwright_wire::Recipe);

#[pymethods]
impl Recipe {
    /// Without `view`, the result is the argument. Raises `ValueError` unless it is an argument, or a view of one base.
    #[new]
    #[pyo3(signature = (*, argument=None, result=None, view=None, requires_grad))]
    fn new(
        argument: Option<u32>,
        result: Option<u32>,
        view: Option<PyRef<'_, View>>,
        requires_grad: bool,
    ) -> PyResult<Self> {
        let view = view.map(|view| view.0.clone());
        Ok(Self(match (argument, result, view) {
            (Some(argument), None, None) => shardwright_wire::Recipe::Argument {
                argument,
                requires_grad,
            },
            (Some(argument), None, Some(view)) => shardwright_wire::Recipe::View {
                base: Base::Argument(argument),
                view,
                requires_grad,
            },
            (None, Some(result), Some(view)) => shardwright_wire::Recipe::View {
                base: Base::Result(result),
                view,
                requires_grad,
            },
            _ => {
                return Err(PyValueError::new_err(
                    "a recipe names an argument, or an argument or a result and a view of it",
                ));
            }
        }))
    }

    /// The argument that it is, or is a view of.
    #[getter]
    fn argument(&self) -> Option<u32> {
        match &self.0 {
            shardwright_wire::Recipe::Argument { argument, .. }
            | shardwright_wire::Recipe::View {
                base: Base::Argument(argument),
                ..
            } => Some(*argument),
            shardwright_wire::Recipe::View { .. } => None,
        }
    }

    /// The tensor of the answer that it is a view of.
    #[getter]
    fn result(&self) -> Option<u32> {
        match &self.0 {
            shardwright_wire::Recipe::View {
                base: Base::Result(result),
                ..
            } => Some(*result),
            shardwright_wire::Recipe::Argument { .. } | shardwright_wire::Recipe::View { .. } => {
                None
            }
        }
    }

    /// How it lies in its base; None where it is the argument itself.
    #[getter]
    fn view(&self) -> Option<View> {
        match &self.0 {
            shardwright_wire::Recipe::View { view, .. } => Some(View(view.clone())),
            shardwright_wire::Recipe::Argument { .. } => None,
        }
    }

    /// Whether it requires a gradient.
    #[getter]
    fn requires_grad(&self) -> bool {
        match &self.0 {
            shardwright_wire::Recipe::Argument { requires_grad, .. }
            | shardwright_wire::Recipe::View { requires_grad, .. } => *requires_grad,
        }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// How a view lies in its base.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct View(shardwright_wire::View);

#[pymethods]
impl View {
    /// `offset` counts from where the base begins; `conjugated` and `negated` tell whether it is read so where the base
    /// is not, or the other way round.
    #[new]
    #[pyo3(signature = (shape, strides, offset, *, conjugated, negated, grad_mode))]
    fn new(
        shape: Vec<u64>,
        strides: Vec<u64>,
        offset: i64,
        conjugated: bool,
        negated: bool,
        grad_mode: bool,
    ) -> Self {
        Self(shardwright_wire::View {
            shape,
            strides,
            offset,
            conjugated,
            negated,
            grad_mode,
        })
    }

    /// The sizes.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.0.shape.clone()
    }

    /// The strides.
    #[getter]
    fn strides(&self) -> Vec<u64> {
        self.0.strides.clone()
    }

    /// Where it begins, from where its base begins.
    #[getter]
    fn offset(&self) -> i64 {
        self.0.offset
    }

    /// Whether it is conjugated where its base is not, or the other way round.
    #[getter]
    fn conjugated(&self) -> bool {
        self.0.conjugated
    }

    /// Whether it is negated where its base is not, or the other way round.
    #[getter]
    fn negated(&self) -> bool {
        self.0.negated
    }

    /// Whether it was made with gradients enabled.
    #[getter]
    fn grad_mode(&self) -> bool {
        self.0.grad_mode
    }
}

/// What a tensor is that travels as several dense ones.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct Composite(shardwright_wire::Composite);

pub(crate) fn to_wire(
    composites: Vec<(u32, PyRef<'_, Composite>)>,
) -> Vec<(u32, shardwright_wire::Composite)> {
    let composites = composites.into_iter();
    composites
        .map(|(place, composite)| (place, composite.0.clone()))
        .collect()
}

pub(crate) fn from_wire(
    composites: &[(u32, shardwright_wire::Composite)],
) -> Vec<(u32, Composite)> {
    let composites = composites.iter();
    composites
        .map(|(place, composite)| (*place, Composite(composite.clone())))
        .collect()
}

#[pymethods]
impl Composite {
    /// An argument, which the caller has.
    #[staticmethod]
    fn of_argument(argument: u32) -> Self {
        Self(shardwright_wire::Composite::Argument(argument))
    }

    /// A sparse tensor: the places of its indices and values, its sizes, and whether it is coalesced.
    #[staticmethod]
    fn of_sparse(indices: u32, values: u32, shape: Vec<u64>, coalesced: bool) -> Self {
        Self(shardwright_wire::Composite::Sparse {
            indices,
            values,
            shape,
            coalesced,
        })
    }

    /// A jagged tensor: the places of its values and offsets, and its ragged dimension.
    #[staticmethod]
    fn of_nested(values: u32, offsets: u32, ragged_dimension: u32) -> Self {
        Self(shardwright_wire::Composite::Nested {
            values,
            offsets,
            ragged_dimension,
        })
    }

    /// The argument that it is.
    #[getter]
    fn argument(&self) -> Option<u32> {
        match self.0 {
            shardwright_wire::Composite::Argument(argument) => Some(argument),
            _ => None,
        }
    }

    /// Of a sparse tensor what `of_sparse` was given.
    #[getter]
    fn sparse(&self) -> Option<(u32, u32, Vec<u64>, bool)> {
        match &self.0 {
            shardwright_wire::Composite::Sparse {
                indices,
                values,
                shape,
                coalesced,
            } => Some((*indices, *values, shape.clone(), *coalesced)),
            _ => None,
        }
    }

    /// Of a nested tensor what `of_nested` was given.
    #[getter]
    fn nested(&self) -> Option<(u32, u32, u32)> {
        match self.0 {
            shardwright_wire::Composite::Nested {
                values,
                offsets,
                ragged_dimension,
            } => Some((values, offsets, ragged_dimension)),
            _ => None,
        }
    }

    /// The places of the dense tensors that it travels as.
    #[getter]
    fn parts(&self) -> Vec<u32> {
        self.0.parts().collect()
    }
}
