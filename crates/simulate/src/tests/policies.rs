use std::time::Duration;

use proptest::prelude::*;
use shardwright_core::PipelineRank;
use shardwright_schedule::{ActionKind, Reference, Schedule};

use super::{check_slices, costs, nanos, positive, reference, split};
use crate::{
    Chain, Control, Latency, SimulatedStep, StepCosts, TaskKind, simulate_program,
    simulate_schedule,
};

fn chain(segments: &[u32], control: Control) -> Chain {
    Chain {
        segments: segments.iter().copied().map(PipelineRank).collect(),
        control,
        root_turn: Duration::ZERO,
        root_backward: Duration::ZERO,
    }
}

fn schedules() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        Just(Schedule::Simple),
        (1_u32..6).prop_map(|active| Schedule::Interleaved {
            active: positive(active)
        }),
        (1_u32..6).prop_map(|active| Schedule::Looped {
            active: positive(active)
        }),
        (1_u32..6).prop_map(|active| Schedule::ZeroBubble {
            active: positive(active)
        }),
    ]
}

fn chains() -> impl Strategy<Value = Chain> {
    let controls = prop::sample::select(&[Control::Star, Control::Direct, Control::Predicted]);
    (
        1_u32..4,
        prop::collection::vec(0_u32..4, 0..5),
        controls,
        0_u64..3,
        0_u64..3,
    )
        .prop_map(|(ranks, more, control, root_turn, root_backward)| {
            let mut segments: Vec<u32> = (0..ranks).collect();
            segments.extend(more.into_iter().map(|rank| rank % ranks));
            Chain {
                root_turn: nanos(root_turn),
                root_backward: nanos(root_backward),
                ..chain(&segments, control)
            }
        })
}

fn cases() -> impl Strategy<Value = (Schedule, Chain, u32, StepCosts, Latency)> {
    (schedules(), chains(), 1_u32..7, 0_u64..4).prop_flat_map(
        |(schedule, chain, microbatches, latency)| {
            let costs = costs(chain.segments.len(), microbatches as usize);
            let latency = Latency::Uniform(nanos(latency));
            (
                Just(schedule),
                Just(chain),
                Just(microbatches),
                costs,
                Just(latency),
            )
        },
    )
}

fn run(schedule: &Schedule, chain: &Chain, microbatches: u32, costs: &StepCosts) -> SimulatedStep {
    let microbatches = positive(microbatches);
    simulate_schedule(schedule, chain, microbatches, costs, &Latency::NONE).expect("a good chain")
}

fn named(tasks: &SimulatedStep, name: &str) -> usize {
    let tasks = tasks.tasks.iter();
    tasks.filter(|task| task.kind.name() == name).count()
}

proptest! {
    #[test]
    fn every_task_runs_once_and_slices_do_not_overlap(
        (schedule, chain, microbatches, costs, latency) in cases(),
    ) {
        let outcome = simulate_schedule(&schedule, &chain, positive(microbatches), &costs, &latency);
        let outcome = outcome.expect("a good chain");
        check_slices(&outcome);
        let all = chain.segments.len() * microbatches as usize;
        let is_split = schedule.splits_backward();
        prop_assert_eq!(named(&outcome, "forward"), all);
        prop_assert_eq!(named(&outcome, "backward"), if is_split { 0 } else { all });
        prop_assert_eq!(named(&outcome, "input_gradient"), if is_split { all } else { 0 });
        prop_assert_eq!(named(&outcome, "weight_gradient"), if is_split { all } else { 0 });
        for microbatch in 0..microbatches {
            let way = outcome.tasks.iter().filter(|task| task.microbatch.0 == microbatch);
            let way = way.filter(|task| task.kind.name() != "weight_gradient");
            let alone: Duration = way.map(crate::TaskSpan::duration).sum();
            prop_assert!(outcome.makespan >= alone);
        }
        // The same numbers each time.
        let again = simulate_schedule(&schedule, &chain, positive(microbatches), &costs, &latency);
        prop_assert_eq!(Ok(outcome), again);
    }

    #[test]
    fn forwards_come_before_backwards_and_weight_gradients_after_them(
        (schedule, chain, microbatches, costs, latency) in cases(),
    ) {
        let outcome = simulate_schedule(&schedule, &chain, positive(microbatches), &costs, &latency);
        let outcome = outcome.expect("a good chain");
        for task in &outcome.tasks {
            let TaskKind::Action(kind) = task.kind else { continue };
            let before = outcome.tasks.iter().filter(|other| other.microbatch == task.microbatch);
            let before = before.filter(|other| match (kind.letter(), other.kind.name()) {
                ('F', "forward") => other.stage < task.stage,
                ('B', "backward") | ('I', "input_gradient") => other.stage > task.stage,
                ('B' | 'I', "forward") => true,
                ('W', "input_gradient") => other.stage == task.stage,
                _ => false,
            });
            for other in before {
                prop_assert!(other.end <= task.start, "{other:?} {task:?}");
            }
        }
    }

    #[test]
    fn one_rank_is_always_busy(schedule in schedules(), microbatches in 1_u32..7, stages in 1_usize..4) {
        let chain = chain(&vec![0; stages], Control::Star);
        let outcome = run(&schedule, &chain, microbatches, &StepCosts::Same(vec![split(3, 2, 1); stages]));
        prop_assert_eq!(outcome.makespan, nanos(6 * stages as u64 * u64::from(microbatches)));
        prop_assert_eq!(outcome.ranks[0].idle, Duration::ZERO);
    }

    #[test]
    fn simple_has_its_closed_form(
        ranks in 1_u32..6, microbatches in 1_u32..9, forward in 0_u64..9, backward in 0_u64..9,
        control in prop::sample::select(&[Control::Star, Control::Direct]),
    ) {
        let chain = chain(&(0..ranks).collect::<Vec<_>>(), Control::Direct);
        let chain = Chain { control, ..chain };
        let costs = StepCosts::Same(vec![split(forward, backward, 0); ranks as usize]);
        // By way of a root that computes itself, control may have to wait for its turn.
        let steps = u64::from(microbatches + ranks - 1) * (forward + backward);
        let makespan = run(&Schedule::Simple, &chain, microbatches, &costs).makespan;
        if control == Control::Direct {
            prop_assert_eq!(makespan, nanos(steps));
        } else {
            prop_assert!(makespan >= nanos(steps));
        }
    }

    #[test]
    fn at_most_so_many_microbatches_are_in_flight(
        active in 1_u32..5, (_, chain, microbatches, costs, latency) in cases(), which in 0_usize..3,
    ) {
        let active = positive(active);
        let schedule = match which {
            0 => Schedule::Interleaved { active },
            1 => Schedule::Looped { active },
            _ => Schedule::ZeroBubble { active },
        };
        let outcome = simulate_schedule(&schedule, &chain, positive(microbatches), &costs, &latency);
        let outcome = outcome.expect("a good chain");
        let of = |microbatch: u32| {
            let root = outcome.tasks.iter().filter(move |task| task.rank.0 == 0);
            root.filter(move |task| task.microbatch.0 == microbatch)
        };
        for late in active.get()..microbatches {
            let start = of(late).map(|task| task.start).min();
            let ended = (0..late).filter(|early| of(*early).map(|task| task.end).max() <= start);
            prop_assert!(ended.count() as u32 + active.get() > late);
        }
    }
}

#[test]
fn where_calls_are_predicted_interleaved_is_as_fast_as_the_textbook_s() {
    for (ranks, microbatches) in [(2, 8), (4, 8), (4, 16), (3, 2)] {
        let chain = chain(&(0..ranks).collect::<Vec<_>>(), Control::Predicted);
        let costs = StepCosts::Same(vec![split(10, 10, 10); ranks as usize]);
        let schedule = Schedule::Interleaved {
            active: positive(ranks),
        };
        let program = reference(Reference::Interleaved, ranks, microbatches, 1);
        let textbook = simulate_program(&program, &costs, &Latency::NONE).expect("to be complete");
        let makespan = run(&schedule, &chain, microbatches, &costs).makespan;
        assert_eq!(makespan, textbook.makespan);
    }
}

#[test]
fn where_calls_are_predicted_looped_is_as_fast_as_the_textbook_s() {
    let split = split(10, 10, 10);
    for (ranks, rounds, microbatches, expected) in [
        (2, 2, 8, Some(510)),
        (4, 2, 8, Some(570)),
        (4, 2, 16, None),
        (2, 3, 8, None),
        (4, 3, 8, None),
        (3, 2, 6, None),
    ] {
        let segments: Vec<u32> = (0..rounds).flat_map(|_| 0..ranks).collect();
        let costs = StepCosts::Same(vec![split; segments.len()]);
        let schedule = Schedule::Looped {
            active: positive(2 * ranks),
        };
        let program = reference(Reference::Interleaved, ranks, microbatches, rounds);
        let textbook = simulate_program(&program, &costs, &Latency::NONE).expect("to be complete");
        let chain = chain(&segments, Control::Predicted);
        let makespan = run(&schedule, &chain, microbatches, &costs).makespan;
        assert_eq!(
            makespan, textbook.makespan,
            "{ranks} {rounds} {microbatches}"
        );
        assert!(expected.is_none_or(|expected| makespan == nanos(expected)));
        // `interleaved` does not fill what the rounds leave open.
        let schedule = Schedule::Interleaved {
            active: positive(2 * ranks),
        };
        assert!(makespan < run(&schedule, &chain, microbatches, &costs).makespan);
    }
}

#[test]
fn a_backward_that_the_root_asks_for_beforehand_waits_for_its_forward_and_for_the_root_s_word() {
    let schedule = Schedule::Interleaved {
        active: positive(1),
    };
    let backward = |outcome: &SimulatedStep, stage: u32| {
        let kind = TaskKind::Action(ActionKind::FullBackward);
        let mut tasks = outcome.tasks.iter();
        let found = tasks.find(|task| task.kind == kind && task.stage.0 == stage);
        found.expect("to have run").start
    };
    // From rank 0 at 10, at rank 1 from 13 to 23; the root's word was there at 13.
    let costs = StepCosts::Same(vec![split(10, 10, 10); 2]);
    let latency = Latency::Uniform(nanos(3));
    let chain = chain(&[0, 1], Control::Predicted);
    let outcome = simulate_schedule(&schedule, &chain, positive(1), &costs, &latency);
    assert_eq!(backward(&outcome.expect("a good chain"), 1), nanos(23));
    // A forward that is over before the root's word is there.
    let costs = StepCosts::Same(vec![split(10, 10, 10), split(0, 10, 10)]);
    let outcome = simulate_schedule(&Schedule::Simple, &chain, positive(4), &costs, &latency);
    assert_eq!(backward(&outcome.expect("a good chain"), 1), nanos(43));
}

#[test]
fn a_microbatch_s_way_is_that_of_the_server() {
    let chain = Chain {
        root_turn: nanos(1),
        root_backward: nanos(2),
        ..chain(&[0, 1, 2, 0], Control::Star)
    };
    let costs = StepCosts::Same(vec![split(10, 20, 5); 4]);
    let schedule = "zero_bubble(active=1)".parse().expect("to be a schedule");
    let latency = Latency::Uniform(nanos(3));
    let outcome =
        simulate_schedule(&schedule, &chain, positive(1), &costs, &latency).expect("to run");
    let lines: Vec<String> = outcome
        .tasks
        .iter()
        .map(|task| {
            let (rank, name, stage) = (task.rank, task.kind.name(), task.stage);
            format!(
                "{rank} {name} {stage}: {} to {}",
                task.start.as_nanos(),
                task.end.as_nanos()
            )
        })
        .collect();
    let expected = [
        "0 forward 0: 0 to 10",
        "1 forward 1: 13 to 23",
        "0 turn 2: 26 to 27",
        "2 forward 2: 30 to 40",
        "0 forward 3: 43 to 53",
        "0 turn 3: 53 to 55",
        "0 input_gradient 3: 55 to 75",
        "0 weight_gradient 3: 75 to 80",
        "2 input_gradient 2: 78 to 98",
        "2 weight_gradient 2: 98 to 103",
        "0 turn 1: 101 to 102",
        "1 input_gradient 1: 105 to 125",
        "1 weight_gradient 1: 125 to 130",
        "0 input_gradient 0: 128 to 148",
        "0 weight_gradient 0: 148 to 153",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn splitting_the_backward_shortens_the_step() {
    let chain = chain(&[0, 1, 2, 3], Control::Direct);
    let costs = StepCosts::Same(vec![split(10, 10, 10); 4]);
    let makespan = |text: &str| {
        let schedule = text.parse().expect("to be a schedule");
        run(&schedule, &chain, 8, &costs).makespan.as_nanos()
    };
    assert_eq!(makespan("simple"), 330);
    // 330 would be ideal, but the root starts every backward, and may be in a task when one is due.
    assert_eq!(makespan("interleaved(active=8)"), 360);
    // Shorter tasks let it in earlier, and there is other work meanwhile: as short as the program.
    assert_eq!(makespan("zero_bubble(active=8)"), 270);
}

#[test]
fn chains_that_do_not_fit_are_refused() {
    let simulate = |segments: &[u32]| {
        let costs = StepCosts::Same(vec![split(1, 1, 1); segments.len()]);
        let chain = chain(segments, Control::Star);
        simulate_schedule(
            &Schedule::Simple,
            &chain,
            positive(1),
            &costs,
            &Latency::NONE,
        )
        .unwrap_err()
        .to_string()
    };
    let not_root = "the first one has to be on rank 0, the root";
    assert_eq!(
        simulate(&[]),
        format!("the segments are on ranks []; {not_root}")
    );
    assert_eq!(
        simulate(&[1, 0]),
        format!("the segments are on ranks [1, 0]; {not_root}")
    );
    assert_eq!(
        simulate(&[0, 1, 3]),
        "no segment is on rank 2; allowed are segments on all ranks from 0 to 3, the highest that occurs"
    );
}
