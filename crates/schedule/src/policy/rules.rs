//! What a policy decides, and what it does where it has no opinion of its own.

use crate::ready::{Progress, Ready, ReadyKind};

/// A policy's decisions. `active` is how many microbatches may be in flight at once, for a policy that bounds them.
pub(crate) trait Rules {
    /// Whether an item may run now.
    fn allows(&self, _item: &Ready, _progress: &Progress, _active: u32) -> bool {
        true
    }

    /// Which items go before which, the lowest first: backward work before forward work already begun, that before a
    /// new microbatch, and that before weight gradients, which nobody waits for.
    fn class(&self, kind: ReadyKind, _progress: &Progress, _active: u32) -> u8 {
        match kind {
            kind if kind.is_backward() => 0,
            ReadyKind::WeightGradient => 4,
            ReadyKind::RootForward => 3,
            _ => 2,
        }
    }

    /// What goes before the number of the microbatch within a class: its group, and which visit of this rank it is at.
    fn round(&self, _item: &Ready, _active: u32) -> (u32, u32) {
        (0, 0)
    }

    /// Whether a backward is split into input gradients and weight gradients.
    fn splits_backward(&self) -> bool {
        false
    }

    /// Whether it fills and drains a pipeline that so many microbatches keep busy once, and what a rank does costs the
    /// same wherever it stands.
    fn fills_once(&self, _busy: u32, _active: u32) -> bool {
        false
    }

    /// Whether it asks for the turns that a rank has begun.
    fn counts_turns(&self) -> bool {
        false
    }
}
