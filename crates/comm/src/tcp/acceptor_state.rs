//! What is done with connections: they are read from, accepted, or dropped.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};
use shardwright_core::Rank;
use shardwright_wire::Value;

use super::REGISTRATION_DEADLINE;
use super::connection::Connection;
use super::handshake::{
    Accepted, Answering, Caller, HandshakeError, Identity, MOST_WANTED, Purpose,
};
use super::pending::Pending;
use super::stream::receive_value;
use crate::secret::{Secret, nonce};

/// Arrivals that may wait while rank 0 is busy with one, beside the ranks of the job.
const ARRIVAL_CAPACITY: usize = 256;

/// Processes that have proved the secret and may be registering at once, beside the ranks of the job.
const SPARE_REGISTRATIONS: usize = 64;

/// Who has connected.
pub(super) enum Arrival {
    /// A rank that proved itself, with its registration where it brings one.
    Caller {
        caller: Caller,
        connection: Connection,
        registration: Option<Value>,
    },
    /// A rank that proved itself, and encrypts where this one does not, or the other way round.
    Differing { rank: Rank, encrypts: bool },
    /// Somebody who said to be a rank of the job, and failed to prove it.
    Doubtful { rank: Rank, error: HandshakeError },
}

/// What the listener's threads share.
pub(super) struct AcceptorState {
    rank: Rank,
    world: u32,
    secret: Secret,
    encrypt: bool,
    arrivals: Mutex<Option<Sender<Arrival>>>,
    /// Connections of processes that are registering, by number.
    registering: Mutex<BTreeMap<u64, Arc<Connection>>>,
    unknown_peers: AtomicU64,
    closed: AtomicBool,
}

/// Somebody who has not proved anything yet.
pub(super) struct PendingHandshake {
    stream: TcpStream,
    address: SocketAddr,
    answering: Answering,
}

impl Pending for PendingHandshake {
    fn has_spoken(&self) -> bool {
        self.answering.has_spoken()
    }
}

impl PendingHandshake {
    /// Who has just come.
    pub(super) fn new(stream: TcpStream, address: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let nonce = nonce().map_err(io::Error::other)?;
        let answering = Answering::new(nonce);
        Ok(Self {
            stream,
            address,
            answering,
        })
    }

    /// Where it calls from.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its socket, to be waited for.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.stream
    }
}

impl AcceptorState {
    /// The listener of a rank, and where those come out who have proved themselves.
    pub(super) fn new(
        rank: Rank,
        world: u32,
        secret: Secret,
        encrypt: bool,
    ) -> (Self, Receiver<Arrival>) {
        let (arrivals, outlet) = bounded(ARRIVAL_CAPACITY + world as usize);
        let state = Self {
            rank,
            world,
            secret,
            encrypt,
            arrivals: Mutex::new(Some(arrivals)),
            registering: Mutex::default(),
            unknown_peers: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        (state, outlet)
    }

    /// The job is complete: from now on nobody is let in.
    pub(super) fn job_started(&self) {
        lock(&self.arrivals).take();
    }

    /// How many connections were dropped for want of a proof.
    pub(super) fn unknown_peers(&self) -> u64 {
        self.unknown_peers.load(Ordering::Relaxed)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Closes it; whether it was closed already.
    pub(super) fn close(&self) -> bool {
        self.closed.swap(true, Ordering::SeqCst)
    }

    /// Ends the connections of those who are registering.
    pub(super) fn end_registrations(&self) {
        for connection in lock(&self.registering).values() {
            connection.shut();
        }
    }

    /// Takes what a pending connection has said, and answers; how it ended, if it has.
    pub(super) fn read(
        &self,
        handshake: &mut PendingHandshake,
    ) -> Option<Result<Accepted, HandshakeError>> {
        let me = Identity {
            rank: self.rank,
            world: self.world,
            secret: &self.secret,
            encrypt: self.encrypt,
        };
        let started = lock(&self.arrivals).is_none();
        let mut piece = [0; MOST_WANTED];
        loop {
            let wanted = handshake.answering.wanted().min(piece.len());
            let count = match handshake.stream.read(&mut piece[..wanted]) {
                Ok(0) => return Some(Err(HandshakeError::Io(io::ErrorKind::UnexpectedEof.into()))),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Some(Err(error.into())),
            };
            let mut reply = Vec::new();
            let outcome = handshake
                .answering
                .take(&piece[..count], &me, started, &mut reply);
            // There is room for these few bytes in any new connection.
            if let Err(error) = handshake.stream.write_all(&reply) {
                return Some(Err(error.into()));
            }
            if outcome.is_some() {
                return outcome;
            }
        }
    }

    /// A handshake is over.
    pub(super) fn finish(
        self: &Arc<Self>,
        handshake: PendingHandshake,
        outcome: Result<Accepted, HandshakeError>,
        number: u64,
        alive: &Sender<()>,
    ) {
        let PendingHandshake {
            stream, address, ..
        } = handshake;
        let (caller, cipher) = match outcome {
            Ok(accepted) => accepted,
            Err(HandshakeError::Encryption { rank, theirs }) => {
                let encrypts = theirs;
                return self.announce(Arrival::Differing { rank, encrypts });
            }
            Err(HandshakeError::AlreadyStarted) => {
                tracing::warn!(%address, "a rank came after the job had started");
                return;
            }
            Err(error) => {
                self.drop_unknown_peer(address, &error.to_string());
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
        let connection = Connection::new(stream, cipher);
        match caller.purpose {
            Purpose::Mesh => self.announce(Arrival::Caller {
                caller,
                connection,
                registration: None,
            }),
            Purpose::Register => self.register(caller, connection, number, alive),
        }
    }

    /// Reads the registration of a process that has proved the secret, in a thread of its own: others need not wait.
    fn register(
        self: &Arc<Self>,
        caller: Caller,
        connection: Connection,
        number: u64,
        alive: &Sender<()>,
    ) {
        let connection = Arc::new(connection);
        let mut registering = lock(&self.registering);
        if registering.len() >= self.world as usize + SPARE_REGISTRATIONS {
            tracing::warn!(rank = %caller.rank, "too many processes are registering; one was dropped");
            return;
        }
        registering.insert(number, Arc::clone(&connection));
        drop(registering);
        let (state, alive) = (Arc::clone(self), alive.clone());
        let spawned = std::thread::Builder::new()
            .name("sw-register".to_owned())
            .spawn(move || {
                let registration = registration_of(&connection);
                lock(&state.registering).remove(&number);
                let connection = Arc::into_inner(connection);
                match (registration, connection) {
                    (Ok(registration), Some(connection)) => state.announce(Arrival::Caller {
                        caller,
                        connection,
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

    /// Tells the rank who has come. Never waits: there is room for its ranks, and what unknown peers say may be lost.
    fn announce(&self, arrival: Arrival) {
        if self.is_closed() {
            return;
        }
        if let Some(arrivals) = &*lock(&self.arrivals) {
            let proved = !matches!(arrival, Arrival::Doubtful { .. });
            let has_room = proved || arrivals.len() < ARRIVAL_CAPACITY;
            if !has_room || arrivals.try_send(arrival).is_err() {
                tracing::debug!("too many come at once");
            }
        }
    }

    /// Counts an unknown peer; the first is worth a warning, the rest would only fill the log.
    pub(super) fn drop_unknown_peer(&self, address: SocketAddr, reason: &str) {
        let before = self.unknown_peers.fetch_add(1, Ordering::Relaxed);
        if before == 0 {
            tracing::warn!(rank = %self.rank, %address, %reason, "dropped an unknown peer's connection; further ones are counted only");
        } else {
            tracing::debug!(rank = %self.rank, %address, %reason, "dropped an unknown peer's connection");
        }
    }
}

fn registration_of(connection: &Connection) -> Result<Value, HandshakeError> {
    match receive_value(connection, REGISTRATION_DEADLINE) {
        Ok((name, value)) if name == "register" => Ok(value),
        Ok(_) => Err(HandshakeError::UnknownPeer),
        Err(error) => Err(HandshakeError::Io(io::Error::other(error.to_string()))),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
