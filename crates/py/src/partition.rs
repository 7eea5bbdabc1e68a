//! `partition`: a request as JSON in, a decision as JSON out.

use pyo3::prelude::*;
use shardwright_partition::{PartitionDecision, PartitionError, PartitionRequest};

use crate::error::partition_error;

/// Divides a model over the stages of a pipeline: a request as JSON in, a decision as JSON out.
#[pyfunction]
pub(crate) fn partition(py: Python<'_>, request_json: &str) -> PyResult<String> {
    py.detach(|| {
        let request = PartitionRequest::from_json(request_json)?;
        Ok(PartitionDecision::new(&request)?.to_json())
    })
    .map_err(|error: PartitionError| partition_error(&error))
}
