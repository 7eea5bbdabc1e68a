//! What a policy sees: ready items, and how far the microbatches are.

use shardwright_core::MicrobatchId;

/// Why an item is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReadyKind {
    /// The step function of a microbatch may start (root only).
    RootForward,
    /// The step function of a microbatch has reached `model.backward` (root only).
    RootBackward,
    /// Another rank asks for a forward.
    RequestForward,
    /// Another rank asks for a backward.
    RequestBackward,
    /// Another rank says that a forward's frame is no longer needed.
    RequestClose,
    /// A suspended forward has all its responses.
    ResumeForward,
    /// A suspended backward has all its responses.
    ResumeBackward,
    /// The weight gradients of a backward whose input gradients have been handed on.
    WeightGradient,
}

impl ReadyKind {
    /// Whether the item is backward work that others wait for, or a close, which frees memory.
    pub fn is_backward(self) -> bool {
        match self {
            Self::RootBackward
            | Self::RequestBackward
            | Self::RequestClose
            | Self::ResumeBackward => true,
            Self::RootForward
            | Self::RequestForward
            | Self::ResumeForward
            | Self::WeightGradient => false,
        }
    }

    /// Whether the item is new work, which needs an idle worker; the others resume a suspended one.
    pub fn is_fresh(self) -> bool {
        match self {
            Self::RootForward
            | Self::RequestForward
            | Self::RequestBackward
            | Self::RequestClose
            | Self::WeightGradient => true,
            Self::RootBackward | Self::ResumeForward | Self::ResumeBackward => false,
        }
    }
}

/// Something that could run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Why.
    pub kind: ReadyKind,
    /// Of which microbatch.
    pub microbatch: MicrobatchId,
    /// Its place in the order of arrival, which breaks ties.
    pub arrival: u64,
    /// How many turns of its microbatch in its direction the rank had begun when it became ready: see
    /// [`Turns`](crate::Turns).
    pub visit: u32,
}

/// How far a rank's microbatches are. On ranks other than the root only `deferred` and `after_backward` are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// How many microbatches the step has.
    pub num_microbatches: u32,
    /// How many step functions have started.
    pub started: u32,
    /// How many have reached `model.backward` at least once, or returned.
    pub forwards_done: u32,
    /// How many have returned.
    pub returned: u32,
    /// Of how many microbatches this rank has only weight gradients left.
    pub deferred: u32,
    /// Which entry of a list comes next on the root.
    pub listed: usize,
    /// Whether this rank's last turn was a backward: see [`Turns`](crate::Turns).
    pub after_backward: bool,
}

impl Progress {
    /// How many microbatches are started and not yet returned.
    pub fn active(&self) -> u32 {
        self.started - self.returned
    }
}
