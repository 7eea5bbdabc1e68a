//! The first bytes of a connection: who is there, and a proof of the job's
//! secret in both directions (TCP-1).
//!
//! ```text
//! client -> server   hello      magic, version, purpose, rank, world, nonce
//! server -> client   challenge  magic, version, verdict, rank, nonce, proof
//! client -> server   answer     verdict, proof
//! server -> client   verdict
//! ```

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use shardwright_core::Rank;

use super::HANDSHAKE_DEADLINE;
use super::stream::Hurried;
use crate::secret::{PROOF_BYTES, Secret, nonce};

const MAGIC: [u8; 8] = *b"SHARDWRT";
/// The version of the handshake.
pub(super) const HANDSHAKE_VERSION: u16 = 1;
const HELLO_BYTES: usize = 52;
const CHALLENGE_BYTES: usize = 48 + PROOF_BYTES;
const ANSWER_BYTES: usize = 1 + PROOF_BYTES;
const SERVER: &[u8] = b"shardwright server";
const CLIENT: &[u8] = b"shardwright client";

const FINE: u8 = 0;
const WRONG_PROOF: u8 = 1;
const WRONG_VERSION: u8 = 2;
const ALREADY_STARTED: u8 = 3;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Joining the job, at rank 0.
    Register,
    /// Messages between two ranks that both have joined.
    Mesh,
}

/// One side of a handshake.
pub(super) struct Identity<'a> {
    pub(super) rank: Rank,
    pub(super) world: u32,
    pub(super) secret: &'a Secret,
}

/// Who is at the other end, proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) rank: Rank,
    pub(super) world: u32,
    pub(super) purpose: Purpose,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// Not a rank of any job.
    #[error("it does not speak the handshake")]
    Stranger,
    /// Says it is a rank, and has another secret.
    #[error("it presented a wrong secret as rank {rank}")]
    WrongSecret { rank: Rank },
    /// Speaks another version.
    #[error("it speaks version {theirs} of the handshake as rank {rank}")]
    Version { rank: Rank, theirs: u16 },
    /// The job is complete already.
    #[error("the job has already started")]
    AlreadyStarted,
    /// The connection broke, or took too long.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The connecting side.
pub(super) fn call(
    stream: &TcpStream,
    me: &Identity<'_>,
    purpose: Purpose,
    limit: Duration,
) -> Result<Rank, HandshakeError> {
    let mut stream = Hurried::new(stream, limit.min(HANDSHAKE_DEADLINE));
    call_over(
        &mut stream,
        &nonce().map_err(io::Error::other)?,
        me,
        purpose,
    )
}

/// The same over any stream, with a nonce from outside.
pub(super) fn call_over(
    stream: &mut (impl Read + Write),
    own_nonce: &[u8; PROOF_BYTES],
    me: &Identity<'_>,
    purpose: Purpose,
) -> Result<Rank, HandshakeError> {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..10].copy_from_slice(&HANDSHAKE_VERSION.to_le_bytes());
    hello[10] = u8::from(purpose == Purpose::Mesh);
    hello[12..16].copy_from_slice(&me.rank.0.to_le_bytes());
    hello[16..20].copy_from_slice(&me.world.to_le_bytes());
    hello[20..].copy_from_slice(own_nonce);
    stream.write_all(&hello)?;

    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge)?;
    if challenge[..8] != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    let rank = Rank(u32_at(&challenge, 12));
    let theirs = u16::from_le_bytes([challenge[8], challenge[9]]);
    if challenge[10] == WRONG_VERSION || theirs != HANDSHAKE_VERSION {
        return Err(HandshakeError::Version { rank, theirs });
    }
    let (open, proof) = challenge.split_at(CHALLENGE_BYTES - PROOF_BYTES);
    let mut answer = [0; ANSWER_BYTES];
    if !me.secret.verify(SERVER, &[&hello, open], proof) {
        // Saying so, without a proof, lets rank 0 name this rank to the others.
        answer[0] = WRONG_PROOF;
        stream.write_all(&answer)?;
        return Err(HandshakeError::WrongSecret { rank });
    }
    answer[1..].copy_from_slice(&me.secret.prove(CLIENT, &[&hello, open]));
    stream.write_all(&answer)?;

    let mut verdict = [0; 1];
    stream.read_exact(&mut verdict)?;
    match verdict[0] {
        FINE => Ok(rank),
        WRONG_PROOF => Err(HandshakeError::WrongSecret { rank }),
        ALREADY_STARTED => Err(HandshakeError::AlreadyStarted),
        _ => Err(HandshakeError::Stranger),
    }
}

/// The accepting side.
pub(super) fn answer(
    stream: &TcpStream,
    me: &Identity<'_>,
    started: bool,
) -> Result<Caller, HandshakeError> {
    let mut stream = Hurried::new(stream, HANDSHAKE_DEADLINE);
    answer_over(
        &mut stream,
        &nonce().map_err(io::Error::other)?,
        me,
        started,
    )
}

/// The same over any stream, with a nonce from outside.
pub(super) fn answer_over(
    stream: &mut (impl Read + Write),
    own_nonce: &[u8; PROOF_BYTES],
    me: &Identity<'_>,
    started: bool,
) -> Result<Caller, HandshakeError> {
    let mut hello = [0; HELLO_BYTES];
    // Garbage is refused at its eighth byte, without waiting for more.
    stream.read_exact(&mut hello[..8])?;
    if hello[..8] != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    stream.read_exact(&mut hello[8..])?;
    let purpose = if hello[10] == 0 {
        Purpose::Register
    } else {
        Purpose::Mesh
    };
    let caller = Caller {
        rank: Rank(u32_at(&hello, 12)),
        world: u32_at(&hello, 16),
        purpose,
    };
    let theirs = u16::from_le_bytes([hello[8], hello[9]]);

    let mut challenge = [0; CHALLENGE_BYTES];
    challenge[..8].copy_from_slice(&MAGIC);
    challenge[8..10].copy_from_slice(&HANDSHAKE_VERSION.to_le_bytes());
    challenge[12..16].copy_from_slice(&me.rank.0.to_le_bytes());
    if theirs != HANDSHAKE_VERSION {
        challenge[10] = WRONG_VERSION;
        stream.write_all(&challenge)?;
        return Err(HandshakeError::Version {
            rank: caller.rank,
            theirs,
        });
    }
    challenge[16..48].copy_from_slice(own_nonce);
    let (open, proof) = challenge.split_at_mut(CHALLENGE_BYTES - PROOF_BYTES);
    proof.copy_from_slice(&me.secret.prove(SERVER, &[&hello, open]));
    stream.write_all(&challenge)?;

    let mut reply = [0; ANSWER_BYTES];
    stream.read_exact(&mut reply)?;
    let open = &challenge[..CHALLENGE_BYTES - PROOF_BYTES];
    if reply[0] != FINE || !me.secret.verify(CLIENT, &[&hello, open], &reply[1..]) {
        if let Err(error) = stream.write_all(&[WRONG_PROOF]) {
            tracing::debug!(%error, "a peer with a wrong secret did not wait for the answer");
        }
        return Err(HandshakeError::WrongSecret { rank: caller.rank });
    }
    if started {
        stream.write_all(&[ALREADY_STARTED])?;
        return Err(HandshakeError::AlreadyStarted);
    }
    stream.write_all(&[FINE])?;
    Ok(caller)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
