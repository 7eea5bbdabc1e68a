//! Chains and costs that chance gives.

use std::time::Duration;

use proptest::prelude::*;
use shardwright_core::PipelineRank;
use shardwright_simulate::{Chain, Control, StageCosts};

/// Of this size no two sums are the same: what comes first at one instant is chance in the server.
pub(super) fn times() -> impl Strategy<Value = Duration> {
    (1_u64..1 << 40).prop_map(Duration::from_nanos)
}

pub(super) fn cases() -> impl Strategy<Value = (Chain, Vec<Vec<StageCosts>>, Duration)> {
    let segments = (1_u32..5, prop::collection::vec(0_u32..4, 0..4)).prop_map(|(ranks, more)| {
        let mut segments: Vec<u32> = (0..ranks).collect();
        segments.extend(more.into_iter().map(|rank| rank % ranks));
        // A run of modules on another rank is one request.
        segments.dedup_by(|next, last| next == last && *next != 0);
        segments.into_iter().map(PipelineRank).collect()
    });
    let chains =
        (segments, times(), times()).prop_map(|(segments, root_turn, root_backward)| Chain {
            segments,
            control: Control::Star,
            root_turn,
            root_backward,
        });
    (chains, 1_usize..9, times()).prop_flat_map(|(chain, microbatches, latency)| {
        let stage = (times(), times(), times())
            .prop_map(|(forward, input, weight)| StageCosts::split(forward, input, weight));
        let row = prop::collection::vec(stage, chain.segments.len());
        let rows = prop::collection::vec(row, microbatches);
        (Just(chain), rows, Just(latency / 16))
    })
}
