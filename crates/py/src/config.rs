//! `Config`: the effective configuration of a job.

use pyo3::prelude::*;
use shardwright_core::config::{DefaultValue, KEYS};
use shardwright_schedule::configured;

use crate::error::config_error;
use crate::topology::Topology;

/// The effective configuration of a job, checked.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(PartialEq)]
pub(crate) struct Config(pub(crate) shardwright_core::Config);

#[pymethods]
impl Config {
    /// Reads a JSON object of keys and values, and checks all of them.
    #[staticmethod]
    fn parse(json: &str) -> PyResult<Self> {
        let config = shardwright_core::Config::parse(json).map_err(|error| config_error(&error))?;
        configured(&config).map_err(|error| config_error(&error))?;
        Ok(Self(config))
    }

    /// The text form of the schedule that the job's steps run with; of `auto`, that of the first steps.
    fn schedule(&self) -> PyResult<String> {
        let schedule = configured(&self.0).map_err(|error| config_error(&error))?;
        Ok(schedule.to_string())
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

    /// Every key: name, origin, allowed values, default, unit, meaning, and why only the default
    /// is allowed (empty where the feature is built).
    #[staticmethod]
    fn keys_table() -> Vec<[String; 7]> {
        let row = |key: &shardwright_core::config::Key| {
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

    fn __repr__(&self) -> String {
        format!("Config.parse({:?})", self.0.to_json())
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<(Py<PyAny>, (String,))> {
        let parse = slf.getattr("parse")?.unbind();
        Ok((parse, (slf.get().to_json(),)))
    }
}
