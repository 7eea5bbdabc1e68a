//! Schedules as text: what they do, programs of files, and the fastest one for measured tasks.

use std::num::NonZeroU32;
use std::time::Duration;

use pyo3::prelude::*;
use shardwright_schedule::{Program, Schedule};
use shardwright_simulate::RankTimes;

use crate::error::argument_error;

/// The text form of a program, from that or from the compute-only CSV of `torch.distributed.pipelining`.
///
/// Raises `ConfigError` for a text that is neither, with row, cell and value.
#[pyfunction]
pub(crate) fn read_program(text: &str) -> PyResult<String> {
    let program = Program::read(text).map_err(argument_error)?;
    Ok(program.to_string())
}

/// Whether a schedule, given as text, runs backwards in two parts.
#[pyfunction]
pub(crate) fn splits_backward(schedule: &str) -> PyResult<bool> {
    let schedule: Schedule = schedule.parse().map_err(argument_error)?;
    Ok(schedule.splits_backward())
}

/// The fastest schedule with at most `active_microbatches` in flight, from each rank's nanoseconds of forward and
/// backward work for a microbatch, and how many forward requests it serves for one; the root comes first.
///
/// Returns its text, and the simulated nanoseconds of a step under every candidate.
#[pyfunction]
#[pyo3(signature = (*, forward_ns: "list[int]", backward_ns: "list[int]", visits: "list[int]", microbatches,
    active_microbatches) -> "tuple[str, list[tuple[str, int]]]")]
pub(crate) fn choose_schedule(
    forward_ns: Vec<u64>,
    backward_ns: Vec<u64>,
    visits: Vec<u32>,
    microbatches: NonZeroU32,
    active_microbatches: NonZeroU32,
) -> PyResult<(String, Vec<(String, u64)>)> {
    let numbers = [forward_ns.len(), backward_ns.len(), visits.len()];
    if numbers != [numbers[0]; 3] || numbers[0] == 0 {
        return Err(argument_error(format!(
            "forward_ns, backward_ns and visits have {numbers:?} values; allowed is one for each rank"
        )));
    }
    let ranks = forward_ns.into_iter().zip(backward_ns).zip(visits);
    let ranks: Vec<_> = ranks
        .map(|((forward, backward), visits)| RankTimes {
            forward: Duration::from_nanos(forward),
            backward: Duration::from_nanos(backward),
            visits,
        })
        .collect();
    let choice = shardwright_simulate::choose_schedule(&ranks, microbatches, active_microbatches)
        .map_err(argument_error)?;
    let candidates = choice.candidates.iter().map(|(schedule, makespan)| {
        let nanoseconds = u64::try_from(makespan.as_nanos()).unwrap_or(u64::MAX);
        (schedule.to_string(), nanoseconds)
    });
    Ok((choice.schedule.to_string(), candidates.collect()))
}
