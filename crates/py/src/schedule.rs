//! Schedules as text: what they do, programs of files, and the fastest one for measured tasks.

use std::num::NonZeroU32;

use pyo3::prelude::*;
use shardwright_schedule::{Program, Schedule};
use shardwright_simulate::{Measured, Plan, StepLoad, StepTimes, Trial, latency_of, tune};

use crate::error::argument_error;
use crate::simulate::parse_control;

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
/// first steps, the root's first; None while these are not enough. `control` is how it goes from rank to rank, as for
/// `simulate`.
#[pyfunction]
#[pyo3(signature = (ranks, *, microbatches, active_microbatches, control)
    -> "tuple[str, list[int], float, list[tuple[str, float]]] | None")]
pub(crate) fn choose_schedule(
    ranks: Vec<Vec<Times>>,
    microbatches: NonZeroU32,
    active_microbatches: NonZeroU32,
    control: &str,
) -> PyResult<Option<Chosen>> {
    let control = parse_control(control)?;
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
    let choice = shardwright_simulate::choose_schedule(
        &trial.ranks,
        microbatches,
        active_microbatches,
        control,
    )
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

/// Step; nanoseconds of the step, of forward work, of backward work and of weight gradients that were run apart; and
/// forward requests that were served.
type Loads = (u64, u64, u64, u64, u64, u64);
/// A schedule; by rank, of how many of the last microbatches the backward is in two parts; the simulated seconds of a
/// step; by rank the most microbatches in flight; and whether all ranks stay within their limits.
type PlanFields = (String, Vec<u32>, f64, Vec<u32>, bool);
/// The steps that were measured, the seconds of a message, what was chosen, the fastest plan that splits nothing, and the
/// one that splits all.
type TunedFields = (Vec<u64>, f64, PlanFields, PlanFields, Option<PlanFields>);

/// How many microbatches are in flight, and which backwards are in two parts, from what every rank of the pipeline did in
/// its first steps, the root's first, and by rank the bytes that a microbatch keeps and that all together may keep.
/// Returns the number of steps that count, and the choice; None while these are not enough. `control` is how it goes from
/// rank to rank, as for `simulate`.
#[pyfunction]
#[pyo3(signature = (ranks, memory, *, microbatches, active_microbatches, may_split, control)
    -> "tuple[int, tuple[list[int], float, tuple[str, list[int], float, list[int], bool], tuple[str, list[int], float, list[int], bool], tuple[str, list[int], float, list[int], bool] | None] | None]")]
pub(crate) fn tune_schedule(
    ranks: Vec<Vec<Loads>>,
    memory: Vec<(u64, Option<u64>)>,
    microbatches: NonZeroU32,
    active_microbatches: NonZeroU32,
    may_split: bool,
    control: &str,
) -> PyResult<(usize, Option<TunedFields>)> {
    let of_step = |(step, duration, forward, backward, weight, visits)| StepLoad {
        step,
        duration,
        forward,
        backward,
        weight,
        visits,
    };
    let of_rank = |loads: Vec<Loads>| loads.into_iter().map(of_step).collect();
    let ranks: Vec<Vec<StepLoad>> = ranks.into_iter().map(of_rank).collect();
    let number = Measured::num_steps(&ranks);
    let Some(mut measured) = Measured::of(&ranks, microbatches) else {
        return Ok((number, None));
    };
    for (load, (microbatch, free)) in measured.ranks.iter_mut().zip(memory) {
        load.microbatch_bytes = microbatch;
        load.free_bytes = free;
    }
    let control = parse_control(control)?;
    // Until the choice, no more are in flight than there are ranks.
    let num_ranks = u32::try_from(measured.ranks.len()).unwrap_or(u32::MAX);
    let active_until_now = NonZeroU32::new(num_ranks)
        .map_or(active_microbatches, |ranks| ranks.min(active_microbatches));
    let latency = latency_of(
        &measured.ranks,
        microbatches,
        active_until_now,
        control,
        measured.whole,
    )
    .map_err(argument_error)?;
    let tuned = tune(
        &measured.ranks,
        microbatches,
        active_microbatches,
        may_split,
        control,
        latency,
    )
    .map_err(argument_error)?;
    let fields = |plan: Plan| {
        let schedule = plan.schedule.to_string();
        let seconds = plan.makespan.as_secs_f64();
        (schedule, plan.splits, seconds, plan.in_flight, plan.fits)
    };
    let plans = (
        fields(tuned.chosen),
        fields(tuned.whole),
        tuned.all_split.map(fields),
    );
    let fields = (
        measured.steps,
        latency.as_secs_f64(),
        plans.0,
        plans.1,
        plans.2,
    );
    Ok((number, Some(fields)))
}
