//! What a step needs beyond what it began with, from samples between its tasks.

use shardwright_core::Phase;

/// The peak of the activations of a step.
///
/// Memory is sampled between tasks. Before the first backward, whatever was added is activations. Later gradients are
/// there too; they stay until the step's end, so that what is above the end is activations again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    baseline: u64,
    before_backward: u64,
    peak: u64,
    in_backward: bool,
}

impl Meter {
    /// Begins, with the bytes that are in use.
    pub const fn new(in_use: u64) -> Self {
        Self {
            baseline: in_use,
            before_backward: in_use,
            peak: in_use,
            in_backward: false,
        }
    }

    /// Notes the bytes in use when a task of `phase` is about to begin.
    pub fn sample(&mut self, in_use: u64, phase: Phase) {
        self.peak = self.peak.max(in_use);
        if !self.in_backward {
            self.before_backward = self.before_backward.max(in_use);
        }
        self.in_backward |= phase == Phase::Backward;
    }

    /// The most bytes of activations, when the tasks have ended with `in_use`.
    pub fn activations(&self, in_use: u64) -> u64 {
        let forward = self.before_backward - self.baseline;
        // Freed memory may stay with the allocator, or more than activations may have been freed.
        let end = in_use.max(self.baseline);
        forward.max(self.peak.saturating_sub(end))
    }
}
