//! The `shardwright` command: arguments in, text and exit status out.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_cli::{Finished, PythonFacts, UcxReport};

/// Run the command: its exit status, what to write to the standard output, and what to the standard error.
///
/// `facts` is a JSON object of what only Python knows about itself.
#[pyfunction]
pub(crate) fn command(
    py: Python<'_>,
    arguments: Vec<String>,
    facts: &str,
) -> PyResult<(u8, String, String)> {
    let facts =
        PythonFacts::parse(facts).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let finished = py.detach(|| shardwright_cli::run(arguments, &facts, ucx_report().as_ref()));
    let Finished {
        status,
        output,
        complaint,
    } = finished;
    Ok((status, output, complaint))
}

/// What the UCX layer says about the library that it would load; nothing until there is such a layer.
fn ucx_report() -> Option<UcxReport> {
    None
}
