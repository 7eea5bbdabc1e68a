//! Running a program as it says: each rank its actions in order, each as soon as it can.

use std::time::Duration;

use shardwright_schedule::{Complete, Program, ProgramError};

use crate::costs::{Latency, StepCosts};
use crate::error::SimulationError;
use crate::outcome::{SimulatedStep, TaskKind, TaskSpan};

/// Simulates a program. A program that ranks cannot finish is an error that names who waits for
/// whom.
pub fn simulate_program(
    program: &Program,
    costs: &StepCosts,
    latency: &Latency,
) -> Result<SimulatedStep, SimulationError> {
    let complete = Complete::new(program)?;
    costs.check(complete.num_stages(), complete.num_microbatches())?;
    latency.check(program.ranks().len())?;
    let mut ends = vec![Duration::ZERO; complete.num_places()];
    let mut free_from = vec![Duration::ZERO; program.ranks().len()];
    let mut tasks = Vec::new();
    // In this order everything that decides when an action starts is known when it is reached.
    let walked = complete.walk(|rank, action| {
        let arrivals = complete.needs(action).map(|needed| {
            let from = complete.rank(needed.stage);
            ends[complete.place(needed)].saturating_add(latency.between(from, rank))
        });
        let free_from = &mut free_from[rank.0 as usize];
        let start = arrivals.max().unwrap_or_default().max(*free_from);
        let cost = costs.get(action.stage, action.microbatch).of(action.kind);
        let end = start.saturating_add(cost);
        *free_from = end;
        ends[complete.place(action)] = end;
        tasks.push(TaskSpan {
            rank,
            stage: action.stage,
            kind: TaskKind::Action(action.kind),
            microbatch: action.microbatch,
            start,
            end,
        });
    });
    walked.map_err(ProgramError::Deadlock)?;
    Ok(SimulatedStep::new(program.ranks().len(), tasks))
}
