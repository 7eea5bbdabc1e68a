//! How many microbatches are in flight.

use std::sync::Arc;

use proptest::prelude::*;
use shardwright_core::{Phase, PipelineRank};
use shardwright_schedule::{Reference, Schedule};

use super::{positive, reference};
use crate::{expected_order, in_flight};

fn of(schedule: &str, ranks: u32, microbatches: u32) -> Vec<u32> {
    let schedule: Schedule = schedule.parse().expect("a schedule");
    in_flight(&schedule, positive(ranks), positive(microbatches)).expect("to be simulated")
}

#[test]
fn simple_keeps_all_and_interleaved_as_many_as_allowed() {
    assert_eq!(of("simple", 2, 8), [8, 8]);
    assert_eq!(of("interleaved(active=3)", 3, 8)[0], 3);
    assert_eq!(of("interleaved(active=4)", 1, 8), [1]);
}

#[test]
fn a_program_of_the_textbook_keeps_one_less_on_each_rank() {
    let program = reference(Reference::Interleaved, 4, 8, 1);
    let schedule = Schedule::Program(Arc::new(program));
    let found = in_flight(&schedule, positive(4), positive(8)).expect("to be simulated");
    assert_eq!(found, [4, 3, 2, 1]);
}

fn order(schedule: &str, ranks: u32, rank: u32) -> String {
    let schedule: Schedule = schedule.parse().expect("a schedule");
    let order = expected_order(&schedule, positive(ranks), PipelineRank(rank), positive(3));
    let text = |(phase, microbatch)| match phase {
        Phase::Forward => format!("{microbatch}F"),
        Phase::Backward => format!("{microbatch}B"),
    };
    let order = order.expect("to be simulated").into_iter().map(text);
    order.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_order_of_a_rank_is_that_of_its_schedule() {
    assert_eq!(order("simple", 2, 0), "0F 1F 2F 0B 1B 2B");
    assert_eq!(order("interleaved(active=1)", 2, 1), "0F 0B 1F 1B 2F 2B");
    assert_eq!(order("interleaved(active=3)", 1, 0), "0F 0B 1F 1B 2F 2B");
    assert_eq!(order("zero_bubble(active=3)", 2, 1), "0F 0B 1F 1B 2F 2B");
    assert_eq!(order("interleaved(active=3)", 2, 0), "0F 1F 2F 0B 1B 2B");
}

proptest! {
    #[test]
    fn no_more_than_allowed_and_at_least_one(
        active in 1_u32..6,
        ranks in 1_u32..5,
        microbatches in 1_u32..9,
        name in prop::sample::select(vec!["interleaved", "looped", "zero_bubble"]),
    ) {
        // What a weight gradient needs is kept until that is computed, while others begin.
        let allowed = if name == "zero_bubble" { microbatches } else { active.min(microbatches) };
        for most in of(&format!("{name}(active={active})"), ranks, microbatches) {
            prop_assert!(most >= 1 && most <= allowed);
        }
    }
}
