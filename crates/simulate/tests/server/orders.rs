//! Lists and programs on the server's own machines: they do what these say, in their order.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use shardwright_core::Phase;
use shardwright_core::{MicrobatchId, PipelineRank, StageId};
use shardwright_schedule::{
    Action as ProgramAction, ActionKind, Program, RootOrder, RootStart, Schedule,
};
use shardwright_simulate::{
    Chain, Control, Latency, StageCosts, StepCosts, TaskKind, simulate_schedule,
};

use super::Servers;
use super::draws::{cases, times};

/// A program in an order that chance gives: of what every rank could do next, one thing at a time.
fn programs() -> impl Strategy<Value = (Chain, Program, Vec<Vec<StageCosts>>, Duration)> {
    (2_u32..4, 1_u32..4, 1_u32..5, any::<bool>(), times())
        .prop_flat_map(|(ranks, per_rank, microbatches, splits, latency)| {
            let num_stages = (ranks * per_rank) as usize;
            let parts = if splits { 3 } else { 2 };
            let number = num_stages * microbatches as usize * parts;
            let stage = (times(), times(), times())
                .prop_map(|(forward, input, weight)| StageCosts::split(forward, input, weight));
            let row = prop::collection::vec(stage, num_stages);
            (
                Just((ranks, num_stages as u32, microbatches, splits, latency / 16)),
                prop::collection::vec(any::<prop::sample::Index>(), number),
                prop::collection::vec(row, microbatches as usize),
            )
        })
        .prop_map(
            |((ranks, num_stages, microbatches, splits, latency), draws, costs)| {
                let segments = (0..num_stages).map(|stage| PipelineRank(stage % ranks));
                let chain = Chain {
                    segments: segments.collect(),
                    control: Control::Star,
                    root_turn: Duration::ZERO,
                    root_backward: Duration::ZERO,
                };
                let program = draw_program(ranks, num_stages, microbatches, splits, &draws);
                (chain, program, costs, latency)
            },
        )
}

fn draw_program(
    ranks: u32,
    num_stages: u32,
    microbatches: u32,
    splits: bool,
    draws: &[prop::sample::Index],
) -> Program {
    let backward = if splits {
        ActionKind::InputGradient
    } else {
        ActionKind::FullBackward
    };
    let mut order = vec![Vec::new(); ranks as usize];
    // By microbatch: how far it is along the chain and back, and whose weight gradients are left.
    let mut done: Vec<(u32, Vec<u32>)> = (0..microbatches).map(|_| (0, Vec::new())).collect();
    for draw in draws {
        let mut possible = Vec::new();
        for (microbatch, (steps, weights)) in done.iter().enumerate() {
            let microbatch = MicrobatchId(microbatch as u32);
            if *steps < num_stages {
                possible.push((*steps, ActionKind::Forward, microbatch));
            } else if *steps < 2 * num_stages {
                possible.push((2 * num_stages - 1 - steps, backward, microbatch));
            }
            possible.extend(
                weights
                    .iter()
                    .map(|stage| (*stage, ActionKind::WeightGradient, microbatch)),
            );
        }
        let (stage, kind, microbatch) = *draw.get(&possible);
        let (steps, weights) = &mut done[microbatch.0 as usize];
        match kind {
            ActionKind::WeightGradient => weights.retain(|left| *left != stage),
            _ => *steps += 1,
        }
        if kind == ActionKind::InputGradient {
            weights.push(stage);
        }
        let stage = StageId(stage);
        order[(stage.0 % ranks) as usize].push(ProgramAction {
            stage,
            kind,
            microbatch,
        });
    }
    Program::new(order)
}

proptest! {
    #[test]
    fn every_rank_does_what_its_program_says_in_its_order((chain, program, costs, latency) in programs()) {
        prop_assert_eq!(program.validate(), Ok(()));
        let schedule = Schedule::Program(Arc::new(program.clone()));
        let slices = Servers::new(schedule, &chain, &costs, latency).run();
        let mut done = vec![Vec::new(); program.ranks().len()];
        for (rank, stage, kind, microbatch, ..) in slices {
            if let TaskKind::Action(kind) = kind {
                let action = ProgramAction { stage: StageId(stage), kind, microbatch: MicrobatchId(microbatch) };
                done[rank as usize].push(action);
            }
        }
        prop_assert_eq!(Program::new(done).to_string(), program.to_string());
    }

    #[test]
    fn the_root_starts_what_its_list_says_in_its_order(
        (chain, costs, latency) in cases(), draws in prop::collection::vec(any::<prop::sample::Index>(), 16),
    ) {
        let num_microbatches = costs.len();
        let mut entries = Vec::new();
        let mut in_flight = Vec::new();
        let mut left: Vec<u32> = (0..num_microbatches as u32).collect();
        for draw in draws.iter().take(2 * num_microbatches) {
            let index = draw.index(left.len() + in_flight.len());
            let (from, phase) = match index.checked_sub(left.len()) {
                None => (left.remove(index), Phase::Forward),
                Some(index) => (in_flight.remove(index), Phase::Backward),
            };
            if phase == Phase::Forward {
                in_flight.push(from);
            }
            entries.push(RootStart { microbatch: MicrobatchId(from), phase });
        }
        let order = RootOrder::new(entries.clone()).expect("each once, forward first");
        let schedule = Schedule::List(Arc::new(order));
        prop_assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()));
        let served = Servers::new(schedule.clone(), &chain, &costs, latency).run();
        let forwards: Vec<u32> = served
            .iter()
            .filter(|slice| slice.0 == 0 && slice.1 == 0 && slice.2 == TaskKind::Action(ActionKind::Forward))
            .map(|slice| slice.3)
            .collect();
        let listed = entries.iter().filter(|entry| entry.phase == Phase::Forward);
        prop_assert_eq!(forwards, listed.map(|entry| entry.microbatch.0).collect::<Vec<_>>());
        let microbatches = NonZeroU32::new(num_microbatches as u32).expect("at least one");
        let latency = Latency::Uniform(latency);
        let simulated =
            simulate_schedule(&schedule, &chain, microbatches, &StepCosts::ByMicrobatch(costs), &latency);
        prop_assert_eq!(served.len(), simulated.expect("a good chain").tasks.len());
    }
}
