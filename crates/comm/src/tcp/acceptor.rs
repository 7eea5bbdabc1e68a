//! The thread that lets ranks in and keeps strangers out (TCP-1), through the whole job.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shardwright_core::Rank;
use socket2::SockRef;

use super::address::Listener;
use super::door::{Arrival, Door, Guest};
use super::visitors::Visitors;
use super::{FAREWELL_DEADLINE, HANDSHAKE_DEADLINE};
use crate::secret::Secret;
use shardwright_system::Owner;

/// Connections that are taken in at a time, before those that are here get on.
const ACCEPTED_AT_ONCE: usize = 64;

/// How long to wait when the system has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running acceptor.
pub(super) struct Acceptor {
    listener: Arc<Listener>,
    door: Arc<Door>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Receiver<()>,
    owner: Owner,
}

impl Acceptor {
    /// Starts accepting; whoever proves itself comes out of the channel.
    pub(super) fn start(
        listener: Listener,
        rank: Rank,
        world: u32,
        secret: Secret,
        encrypt: bool,
    ) -> io::Result<(Self, Receiver<Arrival>)> {
        let (alive, ended) = bounded(0);
        let (door, outlet) = Door::new(rank, world, secret, encrypt);
        let door = Arc::new(door);
        listener.socket.set_nonblocking(true)?;
        let listener = Arc::new(listener);
        let (thread_listener, thread_door) = (Arc::clone(&listener), Arc::clone(&door));
        let thread = std::thread::Builder::new()
            .name("sw-accept".to_owned())
            .spawn(move || keep_door(&thread_listener, &thread_door, &alive))?;
        Ok((
            Self {
                listener,
                door,
                thread: Mutex::new(Some(thread)),
                ended,
                owner: Owner::this_process(),
            },
            outlet,
        ))
    }

    /// The job is complete: from now on nobody is let in.
    pub(super) fn job_started(&self) {
        self.door.job_started();
    }

    /// How many connections were dropped for want of a proof.
    pub(super) fn strangers(&self) -> u64 {
        self.door.strangers()
    }

    /// Stops accepting, and ends the handshakes under way.
    pub(super) fn close(&self) {
        if !self.owner.is_here() || self.door.close() {
            return;
        }
        // On Linux this wakes the thread in poll().
        if let Err(error) = SockRef::from(&self.listener.socket).shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the listener was not open");
        }
        self.door.end_registrations();
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the accepting thread panicked");
        }
        if !matches!(
            self.ended.recv_timeout(FAREWELL_DEADLINE),
            Err(crossbeam_channel::RecvTimeoutError::Disconnected)
        ) {
            tracing::warn!("a handshake outlived its job");
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.close();
    }
}

/// Ends a connection in both directions; one that has ended already is fine.
pub(super) fn shut(stream: &TcpStream) {
    if let Err(error) = stream.shutdown(Shutdown::Both) {
        tracing::trace!(%error, "the connection had ended");
    }
}

/// The thread at the door: takes in who comes, and gets on with everybody who is there, waiting for none of them.
fn keep_door(listener: &Listener, door: &Arc<Door>, alive: &Sender<()>) {
    let began = Instant::now();
    let mut visitors = Visitors::new(HANDSHAKE_DEADLINE);
    let mut number = 0;
    loop {
        let ready = match wait(listener, &visitors, visitors.next_end(began.elapsed())) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "cannot wait at the door");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if door.is_closed() {
            return;
        }
        // From the last to the first, so that places stay as they are.
        for place in ready.into_iter().rev() {
            let step = |guest: &mut Guest| door.hear(guest);
            if let Some((guest, outcome)) = visitors.advance(place, step) {
                number += 1;
                door.part_with(guest, outcome, number, alive);
            }
        }
        take_in(listener, door, &mut visitors, began);
        for guest in visitors.expire(began.elapsed()) {
            door.drop_stranger(guest.address(), "it took too long to prove itself");
        }
    }
}

/// Waits until somebody comes, or one who is here says something, or the time of one is over; the places of those who
/// said something.
fn wait(
    listener: &Listener,
    visitors: &Visitors<Guest>,
    limit: Option<Duration>,
) -> io::Result<Vec<usize>> {
    let timeout = limit
        .map(|limit| Timespec::try_from(limit).map_err(io::Error::other))
        .transpose()?;
    let mut descriptors = vec![PollFd::new(&listener.socket, PollFlags::IN)];
    descriptors.extend(
        visitors
            .iter()
            .map(|guest| PollFd::new(guest.socket(), PollFlags::IN)),
    );
    match poll(&mut descriptors, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready = |descriptor: &PollFd<'_>| !descriptor.revents().is_empty();
    let places = descriptors.iter().skip(1).map(ready).enumerate();
    Ok(places
        .filter_map(|(place, ready)| ready.then_some(place))
        .collect())
}

/// Takes in those who wait outside; who has to go for them is dropped.
fn take_in(listener: &Listener, door: &Door, visitors: &mut Visitors<Guest>, began: Instant) {
    for _ in 0..ACCEPTED_AT_ONCE {
        let accepted = listener.socket.accept();
        let accepted = accepted.and_then(|(stream, address)| Guest::new(stream, address));
        match accepted {
            Ok(guest) => {
                if let Some(displaced) = visitors.enter(guest, began.elapsed()) {
                    door.drop_stranger(
                        displaced.address(),
                        "too many connections are proving themselves",
                    );
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::debug!(%error, "a connection was not accepted");
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
    }
}
