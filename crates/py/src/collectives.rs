//! Which back end the collectives of a job use.

use pyo3::prelude::*;
use shardwright_core::{RankFacts, choose_collective_back_end};

use crate::error::argument_error;

/// The name of the back end of `torch.distributed` for a job's collectives, found alike on all ranks.
///
/// `asked` is the configuration key `ddp_dist_backend`. `facts` has a JSON object for each rank: `host`; `device`, the
/// UUID of its CUDA device, and `gpu`, the address of its GPU, or null; `has_gloo` and `has_nccl`, whether its torch
/// was built with them; `group`, the back ends of a process group that its script has made, or null. Raises
/// `ConfigError` where what is asked for cannot work.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "lists of text come so")]
pub(crate) fn collective_back_end(asked: &str, facts: Vec<String>) -> PyResult<String> {
    let facts: Vec<RankFacts> = facts
        .iter()
        .map(|text| serde_json::from_str(text))
        .collect::<Result<_, _>>()
        .map_err(|error| argument_error(format!("what a rank tells cannot be read: {error}")))?;
    let chosen = choose_collective_back_end(asked, &facts).map_err(argument_error)?;
    Ok(chosen.name().to_owned())
}
