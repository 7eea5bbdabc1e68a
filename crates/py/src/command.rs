//! The `shardwright` command: arguments in, text and exit status out.

use std::ffi::OsString;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_cli::{Finished, PythonFacts, UcxReport};

/// Run the command: its exit status, what to write to the standard output, and what to the standard error.
///
/// `facts` is a JSON object of what only Python knows about itself, `ucx_packages` the directories of
/// Python packages that hold UCX.
#[pyfunction]
pub(crate) fn command(
    py: Python<'_>,
    arguments: Vec<OsString>,
    facts: &str,
    ucx_packages: Vec<String>,
) -> PyResult<(u8, String, String)> {
    let facts =
        PythonFacts::parse(facts).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let finished = py.detach(|| {
        // Loading it takes a while, and only the doctor looks at it.
        let asked = arguments.iter().any(|argument| argument == "doctor");
        let packages = ucx_packages.into_iter().map(Into::into).collect();
        let report = asked.then(|| UcxReport::of_this_machine(packages));
        shardwright_cli::run(arguments, &facts, report.as_ref())
    });
    let Finished {
        status,
        output,
        complaint,
    } = finished;
    Ok((status, output, complaint))
}
