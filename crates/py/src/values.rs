//! Python values as trees that can cross ranks, and back.

use std::collections::HashMap;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyComplex, PyDict, PyEllipsis, PyFloat, PyFrozenSet, PyInt, PyList, PySet,
    PySlice, PyString, PyTuple, PyType,
};
use shardwright_wire::Value;

use crate::error::unsupported_value_error;
use crate::torch_types::TorchTypes;

/// A value without its tensors: what [`flatten`] makes and `build` turns back.
#[pyclass(frozen, eq, from_py_object, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct Spec(pub(crate) Value);

#[pymethods]
impl Spec {
    /// The value again, with `tensors` in the places of the tensors.
    fn build<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Bound<'py, PyAny>>,
        registry: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let decoders = registry.getattr("decoders")?;
        Builder {
            py,
            torch: TorchTypes::get(py)?,
            tensors,
            decoders,
        }
        .build(&self.0)
    }

    /// Whether something in the value of a call's `(args, kwargs)` can be changed in place, besides tensors and these two.
    #[getter]
    fn holds_containers(&self) -> bool {
        let Value::Tuple(both) = &self.0 else {
            return is_container(&self.0);
        };
        both.iter().any(|value| match value {
            Value::Dict(entries) => entries.iter().any(|(_, item)| is_container(item)),
            other => is_container(other),
        })
    }

    /// The elements of a tuple, each as a value of its own over the same tensors.
    fn split(&self) -> PyResult<Vec<Spec>> {
        match &self.0 {
            Value::Tuple(items) => Ok(items.iter().cloned().map(Spec).collect()),
            _ => Err(PyTypeError::new_err(
                "only the value of a tuple can be split",
            )),
        }
    }

    fn __repr__(&self) -> String {
        format!("Spec({:?})", self.0)
    }
}

fn is_container(value: &Value) -> bool {
    match value {
        Value::Tuple(items) => items.iter().any(is_container),
        Value::List(_) | Value::Dict(_) | Value::Set(..) | Value::Registered(..) => true,
        _ => false,
    }
}

/// Split a value into its tree and its tensors, each tensor once.
///
/// `registry` has `encoders` (type to name and function to fields), `decoders` (name to
/// function from fields) and `fallback(type)`. Raises `UnsupportedValueError`, which names
/// the path, for a type that cannot cross ranks; `names` are what the elements of an
/// outermost tuple are called there.
#[pyfunction]
#[pyo3(signature = (value, registry, names=Vec::new()))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
pub(crate) fn flatten<'py>(
    py: Python<'py>,
    value: &Bound<'py, PyAny>,
    registry: &Bound<'py, PyAny>,
    names: Vec<String>,
) -> PyResult<(Spec, Vec<Bound<'py, PyAny>>)> {
    let mut walker = Walker {
        torch: TorchTypes::get(py)?,
        registry,
        encoders: registry.getattr("encoders")?.cast_into::<PyDict>()?,
        tensors: Vec::new(),
        index: HashMap::new(),
        depth: 0,
    };
    match walker.walk(value) {
        Ok(tree) => Ok((Spec(tree), walker.tensors)),
        Err(Refusal::Raised(error)) => Err(error),
        Err(Refusal::Unsupported { mut path, kind }) => {
            path.reverse();
            let outermost = path.first().and_then(|part| {
                let index: usize = part.strip_prefix('[')?.strip_suffix(']')?.parse().ok()?;
                names.get(index)
            });
            if let Some(name) = outermost {
                path[0].clone_from(name);
            }
            Err(unsupported_value_error(&path.concat(), &kind))
        }
    }
}

/// Why a value could not be taken apart.
enum Refusal {
    /// Something in Python raised.
    Raised(PyErr),
    /// A value of this type, at this path (innermost part first).
    Unsupported { path: Vec<String>, kind: String },
}

impl From<PyErr> for Refusal {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

impl Refusal {
    /// The refusal as seen from one level further out.
    fn within(self, part: impl FnOnce() -> String) -> Self {
        match self {
            Self::Unsupported { mut path, kind } => {
                path.push(part());
                Self::Unsupported { path, kind }
            }
            raised @ Self::Raised(_) => raised,
        }
    }
}

/// Deeper trees than this are not arguments but mistakes.
const MAX_DEPTH: usize = 64;

struct Walker<'a, 'py> {
    torch: &'static TorchTypes,
    registry: &'a Bound<'py, PyAny>,
    encoders: Bound<'py, PyDict>,
    tensors: Vec<Bound<'py, PyAny>>,
    index: HashMap<usize, u32>,
    depth: usize,
}

impl<'py> Walker<'_, 'py> {
    fn walk(&mut self, value: &Bound<'py, PyAny>) -> Result<Value, Refusal> {
        if self.depth == MAX_DEPTH {
            let kind = value.get_type().fully_qualified_name()?;
            let kind = format!("{kind} nested more than {MAX_DEPTH} deep");
            return Err(Refusal::Unsupported {
                path: Vec::new(),
                kind,
            });
        }
        self.depth += 1;
        let walked = self.walk_one(value);
        self.depth -= 1;
        walked
    }

    /// The types that stand most often in arguments are tried first.
    fn walk_one(&mut self, value: &Bound<'py, PyAny>) -> Result<Value, Refusal> {
        let py = value.py();
        if value.is_none() {
            return Ok(Value::None);
        }
        let kind = value.get_type();
        if kind.is(self.torch.tensor.bind(py)) {
            return Ok(self.tensor(value));
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            return self.items(tuple.iter()).map(Value::Tuple);
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.entries(dict).map(Value::Dict);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            return self.items(list.iter()).map(Value::List);
        }
        if let Some(plain) = plain(value)? {
            return Ok(plain);
        }
        if value.is_instance(self.torch.tensor.bind(py))? {
            return Ok(self.tensor(value));
        }
        if let Some(constant) = self.torch_constant(value, &kind)? {
            return Ok(constant);
        }
        if value.cast_exact::<PySet>().is_ok() {
            return Ok(Value::Set(self.items(elements(value)?.into_iter())?, false));
        }
        if value.cast_exact::<PyFrozenSet>().is_ok() {
            return Ok(Value::Set(self.items(elements(value)?.into_iter())?, true));
        }
        if value.cast_exact::<PySlice>().is_ok() {
            let part = |name: &str| value.getattr(name);
            let parts = [part("start")?, part("stop")?, part("step")?];
            let [start, stop, stride] = &parts;
            return Ok(Value::Slice(Box::new([
                self.walk(start)?,
                self.walk(stop)?,
                self.walk(stride)?,
            ])));
        }
        self.registered(value)
    }

    fn tensor(&mut self, value: &Bound<'py, PyAny>) -> Value {
        let next = self.tensors.len() as u32;
        let index = *self.index.entry(value.as_ptr() as usize).or_insert(next);
        if index == next {
            self.tensors.push(value.clone());
        }
        Value::Tensor(index)
    }

    /// Constants of torch's own types.
    fn torch_constant(
        &self,
        value: &Bound<'py, PyAny>,
        kind: &Bound<'py, PyType>,
    ) -> PyResult<Option<Value>> {
        let py = value.py();
        let name = || -> PyResult<String> {
            Ok(value
                .str()?
                .to_str()?
                .trim_start_matches("torch.")
                .to_owned())
        };
        Ok(if kind.is(self.torch.dtype.bind(py)) {
            Some(Value::Dtype(name()?))
        } else if kind.is(self.torch.device.bind(py)) {
            Some(Value::Device(value.str()?.to_str()?.to_owned()))
        } else if kind.is(self.torch.size.bind(py)) {
            Some(Value::Size(value.extract()?))
        } else if kind.is(self.torch.layout.bind(py)) || kind.is(self.torch.memory_format.bind(py))
        {
            Some(Value::TorchConstant(name()?))
        } else {
            None
        })
    }

    fn items(
        &mut self,
        items: impl Iterator<Item = Bound<'py, PyAny>>,
    ) -> Result<Vec<Value>, Refusal> {
        items
            .enumerate()
            .map(|(index, item)| {
                self.walk(&item)
                    .map_err(|refusal| refusal.within(|| format!("[{index}]")))
            })
            .collect()
    }

    fn entries(&mut self, dict: &Bound<'py, PyDict>) -> Result<Vec<(Value, Value)>, Refusal> {
        dict.iter()
            .map(|(key, item)| {
                let part = || {
                    format!(
                        "[{}]",
                        key.repr().map_or_else(|_| "?".into(), |r| r.to_string())
                    )
                };
                let name = self.walk(&key).map_err(|refusal| refusal.within(part))?;
                let value = self.walk(&item).map_err(|refusal| refusal.within(part))?;
                Ok((name, value))
            })
            .collect()
    }

    fn registered(&mut self, value: &Bound<'py, PyAny>) -> Result<Value, Refusal> {
        let kind = value.get_type();
        let entry = match self.encoders.get_item(&kind)? {
            Some(entry) => entry,
            None => self.registry.call_method1("fallback", (&kind,))?,
        };
        if entry.is_none() {
            let kind = kind.fully_qualified_name()?.to_string();
            return Err(Refusal::Unsupported {
                path: Vec::new(),
                kind,
            });
        }
        let (name, to_fields): (String, Bound<'py, PyAny>) = entry.extract()?;
        let fields = to_fields.call1((value,))?;
        let fields = self
            .walk(&fields)
            .map_err(|refusal| refusal.within(|| format!("<{name}>")))?;
        Ok(Value::Registered(name, Box::new(fields)))
    }
}

/// Leaves of Python's own types.
fn plain(value: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    if let Ok(text) = value.cast_exact::<PyString>() {
        return Ok(Some(Value::Str(text.to_str()?.to_owned())));
    }
    if let Ok(flag) = value.cast_exact::<PyBool>() {
        return Ok(Some(Value::Bool(flag.is_true())));
    }
    if value.cast_exact::<PyInt>().is_ok() {
        return Ok(Some(match value.extract::<i64>() {
            Ok(number) => Value::Int(number),
            Err(_) => Value::BigInt(value.call_method1("__format__", ("x",))?.extract()?),
        }));
    }
    if let Ok(number) = value.cast_exact::<PyFloat>() {
        return Ok(Some(Value::Float(number.value())));
    }
    if let Ok(number) = value.cast_exact::<PyComplex>() {
        let part = |name: &str| number.getattr(name)?.extract::<f64>();
        return Ok(Some(Value::Complex(part("real")?, part("imag")?)));
    }
    if let Ok(bytes) = value.cast_exact::<PyBytes>() {
        return Ok(Some(Value::Bytes(bytes.as_bytes().to_vec())));
    }
    Ok(value
        .is(PyEllipsis::get(value.py()))
        .then_some(Value::Ellipsis))
}

/// The elements of a set, in its order.
fn elements<'py>(set: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    set.try_iter()?.collect()
}

struct Builder<'py> {
    py: Python<'py>,
    torch: &'static TorchTypes,
    tensors: Vec<Bound<'py, PyAny>>,
    decoders: Bound<'py, PyAny>,
}

impl<'py> Builder<'py> {
    fn build(&self, value: &Value) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match value {
            Value::None => py.None().into_bound(py),
            Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
            Value::Int(number) => number.into_pyobject(py)?.into_any(),
            Value::BigInt(digits) => py.get_type::<PyInt>().call1((digits, 16))?,
            Value::Float(number) => PyFloat::new(py, *number).into_any(),
            Value::Complex(real, imaginary) => {
                PyComplex::from_doubles(py, *real, *imaginary).into_any()
            }
            Value::Str(text) => PyString::new(py, text).into_any(),
            Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Value::List(items) => PyList::new(py, self.all(items)?)?.into_any(),
            Value::Tuple(items) => PyTuple::new(py, self.all(items)?)?.into_any(),
            Value::Set(items, false) => PySet::new(py, self.all(items)?)?.into_any(),
            Value::Set(items, true) => PyFrozenSet::new(py, self.all(items)?)?.into_any(),
            Value::Dict(entries) => {
                let dict = PyDict::new(py);
                for (key, item) in entries {
                    dict.set_item(self.build(key)?, self.build(item)?)?;
                }
                dict.into_any()
            }
            Value::Slice(parts) => py.get_type::<PySlice>().call1((
                self.build(&parts[0])?,
                self.build(&parts[1])?,
                self.build(&parts[2])?,
            ))?,
            Value::Ellipsis => PyEllipsis::get(py).to_owned().into_any(),
            Value::Dtype(name) | Value::TorchConstant(name) => {
                self.torch.module.bind(py).getattr(name)?
            }
            Value::Device(name) => self.torch.device.bind(py).call1((name,))?,
            Value::Size(sizes) => self.torch.size.bind(py).call1((sizes.clone(),))?,
            Value::Registered(name, fields) => self
                .decoders
                .get_item(name)?
                .call1((self.build(fields)?,))?,
            Value::Tensor(index) => {
                self.tensors.get(*index as usize).cloned().ok_or_else(|| {
                    PyValueError::new_err(format!(
                        "the value names tensor {index} of {}",
                        self.tensors.len()
                    ))
                })?
            }
        })
    }

    fn all(&self, items: &[Value]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        items.iter().map(|item| self.build(item)).collect()
    }
}
