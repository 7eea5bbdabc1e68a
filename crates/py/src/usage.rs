//! Where a rank's time went, as dicts and text.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_runtime::Usage;

/// What a rank's time inside steps was used for: of all steps that ended well, and of the newest one.
#[pyclass(frozen, module = "shardwright._core", name = "Usage")]
pub(crate) struct PyUsage(pub(crate) Usage);

#[pymethods]
impl PyUsage {
    /// Seconds by use, bytes of tensors, and shares: `bubble` of the tasks' time, the others of all time.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn figures<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let usage = &self.0;
        let total = usage.total().as_secs_f64();
        let share = |time: Duration| {
            if total > 0.0 {
                time.as_secs_f64() / total
            } else {
                0.0
            }
        };
        let waiting = PyDict::new(py);
        for (rank, time) in &usage.waiting {
            waiting.set_item(rank.0, time.as_secs_f64())?;
        }
        let dict = PyDict::new(py);
        dict.set_item("steps", usage.steps)?;
        for (name, time) in [
            ("seconds", usage.total()),
            ("forward_seconds", usage.forward),
            ("backward_seconds", usage.backward),
            ("weight_seconds", usage.weight),
            ("other_seconds", usage.other),
            ("overhead_seconds", usage.overhead),
            ("commit_seconds", usage.commit),
            ("sending_seconds", usage.sending),
        ] {
            dict.set_item(name, time.as_secs_f64())?;
        }
        dict.set_item("waiting_seconds", waiting)?;
        dict.set_item("sent_bytes", usage.sent_bytes)?;
        dict.set_item("received_bytes", usage.received_bytes)?;
        dict.set_item("busy", share(usage.busy()))?;
        dict.set_item("waiting", share(usage.waited()))?;
        dict.set_item("bubble", usage.bubble())?;
        dict.set_item("ideal_bubble", usage.ideal_bubble())?;
        Ok(dict)
    }

    /// One line.
    fn __str__(&self) -> String {
        self.0.to_string()
    }
}
