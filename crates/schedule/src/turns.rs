//! What a rank has begun in a step, as far as a policy asks for it.

use std::collections::BTreeMap;

use shardwright_core::MicrobatchId;

use crate::policy::Schedule;
use crate::ready::ReadyKind;

/// The forward and backward turns that a rank has begun in a step. Counted only for a schedule that asks for them.
///
/// Closes and weight gradients are no turns in this sense: no stage of the model begins with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    counted: bool,
    /// By microbatch and whether they are backward.
    begun: BTreeMap<(MicrobatchId, bool), u32>,
    last_was_backward: bool,
}

impl Turns {
    /// Of a step that begins.
    pub fn of(schedule: &Schedule) -> Self {
        Self {
            counted: schedule.counts_turns(),
            ..Self::default()
        }
    }

    /// Which visit of its microbatch, in its direction, an item that becomes ready now will be; from zero.
    pub fn visit(&self, kind: ReadyKind, microbatch: MicrobatchId) -> u32 {
        let begun = self.begun.get(&(microbatch, kind.is_backward()));
        begun.copied().unwrap_or_default()
    }

    /// An item has the turn.
    pub fn begin(&mut self, kind: ReadyKind, microbatch: MicrobatchId) {
        let is_turn = !matches!(kind, ReadyKind::RequestClose | ReadyKind::WeightGradient);
        if !self.counted || !is_turn {
            return;
        }
        self.last_was_backward = kind.is_backward();
        *self
            .begun
            .entry((microbatch, self.last_was_backward))
            .or_default() += 1;
    }

    /// Whether the newest turn is a backward; not before the first one.
    pub fn last_was_backward(&self) -> bool {
        self.last_was_backward
    }
}
