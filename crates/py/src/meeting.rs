//! `Meeting`: where the ranks of one host meet.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use shardwright_comm::meeting;

use crate::arguments::duration;
use crate::error::{argument_error, start_error};
use crate::interruptible::interruptible;

/// Rank 0's door on its host: processes of the same user that know the job's name get a few bytes there.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Meeting(meeting::Meeting);

#[pymethods]
impl Meeting {
    /// Open the door of the job of this name, and hand `content` out until `close`.
    ///
    /// Raises `JobStartError` where another process has that name.
    #[staticmethod]
    fn open(py: Python<'_>, name: &str, content: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let content = content.as_bytes();
        if content.len() > meeting::MOST_BYTES {
            let (found, most) = (content.len(), meeting::MOST_BYTES);
            return Err(argument_error(format!(
                "content has {found} bytes; allowed: {most} at most"
            )));
        }
        let opened = interruptible(py, |go_on| meeting::Meeting::open(name, content, go_on))?;
        Ok(Self(opened.map_err(|error| start_error(&error))?))
    }

    /// What rank 0 of the job of this name hands out, once it is there.
    ///
    /// Raises `JobStartError` when it is not within `timeout` seconds, or the process there is another user's.
    #[staticmethod]
    fn ask<'py>(py: Python<'py>, name: &str, timeout: f64) -> PyResult<Bound<'py, PyBytes>> {
        let limit = duration("timeout", timeout)?;
        let content = interruptible(py, |go_on| meeting::ask(name, limit, go_on))?;
        let content = content.map_err(|error| start_error(&error))?;
        Ok(PyBytes::new(py, &content))
    }

    /// Close the door; further calls do nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}
