//! `Listener`: where rank 0 is called.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::error::start_error;

/// A bound port of rank 0, to be published before the job is connected.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Listener {
    port: u16,
    inner: Mutex<Option<shardwright_comm::Listener>>,
}

#[pymethods]
impl Listener {
    /// Bind a port on one interface; port 0 lets the system choose.
    #[staticmethod]
    fn bind(host: &str, port: u16) -> PyResult<Self> {
        let inner =
            shardwright_comm::Listener::bind(host, port).map_err(|error| start_error(&error))?;
        Ok(Self {
            port: inner.port(),
            inner: Mutex::new(Some(inner)),
        })
    }

    /// The port.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }
}

impl Listener {
    /// The bound port, once.
    pub(crate) fn take(&self) -> Option<shardwright_comm::Listener> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}
