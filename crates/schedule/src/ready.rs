//! What a policy sees: ready items, and how far the root's microbatches are.

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
}

impl ReadyKind {
    /// Whether the item is backward work (a close frees memory, as a backward does).
    pub fn is_backward(self) -> bool {
        match self {
            Self::RootBackward
            | Self::RequestBackward
            | Self::RequestClose
            | Self::ResumeBackward => true,
            Self::RootForward | Self::RequestForward | Self::ResumeForward => false,
        }
    }

    /// Whether the item is new work, which needs an idle worker; the others resume a suspended one.
    pub fn is_fresh(self) -> bool {
        match self {
            Self::RootForward
            | Self::RequestForward
            | Self::RequestBackward
            | Self::RequestClose => true,
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
}

/// How far the root's microbatches are. All zero on other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootProgress {
    /// How many microbatches the step has.
    pub num_microbatches: u32,
    /// How many step functions have started.
    pub started: u32,
    /// How many have reached `model.backward` at least once, or returned.
    pub forwards_done: u32,
    /// How many have returned.
    pub returned: u32,
}

impl RootProgress {
    /// How many microbatches are started and not yet returned.
    pub fn active(&self) -> u32 {
        self.started - self.returned
    }
}
