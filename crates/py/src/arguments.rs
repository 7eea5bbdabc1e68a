//! Arguments that are read before anything is done with them.

use std::net::IpAddr;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// A variable of an environment as Python has it.
pub(crate) fn variable(environ: &Bound<'_, PyAny>, name: &str) -> Option<String> {
    let value = environ.call_method1("get", (name,)).ok()?;
    let text = value.cast::<PyString>().ok()?;
    Some(text.to_string_lossy().into_owned())
}

pub(crate) fn parse_address(text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| {
        PyValueError::new_err(format!(
            "bind_address is {text:?}; it has to be an IP address"
        ))
    })
}

pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        PyValueError::new_err(format!(
            "{name} is {seconds}; it has to be a number of seconds"
        ))
    })
}
