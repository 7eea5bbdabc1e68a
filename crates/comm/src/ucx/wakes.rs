//! Being woken once for each event, whoever reads it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

/// Wakes its one waiter when a descriptor becomes readable, not as long as it is.
pub(super) struct Wakes(OwnedFd);

impl Wakes {
    pub(super) fn of(events: BorrowedFd<'_>) -> io::Result<Self> {
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let on_edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&wakes, events, epoll::EventData::new_u64(0), on_edges)?;
        Ok(Self(wakes))
    }

    /// Sleeps until the next event, or for so long.
    pub(super) fn wait(&self, at_most: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(at_most).map_err(io::Error::other)?;
        let mut woken = Vec::with_capacity(1);
        match epoll::wait(&self.0, spare_capacity(&mut woken), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
