//! How many microbatches a schedule has in flight on each rank, and the order of a rank's tasks.

use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::{MicrobatchId, Phase, PipelineRank};
use shardwright_schedule::{ActionKind, Complete, Schedule};

use crate::costs::{Latency, StageCosts, StepCosts};
use crate::error::SimulationError;
use crate::outcome::{SimulatedStep, TaskKind};
use crate::policy::simulate_schedule;
use crate::program::simulate_program;
use crate::route::{Chain, Control};

/// The most microbatches in flight on each rank, if all stages take the same time: one stage for each rank, or the
/// stages of a program. Calls take no time, so that a real step may have fewer.
pub fn in_flight(
    schedule: &Schedule,
    num_ranks: NonZeroU32,
    num_microbatches: NonZeroU32,
) -> Result<Vec<u32>, SimulationError> {
    simulate_evenly(schedule, num_ranks, num_microbatches).map(|step| step.most_in_flight())
}

/// The forwards and backwards of a rank in the order in which they are expected, under the same assumptions. Gradients of
/// weights that are computed apart are not among them.
pub fn expected_order(
    schedule: &Schedule,
    num_ranks: NonZeroU32,
    rank: PipelineRank,
    num_microbatches: NonZeroU32,
) -> Result<Vec<(Phase, MicrobatchId)>, SimulationError> {
    let step = simulate_evenly(schedule, num_ranks, num_microbatches)?;
    let tasks = step.tasks.iter().filter(|task| task.rank == rank);
    let order = tasks.filter_map(|task| match task.kind {
        TaskKind::Action(ActionKind::Forward) => Some((Phase::Forward, task.microbatch)),
        TaskKind::Action(ActionKind::FullBackward | ActionKind::InputGradient) => {
            Some((Phase::Backward, task.microbatch))
        }
        TaskKind::Action(ActionKind::WeightGradient) | TaskKind::Turn => None,
    });
    Ok(order.collect())
}

fn simulate_evenly(
    schedule: &Schedule,
    num_ranks: NonZeroU32,
    num_microbatches: NonZeroU32,
) -> Result<SimulatedStep, SimulationError> {
    let millisecond = Duration::from_millis(1);
    let stage = StageCosts::split(millisecond, millisecond, millisecond);
    if let Schedule::Program(program) = schedule {
        // Complete first: a stage of any number may stand in a file.
        let num_stages = Complete::new(program)?.num_stages();
        let costs = StepCosts::Same(vec![stage; num_stages]);
        simulate_program(program, &costs, &Latency::NONE)
    } else {
        let chain = Chain {
            segments: (0..num_ranks.get()).map(PipelineRank).collect(),
            control: Control::Direct,
            root_turn: Duration::ZERO,
            root_backward: Duration::ZERO,
        };
        let costs = StepCosts::Same(vec![stage; chain.segments.len()]);
        simulate_schedule(schedule, &chain, num_microbatches, &costs, &Latency::NONE)
    }
}
