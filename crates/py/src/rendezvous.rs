//! `Rendezvous`: where the ranks of a job meet.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use shardwright_comm::{Secret, StartError};

use crate::arguments::duration;
use crate::error::{argument_error, start_error};
use crate::interruptible::interruptible;

/// Where a rank meets the others, and the secret by which they know each other; for one connection.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Rendezvous {
    port: u16,
    note: u16,
    inner: Mutex<Option<shardwright_comm::Rendezvous>>,
}

#[pymethods]
impl Rendezvous {
    /// Rank 0's: it listens on an interface, at a port to be told to the others. Without a secret it trusts everybody.
    ///
    /// Raises `JobStartError` where the secret is too weak to be one, or nothing can listen there.
    #[staticmethod]
    fn listen(host: String, secret: Option<&Bound<'_, PyBytes>>) -> PyResult<Self> {
        Self::of(shardwright_comm::Rendezvous::listen(
            host,
            secret_or_none(secret)?,
        ))
    }

    /// Another rank's, which was told where rank 0 listens.
    #[staticmethod]
    fn at(host: String, port: u16, secret: Option<&Bound<'_, PyBytes>>) -> PyResult<Self> {
        let secret = secret_or_none(secret)?;
        let place = shardwright_comm::Rendezvous::at(host, port, secret);
        Ok(Self::new(place))
    }

    /// Rank 0's among ranks of one host, which know the job by `name`. Without a secret it makes one up for all; `note`
    /// is a number that it tells them.
    ///
    /// Raises `JobStartError` where another process has that name.
    #[staticmethod]
    #[pyo3(signature = (name, host, secret, note=0))]
    fn open(
        py: Python<'_>,
        name: &str,
        host: String,
        secret: Option<&Bound<'_, PyBytes>>,
        note: u16,
    ) -> PyResult<Self> {
        let given = secret.map(secret_of).transpose()?;
        Self::of(interruptible(py, |go_on| {
            shardwright_comm::Rendezvous::open(name, host, given, note, go_on)
        })?)
    }

    /// Another rank's among ranks of one host, as soon as rank 0's is there.
    ///
    /// Raises `JobStartError` when it is not within `timeout` seconds, or the process there is another user's.
    #[staticmethod]
    fn find(
        py: Python<'_>,
        name: &str,
        host: String,
        secret: Option<&Bound<'_, PyBytes>>,
        timeout: f64,
    ) -> PyResult<Self> {
        let limit = duration("timeout", timeout)?;
        let given = secret.map(secret_of).transpose()?;
        Self::of(interruptible(py, |go_on| {
            shardwright_comm::Rendezvous::find(name, host, given, limit, go_on)
        })?)
    }

    /// Rank 0's port.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// What rank 0 told beside it; 0 where it told nothing.
    #[getter]
    fn note(&self) -> u16 {
        self.note
    }
}

impl Rendezvous {
    fn new(place: shardwright_comm::Rendezvous) -> Self {
        Self {
            port: place.port(),
            note: place.note(),
            inner: Mutex::new(Some(place)),
        }
    }

    fn of(place: Result<shardwright_comm::Rendezvous, StartError>) -> PyResult<Self> {
        place.map(Self::new).map_err(|error| start_error(&error))
    }

    /// The place, once.
    pub(crate) fn take(&self) -> PyResult<shardwright_comm::Rendezvous> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = inner.take();
        taken.ok_or_else(|| argument_error("a place is for one connection, which has been made"))
    }
}

fn secret_or_none(bytes: Option<&Bound<'_, PyBytes>>) -> PyResult<Secret> {
    bytes.map_or_else(|| Ok(Secret::none()), secret_of)
}

fn secret_of(bytes: &Bound<'_, PyBytes>) -> PyResult<Secret> {
    Secret::new(bytes.as_bytes().to_vec()).map_err(|weak| start_error(&weak.into()))
}

/// Why bytes are no secret of a job, as the rest of a sentence; `None` where they are one.
#[pyfunction]
pub(crate) fn weakness_of_secret(secret: &Bound<'_, PyBytes>) -> Option<String> {
    let weak = Secret::new(secret.as_bytes().to_vec()).err();
    weak.map(|weak| weak.to_string())
}
