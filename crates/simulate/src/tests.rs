//! Laws of the simulations.

mod auto;
mod in_flight;
mod policies;
mod programs;
mod tuning;

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use shardwright_schedule::{Program, Reference, Shape};

use crate::{SimulatedStep, StageCosts, StepCosts};

fn nanos(nanoseconds: u64) -> Duration {
    Duration::from_nanos(nanoseconds)
}

fn positive(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("at least one")
}

fn reference(reference: Reference, ranks: u32, microbatches: u32, stages: u32) -> Program {
    let shape = Shape {
        num_ranks: positive(ranks),
        num_microbatches: positive(microbatches),
        stages_per_rank: positive(stages),
    };
    reference.program(shape).expect("to be defined")
}

fn split(forward: u64, input_gradient: u64, weight_gradient: u64) -> StageCosts {
    StageCosts::split(
        nanos(forward),
        nanos(input_gradient),
        nanos(weight_gradient),
    )
}

fn stage_costs() -> impl Strategy<Value = StageCosts> {
    (0_u64..6, 0_u64..6, 0_u64..6, 0_u64..9).prop_map(|(forward, input, weight, whole)| {
        StageCosts {
            full_backward: nanos(whole),
            ..split(forward, input, weight)
        }
    })
}

fn costs(num_stages: usize, num_microbatches: usize) -> impl Strategy<Value = StepCosts> {
    let stages = move || prop::collection::vec(stage_costs(), num_stages);
    prop_oneof![
        stages().prop_map(StepCosts::Same),
        prop::collection::vec(stages(), num_microbatches).prop_map(StepCosts::ByMicrobatch),
    ]
}

/// Busy and idle make the makespan, and no rank does two things at once.
fn check_slices(outcome: &SimulatedStep) {
    let mut ends = vec![Duration::ZERO; outcome.ranks.len()];
    for task in &outcome.tasks {
        let end = &mut ends[task.rank.0 as usize];
        assert!(
            *end <= task.start && task.start <= task.end,
            "{task:?} begins before {end:?}"
        );
        *end = task.end;
    }
    assert_eq!(ends.into_iter().max(), Some(outcome.makespan));
    for rank in &outcome.ranks {
        assert_eq!(rank.busy + rank.idle, outcome.makespan);
        assert!((0.0..=1.0).contains(&rank.bubble()));
    }
    let starts = outcome.tasks.iter().map(|task| (task.start, task.rank));
    assert!(starts.is_sorted());
}
