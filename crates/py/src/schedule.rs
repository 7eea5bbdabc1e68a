//! Schedules as text: what they do, programs of files, and the fastest one for measured tasks.

use std::num::NonZeroU32;

use pyo3::prelude::*;
use shardwright_schedule::{Program, Schedule};
use shardwright_simulate::{StepTimes, Trial};

use crate::error::argument_error;

/// The text form of a program, from that or from the compute-only CSV of `torch.distributed.pipelining`.
///
/// Raises `ConfigError` for a text that is neither, with row, cell and value.
#[pyfunction]
pub(crate) fn read_program(text: &str) -> PyResult<String> {
    let program = Program::read(text).map_err(argument_error)?;
    Ok(program.to_string())
}

/// Whether a text is the name of a schedule, or a program itself, and not the path of one.
#[pyfunction]
pub(crate) fn is_schedule(text: &str) -> bool {
    shardwright_core::config::is_schedule(text)
}

/// Whether a schedule, given as text, runs backwards in two parts.
#[pyfunction]
pub(crate) fn splits_backward(schedule: &str) -> PyResult<bool> {
    let schedule: Schedule = schedule.parse().map_err(argument_error)?;
    Ok(schedule.splits_backward())
}

/// Step, nanoseconds of forward and backward work, seconds, and forward requests that were served.
type Times = (u64, u64, u64, f64, u64);
/// A schedule, the steps that were measured, their mean seconds, and the simulated seconds of a step under every
/// candidate.
type Chosen = (String, Vec<u64>, f64, Vec<(String, f64)>);

/// The fastest schedule with at most `active_microbatches` in flight, from what every rank of the pipeline did in its
/// first steps, the root's first; None while these are not enough.
#[pyfunction]
#[pyo3(signature = (ranks, *, microbatches, active_microbatches)
    -> "tuple[str, list[int], float, list[tuple[str, float]]] | None")]
pub(crate) fn choose_schedule(
    ranks: Vec<Vec<Times>>,
    microbatches: NonZeroU32,
    active_microbatches: NonZeroU32,
) -> PyResult<Option<Chosen>> {
    let of_step = |(step, forward, backward, seconds, visits)| StepTimes {
        step,
        forward,
        backward,
        seconds,
        visits,
    };
    let of_rank = |times: Vec<Times>| times.into_iter().map(of_step).collect();
    let ranks: Vec<Vec<StepTimes>> = ranks.into_iter().map(of_rank).collect();
    let Some(trial) = Trial::of(&ranks, microbatches) else {
        return Ok(None);
    };
    let choice =
        shardwright_simulate::choose_schedule(&trial.ranks, microbatches, active_microbatches)
            .map_err(argument_error)?;
    let candidates = choice.candidates.iter();
    let simulated =
        candidates.map(|(schedule, makespan)| (schedule.to_string(), makespan.as_secs_f64()));
    Ok(Some((
        choice.schedule.to_string(),
        trial.steps,
        trial.seconds,
        simulated.collect(),
    )))
}
