//! Calling other ranks while a job starts.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardwright_core::Rank;

use super::acceptor::shut;
use super::connection::Connection;
use super::handshake::{HANDSHAKE_VERSION, HandshakeError, Identity, Purpose, call};
use crate::job::JobOptions;
use crate::start_error::{Agreement, StartError};

/// Ends a start from outside: nothing is waited for any more.
#[derive(Default)]
pub(super) struct Cancel {
    flag: AtomicBool,
    stream: Mutex<Option<TcpStream>>,
}

impl Cancel {
    pub(super) fn set(&self) {
        self.flag.store(true, Ordering::SeqCst);
        if let Some(stream) = &*self.stream.lock().unwrap_or_else(PoisonError::into_inner) {
            shut(stream);
        }
    }

    pub(super) fn watch(&self, stream: &TcpStream) {
        *self.stream.lock().unwrap_or_else(PoisonError::into_inner) = stream.try_clone().ok();
    }

    pub(super) fn check(&self) -> Result<(), StartError> {
        if self.flag.load(Ordering::SeqCst) {
            Err(StartError::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// Connects to rank 0, again and again until it is there.
pub(super) fn reach(options: &JobOptions, cancel: &Cancel) -> Result<Connection, StartError> {
    let address = format!("{}:{}", options.place.host, options.place.port);
    let attempt = |left| try_reach(options, left);
    again_and_again(options, cancel, attempt, |waited, reason| {
        StartError::Unreachable {
            own: options.rank,
            address,
            waited,
            reason,
        }
    })
}

/// Connects to another rank, which is there; unknown peers at its listener may be in the way for a moment.
pub(super) fn reach_peer(
    options: &JobOptions,
    address: SocketAddr,
    peer: Rank,
    cancel: &Cancel,
) -> Result<Connection, StartError> {
    let own = options.rank;
    let attempt = |left| call_rank(options, address, peer, Purpose::Mesh, left);
    again_and_again(options, cancel, attempt, |_, reason| StartError::Lost {
        rank: peer,
        reason: format!("rank {own} did not reach it at {address}: {reason}"),
    })
}

fn again_and_again(
    options: &JobOptions,
    cancel: &Cancel,
    mut attempt: impl FnMut(Duration) -> Result<Connection, Attempt>,
    given_up: impl FnOnce(Duration, String) -> StartError,
) -> Result<Connection, StartError> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(20);
    loop {
        cancel.check()?;
        let left = options.connect_timeout.saturating_sub(began.elapsed());
        let reason = match attempt(left) {
            Ok(stream) => return Ok(stream),
            Err(Attempt::Hopeless(error)) => return Err(error),
            Err(Attempt::Again(reason)) => reason,
        };
        if left.is_zero() {
            return Err(given_up(began.elapsed(), reason));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Why a call did not succeed.
enum Attempt {
    /// It may later.
    Again(String),
    /// It never will.
    Hopeless(StartError),
}

fn try_reach(options: &JobOptions, left: Duration) -> Result<Connection, Attempt> {
    let again = |error: std::io::Error| Attempt::Again(error.to_string());
    let mut last = Attempt::Again(format!("{} has no address", options.place.host));
    for address in (options.place.host.as_str(), options.place.port)
        .to_socket_addrs()
        .map_err(again)?
    {
        match call_rank(options, address, Rank(0), Purpose::Register, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects to one rank, and proves who is there.
fn call_rank(
    options: &JobOptions,
    address: SocketAddr,
    other: Rank,
    purpose: Purpose,
    limit: Duration,
) -> Result<Connection, Attempt> {
    // A zero limit is not a time that connecting can take.
    let limit = limit.max(Duration::from_millis(100));
    let stream = TcpStream::connect_timeout(&address, limit)
        .map_err(|error| Attempt::Again(error.to_string()))?;
    let me = Identity {
        rank: options.rank,
        world: options.world,
        secret: &options.place.secret,
        encrypt: options.comm.encrypt,
    };
    let own = options.rank;
    match call(&stream, &me, purpose, limit) {
        Ok((rank, cipher)) if rank == other => Ok(Connection::new(stream, cipher)),
        Ok((rank, _)) => Err(Attempt::Again(format!(
            "rank {rank} answered in place of rank {other}"
        ))),
        Err(HandshakeError::WrongSecret { .. }) => {
            Err(Attempt::Hopeless(StartError::WrongSecret { own, other }))
        }
        Err(HandshakeError::Version { theirs, .. }) => {
            Err(Attempt::Hopeless(StartError::Handshake {
                own,
                other,
                ours: HANDSHAKE_VERSION,
                theirs,
            }))
        }
        Err(HandshakeError::Encryption { theirs, .. }) => {
            Err(Attempt::Hopeless(StartError::Mismatch {
                what: Agreement::Configuration,
                other: own,
                ours: format!("encrypt={theirs}"),
                theirs: format!("encrypt={}", options.comm.encrypt),
            }))
        }
        Err(HandshakeError::AlreadyStarted) => {
            let message = format!(
                "the job at {address} has already started with another process as rank {own}"
            );
            Err(Attempt::Hopeless(StartError::Refused { message }))
        }
        Err(error) => Err(Attempt::Again(error.to_string())),
    }
}
