//! The thread that lets ranks in and keeps strangers out (TCP-1), through the whole job.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use shardwright_core::Rank;
use shardwright_wire::Value;
use socket2::SockRef;

use super::address::Listener;
use super::handshake::{Caller, HandshakeError, Identity, Purpose, answer};
use super::stream::receive_value;
use super::{FAREWELL_DEADLINE, HANDSHAKE_DEADLINE};
use crate::owner::Owner;
use crate::secret::Secret;

/// Connections that may be proving themselves at once; further ones are
/// dropped, so that strangers cannot use up threads.
const MAX_HANDSHAKES: usize = 64;

/// Arrivals that may wait while rank 0 is busy with one.
const ARRIVAL_CAPACITY: usize = 256;

/// How long to wait when the system has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Somebody at the door.
pub(super) enum Arrival {
    /// A rank that proved itself, with its registration where it brings one.
    Caller {
        caller: Caller,
        stream: TcpStream,
        registration: Option<Value>,
    },
    /// Somebody who said to be a rank of the job, and failed to prove it.
    Doubtful { rank: Rank, error: HandshakeError },
}

/// The running acceptor.
pub(super) struct Acceptor {
    listener: Arc<Listener>,
    door: Arc<Door>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Receiver<()>,
    owner: Owner,
}

struct Door {
    rank: Rank,
    world: u32,
    secret: Secret,
    arrivals: Mutex<Option<Sender<Arrival>>>,
    visitors: Mutex<BTreeMap<u64, Arc<TcpStream>>>,
    strangers: AtomicU64,
    closed: AtomicBool,
}

impl Acceptor {
    /// Starts accepting; whoever proves itself comes out of the channel.
    pub(super) fn start(
        listener: Listener,
        rank: Rank,
        world: u32,
        secret: Secret,
    ) -> io::Result<(Self, Receiver<Arrival>)> {
        let (arrivals, outlet) = bounded(ARRIVAL_CAPACITY);
        let (alive, ended) = bounded(0);
        let door = Arc::new(Door {
            rank,
            world,
            secret,
            arrivals: Mutex::new(Some(arrivals)),
            visitors: Mutex::default(),
            strangers: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        let listener = Arc::new(listener);
        let (thread_listener, thread_door) = (Arc::clone(&listener), Arc::clone(&door));
        let thread = std::thread::Builder::new()
            .name("sw-accept".to_owned())
            .spawn(move || accept_all(&thread_listener, &thread_door, &alive))?;
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
        lock(&self.door.arrivals).take();
    }

    /// How many connections were dropped for want of a proof.
    pub(super) fn strangers(&self) -> u64 {
        self.door.strangers.load(Ordering::Relaxed)
    }

    /// Stops accepting, and ends the handshakes under way.
    pub(super) fn close(&self) {
        if !self.owner.is_here() || self.door.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // On Linux this wakes the thread in accept().
        if let Err(error) = SockRef::from(&self.listener.socket).shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the listener was not open");
        }
        for stream in lock(&self.door.visitors).values() {
            shut(stream);
        }
        let thread = lock(&self.thread).take();
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept_all(listener: &Listener, door: &Arc<Door>, alive: &Sender<()>) {
    for visitor in 0_u64.. {
        let accepted = listener.socket.accept();
        if door.closed.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, address)) = accepted else {
            std::thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        let stream = Arc::new(stream);
        let mut visitors = lock(&door.visitors);
        if visitors.len() >= MAX_HANDSHAKES {
            drop(visitors);
            door.drop_stranger(
                &address.to_string(),
                "too many connections are proving themselves",
            );
            continue;
        }
        visitors.insert(visitor, Arc::clone(&stream));
        drop(visitors);
        let (thread_door, alive) = (Arc::clone(door), alive.clone());
        let spawned = std::thread::Builder::new()
            .name("sw-handshake".to_owned())
            .spawn(move || {
                thread_door.receive(stream, visitor, &address.to_string());
                drop(alive);
            });
        if let Err(error) = spawned {
            lock(&door.visitors).remove(&visitor);
            tracing::warn!(%error, "no thread for a handshake");
        }
    }
}

impl Door {
    fn receive(&self, stream: Arc<TcpStream>, visitor: u64, address: &str) {
        let arrivals = lock(&self.arrivals).clone();
        let me = Identity {
            rank: self.rank,
            world: self.world,
            secret: &self.secret,
        };
        let outcome = answer(&stream, &me, arrivals.is_none()).and_then(|caller| {
            let registration = match caller.purpose {
                Purpose::Register => Some(registration_of(&stream)?),
                Purpose::Mesh => None,
            };
            Ok((caller, registration))
        });
        lock(&self.visitors).remove(&visitor);
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        let arrival = match outcome {
            Ok((caller, registration)) => {
                let stream = Arc::into_inner(stream)
                    .expect("the list of visitors held the only other reference");
                Arrival::Caller {
                    caller,
                    stream,
                    registration,
                }
            }
            Err(HandshakeError::AlreadyStarted) => {
                tracing::warn!(%address, "a rank came after the job had started");
                return;
            }
            Err(error) => {
                self.drop_stranger(address, &error.to_string());
                match error {
                    HandshakeError::WrongSecret { rank } | HandshakeError::Version { rank, .. } => {
                        Arrival::Doubtful { rank, error }
                    }
                    _ => return,
                }
            }
        };
        if let Some(arrivals) = arrivals
            && arrivals.send_timeout(arrival, HANDSHAKE_DEADLINE).is_err()
        {
            tracing::debug!(%address, "nobody waits for further ranks");
        }
    }

    /// Counts a stranger; the first is worth a warning, the rest would only fill the log.
    fn drop_stranger(&self, address: &str, reason: &str) {
        let before = self.strangers.fetch_add(1, Ordering::Relaxed);
        if before == 0 {
            tracing::warn!(rank = %self.rank, %address, %reason, "dropped a stranger's connection; further ones are counted only");
        } else {
            tracing::debug!(rank = %self.rank, %address, %reason, "dropped a stranger's connection");
        }
    }
}

fn registration_of(stream: &TcpStream) -> Result<Value, HandshakeError> {
    match receive_value(stream, HANDSHAKE_DEADLINE) {
        Ok((name, value)) if name == "register" => Ok(value),
        Ok(_) => Err(HandshakeError::Stranger),
        Err(error) => Err(HandshakeError::Io(io::Error::other(error.to_string()))),
    }
}
