use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use shardwright_core::{MicrobatchId, PipelineRank, StageId};
use shardwright_schedule::{Action, ActionKind, Complete, Program, ProgramError, Reference};

use super::{check_slices, costs, nanos, reference, split};
use crate::{Latency, SimulatedStep, SimulationError, StepCosts, TaskKind, simulate_program};

const REFERENCES: [Reference; 3] = [
    Reference::Simple,
    Reference::Interleaved,
    Reference::ZeroBubble,
];

fn latencies(num_ranks: usize) -> impl Strategy<Value = Latency> {
    let row = move || prop::collection::vec((0_u64..5).prop_map(nanos), num_ranks);
    prop_oneof![
        (0_u64..5).prop_map(|latency| Latency::Uniform(nanos(latency))),
        prop::collection::vec(row(), num_ranks).prop_map(Latency::ByPair),
    ]
}

/// Complete programs, some of which ranks cannot finish, with costs and latencies.
fn cases() -> impl Strategy<Value = (Program, StepCosts, Latency)> {
    let swaps = prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..4);
    let shapes = (
        prop::sample::select(&REFERENCES),
        1_u32..4,
        1_u32..4,
        1_u32..3,
    );
    (shapes, swaps)
        .prop_map(|((which, ranks, rounds, stages), swaps)| {
            // Several stages per rank need equal rounds.
            let microbatches = if stages == 1 { rounds } else { rounds * ranks };
            let program = reference(which, ranks, microbatches, stages);
            let mut lists = program.ranks().to_vec();
            for (rank, place) in swaps {
                let rank = rank.index(lists.len());
                let place = place.index(lists[rank].len() - 1);
                lists[rank].swap(place, place + 1);
            }
            (Program::new(lists), stages * ranks, microbatches)
        })
        .prop_flat_map(|(program, stages, microbatches)| {
            let num_ranks = program.ranks().len();
            let costs = costs(stages as usize, microbatches as usize);
            (Just(program), costs, latencies(num_ranks))
        })
}

fn cost(costs: &StepCosts, action: Action) -> Duration {
    costs.get(action.stage, action.microbatch).of(action.kind)
}

/// The same by brute force: nanosecond by nanosecond every rank begins what it can; `None` where
/// no rank ever can again.
fn tick_by_tick(program: &Program, costs: &StepCosts, latency: &Latency) -> Option<Duration> {
    let complete = Complete::new(program).expect("swaps leave it complete");
    let num_actions: usize = program.ranks().iter().map(Vec::len).sum();
    let mut ends: BTreeMap<Action, Duration> = BTreeMap::new();
    let mut positions = vec![0; program.ranks().len()];
    // Longer than everything in turn.
    let last = nanos(20 * num_actions as u64);
    let mut now = Duration::ZERO;
    while ends.len() < num_actions && now <= last {
        // Tasks without a length let others begin at the same instant.
        for _ in 0..=num_actions {
            for (index, actions) in program.ranks().iter().enumerate() {
                let rank = PipelineRank(index as u32);
                let position: &mut usize = &mut positions[index];
                let before = position.checked_sub(1).map(|before| actions[before]);
                let is_free = before.is_none_or(|before| ends[&before] <= now);
                let Some(action) = actions.get(*position) else {
                    continue;
                };
                let is_there = |needed: Action| {
                    let delay = latency.between(complete.rank(needed.stage), rank);
                    ends.get(&needed).is_some_and(|end| *end + delay <= now)
                };
                if is_free && complete.needs(*action).all(is_there) {
                    ends.insert(*action, now + cost(costs, *action));
                    *position += 1;
                }
            }
        }
        now += nanos(1);
    }
    (ends.len() == num_actions).then(|| ends.into_values().max().unwrap_or_default())
}

/// Forward and backward of one microbatch alone, without transfers.
fn alone(
    complete: &Complete<'_>,
    program: &Program,
    costs: &StepCosts,
    microbatch: u32,
) -> Duration {
    let actions = program.ranks().iter().flatten();
    let on_the_way = actions.filter(|action| {
        action.microbatch == MicrobatchId(microbatch) && action.kind != ActionKind::WeightGradient
    });
    assert!(complete.num_microbatches() > microbatch as usize);
    on_the_way.map(|action| cost(costs, *action)).sum()
}

proptest! {
    #[test]
    fn a_simulation_does_what_brute_force_does((program, costs, latency) in cases()) {
        let simulated = simulate_program(&program, &costs, &latency);
        let expected = tick_by_tick(&program, &costs, &latency);
        prop_assert_eq!(simulated.ok().map(|outcome| outcome.makespan), expected);
    }

    #[test]
    fn what_is_accepted_does_not_deadlock_and_the_other_way_round((program, costs, latency) in cases()) {
        let simulated = simulate_program(&program, &costs, &latency);
        match (program.validate(), simulated) {
            (Ok(()), Ok(_)) => {}
            (Err(error), Err(SimulationError::Program(found))) => prop_assert_eq!(error, found),
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn a_step_is_as_long_as_its_longest_part_at_least((program, costs, latency) in cases()) {
        let Ok(outcome) = simulate_program(&program, &costs, &latency) else {
            return Ok(());
        };
        check_slices(&outcome);
        let complete = Complete::new(&program).expect("it ran");
        for microbatch in 0..complete.num_microbatches() as u32 {
            prop_assert!(outcome.makespan >= alone(&complete, &program, &costs, microbatch));
        }
        for (rank, actions) in outcome.ranks.iter().zip(program.ranks()) {
            let work: Duration = actions.iter().map(|action| cost(&costs, *action)).sum();
            prop_assert_eq!(rank.busy, work);
        }
        check_order(&outcome, &complete, &latency);
    }

    #[test]
    fn even_costs_give_the_closed_forms(
        ranks in 1_u32..7, microbatches in 1_u32..12, stages in 1_u32..4,
        forward in 0_u64..9, input in 0_u64..9, weight in 0_u64..9,
    ) {
        let makespan = |program: &Program| makespan(program, (forward, input, weight));
        let backward = input + weight;
        let steps = u64::from(microbatches + ranks - 1);
        for which in [Reference::Simple, Reference::Interleaved] {
            let program = reference(which, ranks, microbatches, 1);
            prop_assert_eq!(makespan(&program), steps * (forward + backward));
        }
        // With several stages per rank the bubble is that of one stage.
        let microbatches = microbatches * ranks;
        let work = u64::from(microbatches * stages) * (forward + backward);
        let bubble = u64::from(ranks - 1) * (forward + backward);
        let program = reference(Reference::Interleaved, ranks, microbatches, stages);
        prop_assert_eq!(makespan(&program), work + bubble);
        let program = reference(Reference::Simple, ranks, microbatches, stages);
        prop_assert_eq!(makespan(&program), work + bubble);
    }

    #[test]
    fn zero_bubble_is_no_slower_than_interleaved(
        ranks in 1_u32..7, microbatches in 1_u32..12,
        forward in 0_u64..9, input in 0_u64..9, weight in 0_u64..9,
    ) {
        let unit = (forward, input, weight);
        let zero_bubble = makespan(&reference(Reference::ZeroBubble, ranks, microbatches, 1), unit);
        let interleaved = makespan(&reference(Reference::Interleaved, ranks, microbatches, 1), unit);
        prop_assert!(zero_bubble <= interleaved);
        // Where all three take as long, a third of the bubble is left.
        let even = makespan(&reference(Reference::ZeroBubble, ranks, microbatches + ranks, 1), (1, 1, 1));
        prop_assert_eq!(even, u64::from(3 * (microbatches + ranks) + ranks - 1));
    }
}

fn makespan(program: &Program, (forward, input, weight): (u64, u64, u64)) -> u64 {
    let num_stages = Complete::new(program).expect("a reference").num_stages();
    let costs = StepCosts::Same(vec![split(forward, input, weight); num_stages]);
    let outcome = simulate_program(program, &costs, &Latency::NONE).expect("a reference");
    outcome.makespan.as_nanos() as u64
}

/// Nothing starts before all that it needs has arrived.
fn check_order(outcome: &SimulatedStep, complete: &Complete<'_>, latency: &Latency) {
    let mut ends = BTreeMap::new();
    let action = |task: &crate::TaskSpan| {
        let TaskKind::Action(kind) = task.kind else {
            panic!("a program has no turns");
        };
        Action {
            stage: task.stage,
            kind,
            microbatch: task.microbatch,
        }
    };
    for task in &outcome.tasks {
        ends.insert(action(task), (task.rank, task.end));
    }
    for task in &outcome.tasks {
        for needed in complete.needs(action(task)) {
            let (rank, end) = ends[&needed];
            assert!(end + latency.between(rank, task.rank) <= task.start);
        }
    }
}

#[test]
fn the_timeline_of_a_small_step_is_this_one() {
    let program = reference(Reference::Interleaved, 2, 2, 1);
    let costs = StepCosts::Same(vec![split(10, 15, 5), split(10, 10, 10)]);
    let outcome = simulate_program(&program, &costs, &Latency::Uniform(nanos(3))).expect("to run");
    let lines: Vec<String> = outcome
        .tasks
        .iter()
        .map(|task| {
            let (rank, name, microbatch) = (task.rank, task.kind.name(), task.microbatch);
            format!(
                "{rank} {name} {microbatch}: {} to {}",
                task.start.as_nanos(),
                task.end.as_nanos()
            )
        })
        .collect();
    let expected = [
        "0 forward 0: 0 to 10",
        "0 forward 1: 10 to 20",
        "1 forward 0: 13 to 23",
        "1 backward 0: 23 to 43",
        "1 forward 1: 43 to 53",
        "0 backward 0: 46 to 66",
        "1 backward 1: 53 to 73",
        "0 backward 1: 76 to 96",
    ];
    assert_eq!(lines, expected);
    assert_eq!(
        (outcome.makespan, outcome.ranks[1].idle),
        (nanos(96), nanos(36))
    );
    assert!((outcome.bubble() - 72.0 / 192.0).abs() < 1e-9);
}

#[test]
fn a_deadlock_is_told_with_its_cycle() {
    let program = Program::from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").expect("to be read");
    let costs = StepCosts::Same(vec![split(1, 1, 1); 2]);
    let error = simulate_program(&program, &costs, &Latency::NONE).unwrap_err();
    let SimulationError::Program(ProgramError::Deadlock(deadlock)) = error else {
        panic!("{error}");
    };
    assert_eq!(deadlock.cycle.len(), 2);
    assert_eq!(deadlock.cycle[0].needs.stage, StageId(1));
}

#[test]
fn costs_and_latencies_of_another_shape_are_refused() {
    let program = reference(Reference::Simple, 2, 3, 1);
    let simulate = |costs: StepCosts, latency: Latency| {
        simulate_program(&program, &costs, &latency)
            .unwrap_err()
            .to_string()
    };
    let one = split(1, 1, 1);
    assert_eq!(
        simulate(StepCosts::Same(vec![one]), Latency::NONE),
        "costs of 1 stages are given; allowed are costs of all 2 stages"
    );
    assert_eq!(
        simulate(
            StepCosts::ByMicrobatch(vec![vec![one; 2]; 2]),
            Latency::NONE
        ),
        "costs of 2 microbatches are given; allowed are costs of all 3 microbatches"
    );
    let square = Latency::ByPair(vec![vec![nanos(0); 3]; 2]);
    assert_eq!(
        simulate(StepCosts::Same(vec![one; 2]), square),
        "latencies of 3 ranks are given; allowed are those between all 2 ranks"
    );
}
