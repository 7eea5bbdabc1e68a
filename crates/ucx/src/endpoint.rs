//! What names a connection, and what is said of a worker whose owner wants to sleep.

/// A connection to one peer, by its number on its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub u32);

/// Whether the worker's owner may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// The descriptor will become readable with the next event.
    Ready,
    /// Something has happened, or waits for a peer to make room: let the worker progress first.
    /// Where that does nothing, several times in a row, let other threads run in between: a ring
    /// in shared memory is full, and nobody tells when there is room again.
    Busy,
}
