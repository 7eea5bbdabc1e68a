//! What only Python knows about itself.

use serde::Deserialize;

/// Versions and devices, as the Python package found them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonFacts {
    /// The version of Python.
    pub python: String,
    /// Its program.
    pub executable: String,
    /// The version of torch.
    pub torch: String,
    /// The CUDA version that torch was built for.
    pub cuda: Option<String>,
    /// The names of the CUDA devices that torch can use.
    pub devices: Vec<String>,
    /// Why it can use none, if it says so.
    pub cuda_problem: Option<String>,
}

impl PythonFacts {
    /// Reads them from JSON.
    pub fn parse(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}
