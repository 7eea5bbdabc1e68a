//! `partition`: a request as JSON in, a decision as JSON out; `shard_parameters`.

use pyo3::prelude::*;
use shardwright_partition::{PartitionDecision, PartitionError, PartitionRequest, ShardItem};

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

/// Divides parameters over ranks that all hold them: for each, its number of elements, the bytes of one, and whether it
/// may be split. `loads` are the bytes that each rank has already. Returns `(parameter, start, stop, rank)` of each shard.
#[pyfunction]
#[pyo3(signature = (parameters, loads, /))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
pub(crate) fn shard_parameters(
    parameters: Vec<(u64, u64, bool)>,
    loads: Vec<u64>,
) -> Vec<(usize, u64, u64, usize)> {
    let items: Vec<ShardItem> = parameters
        .into_iter()
        .map(|(numel, element_bytes, splittable)| ShardItem {
            numel,
            element_bytes,
            splittable,
        })
        .collect();
    shardwright_partition::shards(&items, &loads)
        .into_iter()
        .map(|shard| (shard.item, shard.start, shard.stop, shard.owner))
        .collect()
}
