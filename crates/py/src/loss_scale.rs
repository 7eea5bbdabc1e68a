//! `DynamicLossScale`.

use pyo3::prelude::*;
use shardwright_core::LossScaleSettings;

use crate::error::argument_error;

/// A loss scale that shrinks with overflows and grows without them.
#[pyclass(module = "shardwright._core")]
pub(crate) struct DynamicLossScale(shardwright_core::DynamicLossScale);

#[pymethods]
impl DynamicLossScale {
    /// A scale that has seen no step. Raises `ConfigError` that names the setting that is not allowed.
    #[new]
    #[pyo3(signature = (*, init_scale, scale_factor, scale_window, min_scale, delayed_shift, consecutive_hysteresis))]
    fn new(
        init_scale: f64,
        scale_factor: f64,
        scale_window: u64,
        min_scale: f64,
        delayed_shift: u64,
        consecutive_hysteresis: bool,
    ) -> PyResult<Self> {
        shardwright_core::DynamicLossScale::new(LossScaleSettings {
            init_scale,
            scale_factor,
            scale_window,
            min_scale,
            delayed_shift,
            consecutive_hysteresis,
        })
        .map(Self)
        .map_err(argument_error)
    }

    /// What the next loss is multiplied by.
    #[getter]
    fn scale(&self) -> f64 {
        self.0.scale()
    }

    /// Takes note of a step, whose gradients may have overflowed.
    #[pyo3(signature = (overflow, /))]
    fn update(&mut self, overflow: bool) {
        self.0.update(overflow);
    }

    /// Its settings and state, as JSON.
    fn to_json(&self) -> String {
        serde_json::to_string(&self.0).expect("numbers are finite and keys are text")
    }

    /// The scale that `to_json` wrote. Raises `ConfigError` for any other text.
    #[staticmethod]
    #[pyo3(signature = (json, /))]
    fn from_json(json: &str) -> PyResult<Self> {
        serde_json::from_str::<shardwright_core::DynamicLossScale>(json)
            .map_err(argument_error)?
            .checked()
            .map(Self)
            .map_err(argument_error)
    }
}
