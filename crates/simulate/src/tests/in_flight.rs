//! How many microbatches are in flight.

use std::sync::Arc;

use proptest::prelude::*;
use shardwright_schedule::{Reference, Schedule};

use super::{positive, reference};
use crate::in_flight;

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
