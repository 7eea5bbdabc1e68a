//! Laws of the machine, over random programs, schedules and orders of events.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use proptest::prelude::*;
use shardwright_comm::Loss;
use shardwright_schedule::Schedule;

use super::simulation::Simulation;
use crate::FailureKind;

fn active() -> impl Strategy<Value = NonZeroU32> {
    (1_u32..5).prop_map(|active| NonZeroU32::new(active).unwrap())
}

fn schedules() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Simple),
        active().prop_map(|active| Schedule::Interleaved { active }),
        active().prop_map(|active| Schedule::Looped { active }),
        active().prop_map(|active| Schedule::ZeroBubble { active }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn all_work_finishes_with_one_worker_executing_and_no_response_lost(
        world in 1_u32..4, microbatches in 1_u32..6, schedule in schedules(), seed in any::<u64>(),
    ) {
        let mut simulation = Simulation::new(world, seed);
        for step in 1..4 {
            let ends = simulation.step(step, microbatches, &schedule);
            prop_assert!(ends.iter().all(Result::is_ok));
        }
        for rank in &simulation.ranks {
            let stats = rank.machine.stats();
            prop_assert_eq!(stats.live_requests + stats.unexpected_messages + stats.stale_messages, 0);
            prop_assert_eq!(stats.total.tasks, u64::from(rank.tasks_run));
            prop_assert_eq!(stats.workers_started, rank.workers.len() as u64);
            prop_assert_eq!(rank.weight_gradients_run, rank.weight_gradients_left);
        }
        prop_assert!(simulation.network.values().all(VecDeque::is_empty));
        prop_assert!(simulation.ballots.is_empty());
    }

    /// Any time before the rank that fails has voted; after its vote it runs no code of the script's until the step is over.
    /// What makes the law hold is the vote, not the root's word: the root says that the step has ended when it needs no
    /// answer any more, and weight gradients, reductions and hooks of other ranks may fail later. A rank succeeds only with
    /// the votes of all, so none has succeeded when one fails that has not voted, and none can: that vote never comes. Each
    /// of them is then in the step, or has not entered it, when the abort arrives, and fails with it.
    #[test]
    fn a_failure_anywhere_at_any_time_ends_the_step_on_every_rank_and_the_next_is_exact(
        world in 1_u32..4, microbatches in 1_u32..6, schedule in schedules(), seed in any::<u64>(), when in 0_u32..60,
    ) {
        let mut simulation = Simulation::new(world, seed);
        simulation.fail_after = Some(when);
        let ends = simulation.step(1, microbatches, &schedule);
        for (rank, end) in ends.iter().enumerate() {
            let expected = match simulation.failed_by {
                Some(by) if by == rank => Err(FailureKind::Local),
                Some(_) => Err(FailureKind::Remote),
                None => Ok(()),
            };
            prop_assert_eq!(*end, expected);
        }
        // Messages of the failed step may still be under way (EX-4, EX-9).
        simulation.fail_after = None;
        for step in 2..4 {
            let ends = simulation.step(step, microbatches, &schedule);
            prop_assert!(ends.iter().all(Result::is_ok));
        }
        for rank in &simulation.ranks {
            prop_assert_eq!(rank.machine.stats().live_requests, 0);
        }
    }

    #[test]
    fn a_rank_lost_at_any_time_ends_the_step_of_every_other_rank(
        world in 2_u32..4, microbatches in 1_u32..6, schedule in schedules(), seed in any::<u64>(),
        when in 0_u32..400, victim in 0_usize..4, orderly in any::<bool>(),
    ) {
        let mut simulation = Simulation::new(world, seed);
        simulation.victim = victim % world as usize;
        let loss = if orderly { Loss::Left(None) } else { Loss::Died };
        simulation.dies_after = Some((when, loss));
        let mut ends = Vec::new();
        // However late it dies, the step after that fails on every rank.
        for step in 1..100 {
            ends = simulation.step(step, microbatches, &schedule);
            let allowed = |end: &Result<(), FailureKind>| matches!(end, Ok(()) | Err(FailureKind::PeerLost));
            prop_assert!(ends.iter().all(allowed), "{:?}", ends);
            if ends.len() < world as usize && ends.iter().all(Result::is_err) {
                break;
            }
        }
        prop_assert_eq!(ends, vec![Err(FailureKind::PeerLost); world as usize - 1]);
    }
}
