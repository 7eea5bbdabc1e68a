//! The thread that lets ranks in and keeps unknown peers out (TCP-1), through the whole job.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shardwright_core::Rank;
use socket2::SockRef;

use super::acceptor_state::{AcceptorState, Arrival, PendingHandshake};
use super::address::Listener;
use super::pending::PendingConnections;
use super::{HANDSHAKE_DEADLINE, HANDSHAKES_END};
use crate::secret::Secret;
use shardwright_system::Owner;

/// Connections that are taken in at a time, before those that are here get on.
const ACCEPTED_AT_ONCE: usize = 64;

/// How long to wait when the system has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running acceptor.
pub(super) struct Acceptor {
    listener: Arc<Listener>,
    state: Arc<AcceptorState>,
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
        let (state, outlet) = AcceptorState::new(rank, world, secret, encrypt);
        let state = Arc::new(state);
        listener.socket.set_nonblocking(true)?;
        let listener = Arc::new(listener);
        let (thread_listener, thread_state) = (Arc::clone(&listener), Arc::clone(&state));
        let thread = std::thread::Builder::new()
            .name("sw-accept".to_owned())
            .spawn(move || accept_loop(&thread_listener, &thread_state, &alive))?;
        Ok((
            Self {
                listener,
                state,
                thread: Mutex::new(Some(thread)),
                ended,
                owner: Owner::this_process(),
            },
            outlet,
        ))
    }

    /// The job is complete: from now on nobody is let in.
    pub(super) fn job_started(&self) {
        self.state.job_started();
    }

    /// How many connections were dropped for want of a proof.
    pub(super) fn unknown_peers(&self) -> u64 {
        self.state.unknown_peers()
    }

    /// Stops accepting, and ends the handshakes under way.
    pub(super) fn close(&self) {
        if !self.owner.is_here() || self.state.close() {
            return;
        }
        // On Linux this wakes the thread in poll().
        if let Err(error) = SockRef::from(&self.listener.socket).shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the listener was not open");
        }
        self.state.end_registrations();
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the accepting thread panicked");
        }
        if !matches!(
            self.ended.recv_timeout(HANDSHAKES_END),
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

/// The thread at the listener: takes in who comes, and gets on with everybody who is there, waiting for none of them.
fn accept_loop(listener: &Listener, state: &Arc<AcceptorState>, alive: &Sender<()>) {
    let began = Instant::now();
    let mut pending = PendingConnections::new(HANDSHAKE_DEADLINE);
    let mut number = 0;
    loop {
        let ready = match wait(listener, &pending, pending.next_end(began.elapsed())) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "cannot wait at the listener");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if state.is_closed() {
            return;
        }
        // From the last to the first, so that places stay as they are.
        for place in ready.into_iter().rev() {
            let step = |handshake: &mut PendingHandshake| state.read(handshake);
            if let Some((handshake, outcome)) = pending.advance(place, step) {
                number += 1;
                state.finish(handshake, outcome, number, alive);
            }
        }
        accept_waiting(listener, state, &mut pending, began);
        for handshake in pending.expire(began.elapsed()) {
            state.drop_unknown_peer(handshake.address(), "it took too long to prove itself");
        }
    }
}

/// Waits until somebody comes, or one who is here says something, or the time of one is over; the places of those who
/// said something.
fn wait(
    listener: &Listener,
    pending: &PendingConnections<PendingHandshake>,
    limit: Option<Duration>,
) -> io::Result<Vec<usize>> {
    let timeout = limit
        .map(|limit| Timespec::try_from(limit).map_err(io::Error::other))
        .transpose()?;
    let mut descriptors = vec![PollFd::new(&listener.socket, PollFlags::IN)];
    descriptors.extend(
        pending
            .iter()
            .map(|handshake| PollFd::new(handshake.socket(), PollFlags::IN)),
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
fn accept_waiting(
    listener: &Listener,
    state: &AcceptorState,
    pending: &mut PendingConnections<PendingHandshake>,
    began: Instant,
) {
    for _ in 0..ACCEPTED_AT_ONCE {
        let accepted = listener.socket.accept();
        let accepted =
            accepted.and_then(|(stream, address)| PendingHandshake::new(stream, address));
        match accepted {
            Ok(handshake) => {
                if let Some(displaced) = pending.enter(handshake, began.elapsed()) {
                    state.drop_unknown_peer(
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
