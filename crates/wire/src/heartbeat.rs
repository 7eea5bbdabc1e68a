//! What a rank says about itself with every heartbeat.

/// The state of a rank, as of its last heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// The step it is in; 0 before the first.
    pub step: u64,
    /// Whether a worker is executing.
    pub executing: bool,
    /// Whether messages wait in its outgoing queues.
    pub sending: bool,
    /// How many tasks it has finished, ever.
    pub progress: u64,
}
