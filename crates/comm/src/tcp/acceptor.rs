//! The thread that lets ranks in and keeps strangers out (TCP-1), through the whole job.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shardwright_core::Rank;
use shardwright_wire::Value;
use socket2::SockRef;

use super::address::Listener;
use super::handshake::{Answering, Caller, HandshakeError, Identity, MOST_WANTED, Purpose};
use super::stream::receive_value;
use super::visitors::{Visitor, Visitors};
use super::{FAREWELL_DEADLINE, HANDSHAKE_DEADLINE, REGISTRATION_DEADLINE};
use crate::owner::Owner;
use crate::secret::{Secret, nonce};

/// Connections that are taken in at a time, before those that are here get on.
const ACCEPTED_AT_ONCE: usize = 64;

/// Arrivals that may wait while rank 0 is busy with one, beside the ranks of the job.
const ARRIVAL_CAPACITY: usize = 256;

/// Processes that have proved the secret and may be registering at once, beside the ranks of the job.
const SPARE_REGISTRATIONS: usize = 64;

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
    /// Connections of processes that are registering, by number.
    registering: Mutex<BTreeMap<u64, Arc<TcpStream>>>,
    strangers: AtomicU64,
    closed: AtomicBool,
}

/// Somebody who has not proved anything yet.
struct Guest {
    stream: TcpStream,
    address: SocketAddr,
    answering: Answering,
}

impl Visitor for Guest {
    fn has_spoken(&self) -> bool {
        self.answering.has_spoken()
    }
}

impl Acceptor {
    /// Starts accepting; whoever proves itself comes out of the channel.
    pub(super) fn start(
        listener: Listener,
        rank: Rank,
        world: u32,
        secret: Secret,
    ) -> io::Result<(Self, Receiver<Arrival>)> {
        let (arrivals, outlet) = bounded(ARRIVAL_CAPACITY + world as usize);
        let (alive, ended) = bounded(0);
        let door = Arc::new(Door {
            rank,
            world,
            secret,
            arrivals: Mutex::new(Some(arrivals)),
            registering: Mutex::default(),
            strangers: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
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
        // On Linux this wakes the thread in poll().
        if let Err(error) = SockRef::from(&self.listener.socket).shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the listener was not open");
        }
        for stream in lock(&self.door.registering).values() {
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
        if door.closed.load(Ordering::SeqCst) {
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
            door.drop_stranger(guest.address, "it took too long to prove itself");
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
            .map(|guest| PollFd::new(&guest.stream, PollFlags::IN)),
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
        let accepted = listener.socket.accept().and_then(|(stream, address)| {
            stream.set_nonblocking(true)?;
            let nonce = nonce().map_err(io::Error::other)?;
            let answering = Answering::new(nonce);
            Ok(Guest {
                stream,
                address,
                answering,
            })
        });
        match accepted {
            Ok(guest) => {
                if let Some(displaced) = visitors.enter(guest, began.elapsed()) {
                    door.drop_stranger(
                        displaced.address,
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

impl Door {
    /// Takes what a visitor has said, and answers; how it ended, if it has.
    fn hear(&self, guest: &mut Guest) -> Option<Result<Caller, HandshakeError>> {
        let me = Identity {
            rank: self.rank,
            world: self.world,
            secret: &self.secret,
        };
        let started = lock(&self.arrivals).is_none();
        let mut piece = [0; MOST_WANTED];
        loop {
            let wanted = guest.answering.wanted().min(piece.len());
            let count = match guest.stream.read(&mut piece[..wanted]) {
                Ok(0) => return Some(Err(HandshakeError::Io(io::ErrorKind::UnexpectedEof.into()))),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Some(Err(error.into())),
            };
            let mut reply = Vec::new();
            let outcome = guest
                .answering
                .take(&piece[..count], &me, started, &mut reply);
            // There is room for these few bytes in any new connection.
            if let Err(error) = guest.stream.write_all(&reply) {
                return Some(Err(error.into()));
            }
            if outcome.is_some() {
                return outcome;
            }
        }
    }

    /// A handshake is over.
    fn part_with(
        self: &Arc<Self>,
        guest: Guest,
        outcome: Result<Caller, HandshakeError>,
        number: u64,
        alive: &Sender<()>,
    ) {
        let Guest {
            stream, address, ..
        } = guest;
        let caller = match outcome {
            Ok(caller) => caller,
            Err(HandshakeError::AlreadyStarted) => {
                tracing::warn!(%address, "a rank came after the job had started");
                return;
            }
            Err(error) => {
                self.drop_stranger(address, &error.to_string());
                if let HandshakeError::WrongSecret { rank } | HandshakeError::Version { rank, .. } =
                    error
                {
                    self.announce(Arrival::Doubtful { rank, error });
                }
                return;
            }
        };
        if let Err(error) = stream.set_nonblocking(false) {
            tracing::warn!(%error, "a rank's connection was lost");
            return;
        }
        match caller.purpose {
            Purpose::Mesh => self.announce(Arrival::Caller {
                caller,
                stream,
                registration: None,
            }),
            Purpose::Register => self.register(caller, stream, number, alive),
        }
    }

    /// Reads the registration of a process that has proved the secret, in a thread of its own: others need not wait.
    fn register(
        self: &Arc<Self>,
        caller: Caller,
        stream: TcpStream,
        number: u64,
        alive: &Sender<()>,
    ) {
        let stream = Arc::new(stream);
        let mut registering = lock(&self.registering);
        if registering.len() >= self.world as usize + SPARE_REGISTRATIONS {
            tracing::warn!(rank = %caller.rank, "too many processes are registering; one was dropped");
            return;
        }
        registering.insert(number, Arc::clone(&stream));
        drop(registering);
        let (door, alive) = (Arc::clone(self), alive.clone());
        let spawned = std::thread::Builder::new()
            .name("sw-register".to_owned())
            .spawn(move || {
                let registration = registration_of(&stream);
                lock(&door.registering).remove(&number);
                let stream = Arc::into_inner(stream);
                match (registration, stream) {
                    (Ok(registration), Some(stream)) => door.announce(Arrival::Caller {
                        caller,
                        stream,
                        registration: Some(registration),
                    }),
                    (Err(error), _) => {
                        tracing::warn!(rank = %caller.rank, %error, "a registration was not read");
                    }
                    (Ok(_), None) => {}
                }
                drop(alive);
            });
        if let Err(error) = spawned {
            lock(&self.registering).remove(&number);
            tracing::warn!(%error, "no thread for a registration");
        }
    }

    /// Tells the rank who has come. Never waits: what strangers say may be lost where there is too much of it.
    fn announce(&self, arrival: Arrival) {
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        if let Some(arrivals) = &*lock(&self.arrivals)
            && arrivals.try_send(arrival).is_err()
        {
            tracing::debug!("nobody waits for further ranks");
        }
    }

    /// Counts a stranger; the first is worth a warning, the rest would only fill the log.
    fn drop_stranger(&self, address: SocketAddr, reason: &str) {
        let before = self.strangers.fetch_add(1, Ordering::Relaxed);
        if before == 0 {
            tracing::warn!(rank = %self.rank, %address, %reason, "dropped a stranger's connection; further ones are counted only");
        } else {
            tracing::debug!(rank = %self.rank, %address, %reason, "dropped a stranger's connection");
        }
    }
}

fn registration_of(stream: &TcpStream) -> Result<Value, HandshakeError> {
    match receive_value(stream, REGISTRATION_DEADLINE) {
        Ok((name, value)) if name == "register" => Ok(value),
        Ok(_) => Err(HandshakeError::Stranger),
        Err(error) => Err(HandshakeError::Io(io::Error::other(error.to_string()))),
    }
}
