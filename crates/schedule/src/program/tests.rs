//! Laws of programs.

mod laws;
mod references;
mod texts;

use std::num::NonZeroU32;

use proptest::prelude::*;
use shardwright_core::{MicrobatchId, StageId};

use super::{Action, ActionKind, Program, Reference, Shape};

fn shape(num_ranks: u32, num_microbatches: u32, stages_per_rank: u32) -> Shape {
    let positive = |number| NonZeroU32::new(number).expect("at least one");
    Shape {
        num_ranks: positive(num_ranks),
        num_microbatches: positive(num_microbatches),
        stages_per_rank: positive(stages_per_rank),
    }
}

fn references() -> impl Strategy<Value = Reference> {
    prop_oneof![
        Just(Reference::Simple),
        Just(Reference::Interleaved),
        Just(Reference::ZeroBubble)
    ]
}

fn actions() -> impl Strategy<Value = Action> {
    let kinds = prop::sample::select(ActionKind::ALL.to_vec());
    (0_u32..20, kinds, 0_u32..200).prop_map(|(stage, kind, microbatch)| Action {
        stage: StageId(stage),
        kind,
        microbatch: MicrobatchId(microbatch),
    })
}

/// Any lists of actions.
fn programs() -> impl Strategy<Value = Program> {
    prop::collection::vec(prop::collection::vec(actions(), 0..12), 1..6).prop_map(Program::new)
}

/// Complete programs in any order: few of them can be run.
fn complete_programs() -> impl Strategy<Value = Program> {
    (references(), 1_u32..4, 1_u32..4, 1_u32..3)
        .prop_filter_map(
            "rounds are even",
            |(reference, ranks, microbatches, stages)| {
                reference.program(shape(ranks, microbatches, stages)).ok()
            },
        )
        .prop_flat_map(|program| {
            let ranks = program.ranks().to_vec();
            let swaps = prop::collection::vec(
                (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
                0..6,
            );
            (Just(ranks), swaps)
        })
        .prop_map(|(mut ranks, swaps)| {
            // A few swaps, and not a shuffle, so that both answers are common.
            for (which, place) in swaps {
                let index = which.index(ranks.len());
                let actions = &mut ranks[index];
                if actions.len() > 1 {
                    let place = place.index(actions.len() - 1);
                    actions.swap(place, place + 1);
                }
            }
            Program::new(ranks)
        })
}
