//! Calling other ranks while a job starts.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardwright_core::Rank;

use super::acceptor::shut;
use super::handshake::{HANDSHAKE_VERSION, HandshakeError, Identity, Purpose, call};
use super::rendezvous::JobOptions;
use crate::start_error::StartError;

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
pub(super) fn reach(options: &JobOptions, cancel: &Cancel) -> Result<TcpStream, StartError> {
    let address = format!("{}:{}", options.host, options.port);
    let began = Instant::now();
    let mut pause = Duration::from_millis(20);
    loop {
        cancel.check()?;
        let left = options.connect_timeout.saturating_sub(began.elapsed());
        let reason = match try_reach(options, left) {
            Ok(stream) => return Ok(stream),
            Err(Attempt::Hopeless(error)) => return Err(error),
            Err(Attempt::Again(reason)) => reason,
        };
        if left.is_zero() {
            return Err(StartError::Unreachable {
                own: options.rank,
                address,
                waited: began.elapsed(),
                reason,
            });
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Why a call did not succeed.
pub(super) enum Attempt {
    /// It may later.
    Again(String),
    /// It never will.
    Hopeless(StartError),
}

fn try_reach(options: &JobOptions, left: Duration) -> Result<TcpStream, Attempt> {
    let again = |error: std::io::Error| Attempt::Again(error.to_string());
    let mut last = Attempt::Again(format!("{} has no address", options.host));
    for address in (options.host.as_str(), options.port)
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
pub(super) fn call_rank(
    options: &JobOptions,
    address: SocketAddr,
    other: Rank,
    purpose: Purpose,
    limit: Duration,
) -> Result<TcpStream, Attempt> {
    // A zero limit is not a time that connecting can take.
    let limit = limit.max(Duration::from_millis(100));
    let stream = TcpStream::connect_timeout(&address, limit)
        .map_err(|error| Attempt::Again(error.to_string()))?;
    let me = Identity {
        rank: options.rank,
        world: options.world,
        secret: &options.secret,
    };
    let own = options.rank;
    match call(&stream, &me, purpose, limit) {
        Ok(rank) if rank == other => Ok(stream),
        Ok(rank) => Err(Attempt::Again(format!(
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
        Err(HandshakeError::AlreadyStarted) => {
            let message = format!(
                "the job at {address} has already started with another process as rank {own}"
            );
            Err(Attempt::Hopeless(StartError::Refused { message }))
        }
        Err(error) => Err(Attempt::Again(error.to_string())),
    }
}
