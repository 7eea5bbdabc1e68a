//! `Config`: the effective configuration of a job.

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use shardwright_core::config::{DefaultValue, KEYS};
use shardwright_schedule::configured;

use crate::error::config_error;
use crate::topology::Topology;

/// The effective configuration of a job, checked: every key is an attribute, its default where it was not given.
#[pyclass(frozen, eq, hash, dict, module = "shardwright._core")]
#[derive(PartialEq)]
pub(crate) struct Config(pub(crate) shardwright_core::Config);

impl std::hash::Hash for Config {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_json().hash(state);
    }
}

#[pymethods]
impl Config {
    /// Reads a JSON object of keys and values, and checks all of them; with `world`, for a job of so many ranks, which
    /// `elastic_degrees` are lowered to.
    #[staticmethod]
    #[pyo3(signature = (json, world=None))]
    fn parse(py: Python<'_>, json: &str, world: Option<u32>) -> PyResult<Py<Self>> {
        let config = match world {
            None => shardwright_core::Config::parse(json),
            Some(world) => shardwright_core::Config::parse_for(json, world),
        }
        .map_err(|error| config_error(&error))?;
        configured(&config).map_err(|error| config_error(&error))?;
        let made = Bound::new(py, Self(config))?;
        // Among its own attributes, so that a key is found as fast as any.
        let values = made.get().to_dict(py)?;
        made.getattr("__dict__")?
            .call_method1("update", (values,))?;
        Ok(made.unbind())
    }

    /// Only reached for what is no key.
    #[expect(clippy::unused_self, reason = "Python calls it on an instance")]
    fn __getattr__(&self, name: &str) -> PyResult<Py<PyAny>> {
        let text = format!("there is no configuration key '{name}'");
        Err(PyAttributeError::new_err(text))
    }

    /// Refused: the ranks have agreed on these values.
    #[expect(clippy::unused_self, reason = "Python calls it on an instance")]
    fn __setattr__(&self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(PyAttributeError::new_err(format!(
            "the configuration cannot change after smp.init; '{name}' was not set to {}",
            value.repr()?
        )))
    }

    /// Refused, as a change is.
    #[expect(clippy::unused_self, reason = "Python calls it on an instance")]
    fn __delattr__(&self, name: &str) -> PyResult<()> {
        Err(PyAttributeError::new_err(format!(
            "the configuration cannot change after smp.init; '{name}' was not deleted"
        )))
    }

    /// Every key with its effective value, in the order of the documentation.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?
            .call_method1("loads", (self.0.to_json(),))
    }

    /// The text form of the schedule that the job's steps run with; of `auto`, that of the first steps.
    fn schedule(&self) -> PyResult<String> {
        let schedule = configured(&self.0).map_err(|error| config_error(&error))?;
        Ok(schedule.to_string())
    }

    /// Whether the number of microbatches in flight is chosen after the first steps.
    fn chooses_active_microbatches(&self) -> bool {
        self.0.chooses_active_microbatches()
    }

    /// Every key with its effective value, as a JSON object in the documentation's order.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// The topology of a job with this many ranks; refuses a number that does not fit.
    fn check_world(&self, world: u32) -> PyResult<Topology> {
        self.0
            .check_world(world)
            .map(Topology)
            .map_err(|error| config_error(&error))
    }

    /// What all ranks must agree on, as text.
    fn fingerprint(&self) -> String {
        self.0.fingerprint()
    }

    /// The keys in which two fingerprints differ, each with both values.
    #[staticmethod]
    fn difference(own: &str, other: &str) -> Vec<String> {
        shardwright_core::Config::difference(own, other)
    }

    /// The keys of a JSON object that switch nothing on beside the others: name, value as JSON, and why.
    #[staticmethod]
    fn without_effect(json: &str) -> Vec<(String, String, &'static str)> {
        let found = shardwright_core::Config::without_effect(json).into_iter();
        found.map(|one| (one.key, one.value, one.reason)).collect()
    }

    /// Every key: name, origin, allowed values, default, unit, meaning, and why only the default
    /// is allowed (empty where the feature is built).
    #[staticmethod]
    fn keys_table() -> Vec<[String; 7]> {
        let row = |key: &shardwright_core::config::ConfigKey| {
            let default = match key.default {
                DefaultValue::Derived(words) => words.to_owned(),
                _ => key.default_json().to_string(),
            };
            [
                key.name.to_owned(),
                key.origin.name().to_owned(),
                key.allowed(),
                default,
                key.unit.to_owned(),
                key.meaning.to_owned(),
                key.not_built.unwrap_or_default().to_owned(),
            ]
        };
        KEYS.iter().map(row).collect()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut shown = Vec::new();
        for item in self.to_dict(py)?.call_method0("items")?.try_iter()? {
            let (name, value): (String, Bound<'_, PyAny>) = item?.extract()?;
            shown.push(format!("{name}={}", value.repr()?));
        }
        Ok(format!("Config({})", shown.join(", ")))
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<(Py<PyAny>, (String,))> {
        let parse = slf.getattr("parse")?.unbind();
        Ok((parse, (slf.get().to_json(),)))
    }
}
