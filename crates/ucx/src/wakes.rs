//! Being woken once for each event, whoever reads it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

/// Wakes its one waiter when a descriptor becomes readable, not as long as it is.
pub struct Wakes(OwnedFd);

const ON_EDGES: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

impl Wakes {
    /// Woken by a descriptor.
    pub fn of(events: BorrowedFd<'_>) -> io::Result<Self> {
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&wakes, events, epoll::EventData::new_u64(0), ON_EDGES)?;
        Ok(Self(wakes))
    }

    /// Whether the waiter is woken; what happened while it was not wakes it as soon as it is again.
    pub fn enable(&self, events: BorrowedFd<'_>, enabled: bool) -> io::Result<()> {
        let wanted = if enabled {
            ON_EDGES
        } else {
            epoll::EventFlags::empty()
        };
        epoll::modify(&self.0, events, epoll::EventData::new_u64(0), wanted).map_err(Into::into)
    }

    /// Sleeps until the next event, or for so long.
    pub fn wait(&self, at_most: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(at_most).map_err(io::Error::other)?;
        let mut woken = Vec::with_capacity(1);
        match epoll::wait(&self.0, spare_capacity(&mut woken), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
