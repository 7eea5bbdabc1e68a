//! Knowing a forked child from the process that owns a connection.

mod raw;

/// A connection was used in a forked child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "process {child} was forked from process {parent}, which owns the connection to the job; a forked process (a data loader's worker, say) cannot use it"
)]
pub struct Forked {
    /// The process that made it.
    pub parent: u32,
    /// This one.
    pub child: u32,
}

/// The process that made a connection. A forked child inherits the memory but
/// none of the threads, and must leave the sockets alone.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    pid: u32,
    forks: Option<u64>,
}

impl Owner {
    /// This process.
    pub fn this_process() -> Self {
        Self {
            pid: std::process::id(),
            forks: raw::forks(),
        }
    }

    /// Whether this still is the owning process. It is asked many times for each message, for which a system call
    /// would be too much.
    pub fn is_here(self) -> bool {
        match self.forks {
            Some(forks) => raw::forks() == Some(forks),
            None => std::process::id() == self.pid,
        }
    }

    /// An error in a forked child.
    pub fn check(self) -> Result<(), Forked> {
        if self.is_here() {
            return Ok(());
        }
        Err(Forked {
            parent: self.pid,
            child: std::process::id(),
        })
    }
}
