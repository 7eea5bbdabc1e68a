//! The choice of how many microbatches are in flight, and which backwards are split.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use shardwright_core::PipelineRank;
use shardwright_schedule::{ActionKind, Schedule};

use super::{nanos, positive, stage_costs};
use crate::auto::chain_of;
use crate::{
    Control, Latency, Measured, Plan, RankLoad, SimulatedStep, StageCosts, StepLoad, TaskKind,
    Tuned, latency_of, simulate_schedule, simulate_splits, tune,
};

fn loads() -> impl Strategy<Value = Vec<RankLoad>> {
    let free = prop::option::of(0_u64..30);
    let load = (stage_costs(), 0_u32..3, 0_u64..6, free).prop_map(
        |(costs, visits, microbatch_bytes, free_bytes)| RankLoad {
            costs,
            visits,
            microbatch_bytes,
            free_bytes,
        },
    );
    prop::collection::vec(load, 1..4)
}

/// Ranks alike, whose whole backward is quicker than its parts by a price.
fn even(ranks: usize, price: u64) -> Vec<RankLoad> {
    let costs = StageCosts {
        forward: nanos(100),
        full_backward: nanos(200),
        input_gradient: nanos(100 + price),
        weight_gradient: nanos(100),
    };
    let load = RankLoad {
        costs,
        visits: 1,
        microbatch_bytes: 1,
        free_bytes: None,
    };
    vec![load; ranks]
}

fn tuned(ranks: &[RankLoad], microbatches: u32, active: u32, control: Control) -> Tuned {
    tune(
        ranks,
        positive(microbatches),
        positive(active),
        true,
        control,
        Duration::ZERO,
    )
    .expect("a good chain")
}

fn controls() -> impl Strategy<Value = Control> {
    prop::sample::select(vec![Control::Star, Control::Direct, Control::Predicted])
}

fn run(ranks: &[RankLoad], plan: &Plan, microbatches: u32, control: Control) -> SimulatedStep {
    let costs: Vec<_> = ranks.iter().map(|rank| (rank.costs, rank.visits)).collect();
    let (chain, costs) = chain_of(&costs, control);
    let splits = Some(plan.splits.as_slice());
    let number = positive(microbatches);
    simulate_splits(
        &plan.schedule,
        &chain,
        number,
        &costs,
        &Latency::NONE,
        splits,
    )
    .expect("it has run before")
}

fn holds(ranks: &[RankLoad], in_flight: &[u32]) -> u64 {
    let held = ranks.iter().zip(in_flight);
    held.map(|(rank, number)| rank.microbatch_bytes * u64::from(*number))
        .sum()
}

proptest! {
    #[test]
    fn a_plan_keeps_its_limits_is_as_quick_as_whole_backwards_and_leaves_nothing_undone(
        ranks in loads(), microbatches in 1_u32..7, active in 1_u32..6, control in controls(),
    ) {
        let Tuned { chosen, whole, all_split } = tuned(&ranks, microbatches, active, control);
        let all_split = all_split.expect("backwards may be split");
        prop_assert!(chosen.schedule.active().expect("it is bounded").get() <= active);
        let least = Schedule::Interleaved { active: positive(1) };
        let costs: Vec<_> = ranks.iter().map(|rank| (rank.costs, rank.visits)).collect();
        let (chain, costs) = chain_of(&costs, control);
        let limits = |in_flight: &[u32]| ranks.iter().zip(in_flight).all(|(rank, number)| {
            rank.free_bytes.is_none_or(|free| rank.microbatch_bytes * u64::from(*number) <= free)
        });
        let one = simulate_schedule(&least, &chain, positive(microbatches), &costs, &Latency::NONE).expect("a good chain");
        // Where one in flight is within the limits, what is chosen is.
        prop_assert_eq!(chosen.fits, limits(&one.most_in_flight()));
        prop_assert_eq!(chosen.fits, limits(&chosen.in_flight));
        if chosen.fits {
            prop_assert!(chosen.makespan <= whole.makespan);
            // No 1F1B within the limits is quicker.
            for number in 1..=active {
                let schedule = Schedule::Interleaved { active: positive(number) };
                let step = simulate_schedule(&schedule, &chain, positive(microbatches), &costs, &Latency::NONE)
                    .expect("a good chain");
                if limits(&step.most_in_flight()) {
                    prop_assert!(chosen.makespan <= step.makespan, "{} is quicker", schedule);
                }
            }
            if all_split.fits && all_split.makespan <= chosen.makespan {
                prop_assert!(holds(&ranks, &chosen.in_flight) <= holds(&ranks, &all_split.in_flight));
            }
        }
        // The plan is what runs, and every backward has its weight gradients within the step.
        let step = run(&ranks, &chosen, microbatches, control);
        prop_assert_eq!(step.makespan, chosen.makespan);
        prop_assert_eq!(step.most_in_flight(), chosen.in_flight.clone());
        let of_kind = |kind| -> BTreeSet<_> {
            let tasks = step.tasks.iter().filter(|task| task.kind == TaskKind::Action(kind));
            tasks.map(|task| (task.rank, task.stage, task.microbatch)).collect()
        };
        let inputs = of_kind(ActionKind::InputGradient);
        prop_assert_eq!(&inputs, &of_kind(ActionKind::WeightGradient));
        let whole_ones = of_kind(ActionKind::FullBackward);
        prop_assert!(inputs.is_disjoint(&whole_ones));
        let both: BTreeSet<_> = inputs.union(&whole_ones).copied().collect();
        prop_assert_eq!(both, of_kind(ActionKind::Forward));
        for (rank, number) in chosen.splits.iter().enumerate() {
            let rank = PipelineRank(rank as u32);
            let split: BTreeSet<_> = inputs.iter().filter(|one| one.0 == rank).map(|one| one.2).collect();
            prop_assert_eq!(split.len() as u32, *number.min(&microbatches));
        }
        prop_assert_eq!(tuned(&ranks, microbatches, active, control).chosen, chosen);
    }

    #[test]
    fn a_split_that_costs_more_than_the_gaps_are_long_is_not_made(
        ranks in 1_usize..4, microbatches in 1_u32..7, control in controls(),
    ) {
        let chosen = tuned(&even(ranks, 10_000), microbatches, 4, control).chosen;
        prop_assert_eq!(chosen.splits, vec![0; ranks]);
    }
}

#[test]
fn two_even_ranks_need_no_more_in_flight_than_1f1b_and_split_only_what_is_waited_for() {
    let Tuned {
        chosen,
        whole,
        all_split,
    } = tuned(&even(2, 0), 8, 4, Control::Star);
    assert!(chosen.makespan < whole.makespan, "{chosen:?} {whole:?}");
    let all_split = all_split.expect("backwards may be split");
    assert!(chosen.makespan.as_secs_f64() <= 1.01 * all_split.makespan.as_secs_f64());
    assert_eq!((chosen.in_flight, chosen.splits[0]), (vec![2, 2], 2));
    assert!(all_split.in_flight[0] > 2);
}

#[test]
fn four_even_ranks_whose_calls_are_predicted_gain_by_splits() {
    let Tuned { chosen, whole, .. } = tuned(&even(4, 0), 8, 6, Control::Predicted);
    assert!(
        chosen.makespan.as_secs_f64() < 0.9 * whole.makespan.as_secs_f64(),
        "{chosen:?} {whole:?}"
    );
}

#[test]
fn a_limit_leaves_fewer_in_flight() {
    let mut ranks = even(3, 0);
    let free = tuned(&ranks, 8, 6, Control::Star).chosen;
    assert!(free.in_flight[0] > 2, "{free:?}");
    ranks[0].free_bytes = Some(2);
    let bound = tuned(&ranks, 8, 6, Control::Star).chosen;
    assert_eq!((bound.in_flight[0], bound.fits), (2, true));
    assert!(bound.makespan > free.makespan);
    ranks[2].free_bytes = Some(0);
    let none = tuned(&ranks, 8, 6, Control::Star).chosen;
    assert_eq!(
        (none.in_flight, none.splits, none.fits),
        (vec![1; 3], vec![0; 3], false)
    );
}

#[test]
fn a_measured_step_tells_what_a_message_takes_and_then_more_are_in_flight() {
    let ranks = even(2, 0);
    let (number, active, control) = (positive(8), positive(4), Control::Star);
    let costs: Vec<_> = ranks.iter().map(|rank| (rank.costs, rank.visits)).collect();
    let (chain, costs) = chain_of(&costs, control);
    let schedule = Schedule::Interleaved { active };
    let step_with = |latency| {
        simulate_schedule(
            &schedule,
            &chain,
            number,
            &costs,
            &Latency::Uniform(latency),
        )
        .expect("a good chain")
        .makespan
    };
    let found = |measured| latency_of(&ranks, number, active, control, measured).expect("a chain");
    assert_eq!(found(step_with(Duration::ZERO)), Duration::ZERO);
    for latency in [20, 60, 90].map(nanos) {
        let found = found(step_with(latency));
        assert!(found <= latency + nanos(1), "{found:?}, not {latency:?}");
        assert!(step_with(found) >= step_with(latency));
    }
    // No message takes longer than a task, however long the step took.
    assert_eq!(found(step_with(nanos(5000))), nanos(100));
    let active_with = |latency| {
        let tuned = tune(&ranks, number, active, true, control, latency).expect("a good chain");
        tuned.chosen.schedule.active().expect("it is bounded")
    };
    assert!(active_with(nanos(60)) > active_with(Duration::ZERO));
}

#[test]
fn interleaved_may_be_bound_too_and_splits_nothing() {
    let ranks = even(2, 0);
    let Tuned {
        chosen, all_split, ..
    } = tune(
        &ranks,
        positive(40),
        positive(4),
        false,
        Control::Star,
        Duration::ZERO,
    )
    .expect("a good chain");
    assert!(matches!(chosen.schedule, Schedule::Interleaved { .. }));
    assert_eq!((chosen.splits, all_split), (vec![0, 0], None));
}

#[test]
fn the_second_step_of_a_trial_counts_for_parts_and_the_third_for_whole_backwards() {
    let load = |step, backward, weight| StepLoad {
        step,
        duration: 1000 + step,
        forward: 400,
        backward,
        weight,
        visits: 4,
    };
    let steps = vec![
        load(1, 1, 1),
        load(2, 0, 0),
        load(3, 480, 440),
        load(5, 800, 0),
    ];
    let few = vec![steps[0], steps[2]];
    let ranks = vec![steps.clone(), steps.clone()];
    let Measured {
        steps: measured,
        whole,
        ranks: found,
    } = Measured::of(&ranks, positive(4)).expect("enough");
    assert_eq!((measured, whole), (vec![3, 5], nanos(1005)));
    let costs = StageCosts {
        forward: nanos(100),
        full_backward: nanos(200),
        input_gradient: nanos(120),
        weight_gradient: nanos(110),
    };
    assert_eq!((found[1].costs, found[1].visits), (costs, 1));
    assert_eq!(Measured::num_steps(&[steps.clone(), few.clone()]), 2);
    assert_eq!(Measured::of(&[steps, few], positive(4)), None);
}
