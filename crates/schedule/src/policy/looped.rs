//! For several parts of the model on one rank: forward and backward alternate, and half of the microbatches in flight go
//! forward through all their parts while the other half goes backward (the interleaved schedule of Narayanan et al.,
//! "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021).
//!
//! Forwards go before backwards wherever the rank's last turn was a backward, new microbatches among forwards already
//! begun, and within a class items go by group of microbatches, then by visit of the rank: a group's next round begins
//! before the next group does.

use super::Rules;
use crate::ready::{Progress, Ready, ReadyKind};

pub(super) struct Policy;

impl Rules for Policy {
    fn allows(&self, item: &Ready, progress: &Progress, active: u32) -> bool {
        item.kind != ReadyKind::RootForward || progress.active() < active
    }

    fn class(&self, kind: ReadyKind, progress: &Progress, _: u32) -> u8 {
        match kind {
            // A close takes next to nothing.
            ReadyKind::RequestClose => 0,
            kind => 1 + u8::from(kind.is_backward() == progress.after_backward),
        }
    }

    fn round(&self, item: &Ready, active: u32) -> (u32, u32) {
        // One group goes forward while the group before it goes backward.
        let group = active.div_ceil(2);
        (item.microbatch.0 / group, item.visit)
    }

    fn counts_turns(&self) -> bool {
        true
    }
}
