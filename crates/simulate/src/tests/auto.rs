//! The choice of a schedule from measured times.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use shardwright_schedule::Schedule;

use crate::{Control, RankTimes, ScheduleChoice, choose_schedule};

fn rank(forward: u64, backward: u64, visits: u32) -> RankTimes {
    RankTimes {
        forward: Duration::from_millis(forward),
        backward: Duration::from_millis(backward),
        visits,
    }
}

fn choose(ranks: &[RankTimes], microbatches: u32, active: u32) -> ScheduleChoice {
    let number = |number| NonZeroU32::new(number).expect("positive");
    choose_schedule(ranks, number(microbatches), number(active), Control::Star)
        .expect("a good chain")
}

fn active(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("positive")
}

#[test]
fn even_ranks_fill_the_pipeline_with_weight_gradients() {
    let choice = choose(&[rank(10, 20, 0), rank(10, 20, 1)], 8, 4);
    assert!(
        matches!(choice.schedule, Schedule::ZeroBubble { .. }),
        "{}",
        choice.schedule
    );
}

#[test]
fn a_rank_that_does_nearly_all_needs_no_second_microbatch_for_long() {
    // Whatever runs on the other rank hides behind this one with two in flight.
    let choice = choose(&[rank(1, 2, 0), rank(100, 200, 1)], 8, 4);
    assert_eq!(choice.schedule, Schedule::Interleaved { active: active(1) });
    let choice = choose(&[rank(10, 20, 0), rank(100, 200, 1)], 8, 4);
    assert_eq!(choice.schedule, Schedule::Interleaved { active: active(2) });
}

#[test]
fn no_more_microbatches_are_in_flight_than_allowed() {
    let ranks = [rank(10, 20, 0), rank(10, 20, 1), rank(10, 20, 1)];
    let choice = choose(&ranks, 8, 2);
    assert!(
        !choice
            .candidates
            .iter()
            .any(|(schedule, _)| *schedule == Schedule::Simple)
    );
    assert_eq!(choice.candidates.len(), 4);
    let choice = choose(&ranks, 2, 6);
    assert!(
        choice
            .candidates
            .iter()
            .any(|(schedule, _)| *schedule == Schedule::Simple)
    );
    assert_eq!(choice.candidates.len(), 5);
}

#[test]
fn looped_is_tried_only_where_a_rank_is_visited_more_than_once() {
    let tried = |visits| {
        let choice = choose(&[rank(10, 20, 0), rank(10, 20, visits)], 8, 4);
        let looped =
            |(schedule, _): &&(Schedule, Duration)| matches!(schedule, Schedule::Looped { .. });
        choice.candidates.iter().filter(looped).count()
    };
    assert_eq!([1, 2, 3].map(tried), [0, 4, 4]);
}

#[test]
fn a_rank_without_work_is_no_error() {
    let choice = choose(&[rank(10, 20, 0), rank(0, 0, 0)], 4, 4);
    assert_eq!(choice.schedule, Schedule::Interleaved { active: active(1) });
}

proptest! {
    #[test]
    fn the_choice_is_near_the_fastest_and_always_the_same(
        times in prop::collection::vec((0_u64..50, 0_u64..100, 0_u32..3), 1..4),
        microbatches in 1_u32..6,
        in_flight in 1_u32..6,
    ) {
        let ranks: Vec<_> = times.iter().map(|(f, b, visits)| rank(*f, *b, *visits)).collect();
        let choice = choose(&ranks, microbatches, in_flight);
        let chosen = choice.candidates.iter().find(|(schedule, _)| *schedule == choice.schedule);
        let fastest = choice.candidates.iter().map(|(_, time)| *time).min().expect("there are some");
        prop_assert!(chosen.expect("it is a candidate").1 <= fastest.mul_f64(1.0 + crate::MARGIN));
        prop_assert_eq!(choose(&ranks, microbatches, in_flight), choice);
    }
}
