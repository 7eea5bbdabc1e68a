//! As interleaved, with each backward split: its input gradients are handed on at once, its weight gradients fill what
//! would be idle time (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).

use super::{Rules, interleaved};
use crate::ready::{Progress, Ready, ReadyKind};

pub(super) struct Policy;

impl Rules for Policy {
    fn allows(&self, item: &Ready, progress: &Progress, active: u32) -> bool {
        item.kind != ReadyKind::RootForward || progress.active() + progress.deferred < active
    }

    fn class(&self, kind: ReadyKind, progress: &Progress, active: u32) -> u8 {
        // Weight gradients of as many microbatches as may be in flight hold their activations: they go before any
        // forward.
        if kind == ReadyKind::WeightGradient && progress.deferred >= active {
            return 1;
        }
        interleaved::Policy.class(kind, progress, active)
    }

    fn splits_backward(&self) -> bool {
        true
    }
}
