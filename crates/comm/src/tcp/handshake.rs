//! The first bytes of a connection: who is there, and a proof of the job's
//! secret in both directions (TCP-1).
//!
//! ```text
//! client -> server   hello      magic, version, purpose, whether to encrypt, rank, world, nonce
//! server -> client   challenge  magic, version, verdict, rank, nonce
//! client -> server   answer     proof; to encrypt: a key exchange's first message
//! server -> client   verdict    verdict, proof; to encrypt: the key exchange's second message
//! ```
//!
//! The connecting side proves first: whoever reaches the port of a rank gets no bytes by which guesses of the secret
//! could be tried without asking again. Each side's proof is made under a label of its own and over all that was said
//! before it, so that no proof can be played back to its side or in another connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use shardwright_core::Rank;

use super::HANDSHAKE_DEADLINE;
use super::connection::{Cipher, EXCHANGE_BYTES, KeyExchange};
use super::stream::Hurried;
use crate::secret::{PROOF_BYTES, Secret, nonce};

const MAGIC: [u8; 8] = *b"SHARDWRT";
/// The version of the handshake.
pub(super) const HANDSHAKE_VERSION: u16 = 3;
const HELLO_BYTES: usize = 52;
const CHALLENGE_BYTES: usize = 48;
/// What a caller of another version is sent: as many bytes as version 2 waits for. Where version and verdict stand
/// never changes, so that either side can name the other's version.
const OTHER_VERSION_BYTES: usize = 80;
const ANSWER_BYTES: usize = PROOF_BYTES;
const VERDICT_BYTES: usize = 1 + PROOF_BYTES;
/// The most bytes that an answering side wants at a time.
pub(super) const MOST_WANTED: usize = ANSWER_BYTES + EXCHANGE_BYTES;
const SERVER: &[u8] = b"shardwright server";
const CLIENT: &[u8] = b"shardwright client";

const FINE: u8 = 0;
const WRONG_PROOF: u8 = 1;
const WRONG_VERSION: u8 = 2;
const ALREADY_STARTED: u8 = 3;
const ENCRYPTION_DIFFERS: u8 = 4;

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
    /// Whether what follows is to be encrypted; the same for all ranks.
    pub(super) encrypt: bool,
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
    UnknownPeer,
    /// Says it is a rank, and has another secret.
    #[error("it presented a wrong secret as rank {rank}")]
    WrongSecret { rank: Rank },
    /// Speaks another version.
    #[error("it speaks version {theirs} of the handshake as rank {rank}")]
    Version { rank: Rank, theirs: u16 },
    /// A rank of the job that encrypts, among ranks that do not, or the other way round.
    #[error("rank {rank} encrypts: {theirs}")]
    Encryption { rank: Rank, theirs: bool },
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
) -> Result<(Rank, Option<Cipher>), HandshakeError> {
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
) -> Result<(Rank, Option<Cipher>), HandshakeError> {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..10].copy_from_slice(&HANDSHAKE_VERSION.to_le_bytes());
    hello[10] = u8::from(purpose == Purpose::Mesh);
    hello[11] = u8::from(me.encrypt);
    hello[12..16].copy_from_slice(&me.rank.0.to_le_bytes());
    hello[16..20].copy_from_slice(&me.world.to_le_bytes());
    hello[20..].copy_from_slice(own_nonce);
    stream.write_all(&hello)?;

    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge)?;
    if challenge[..8] != MAGIC {
        return Err(HandshakeError::UnknownPeer);
    }
    let rank = Rank(u32_at(&challenge, 12));
    let theirs = u16::from_le_bytes([challenge[8], challenge[9]]);
    if challenge[10] == WRONG_VERSION || theirs != HANDSHAKE_VERSION {
        return Err(HandshakeError::Version { rank, theirs });
    }
    let mut answer = me.secret.prove(CLIENT, &[&hello, &challenge]).to_vec();
    let mut exchange = None;
    if me.encrypt {
        let mut begun =
            KeyExchange::of_caller(me.secret, &[&hello, &challenge]).map_err(io::Error::other)?;
        answer.extend_from_slice(&begun.offer().map_err(io::Error::other)?);
        exchange = Some(begun);
    }
    stream.write_all(&answer)?;

    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict)?;
    let (said, proof) = verdict.split_at(VERDICT_BYTES - PROOF_BYTES);
    let transcript: [&[u8]; 4] = [&hello, &challenge, &answer, said];
    // Who does not know the secret cannot say anything else than that.
    if !me.secret.verify(SERVER, &transcript, proof) {
        return Err(HandshakeError::WrongSecret { rank });
    }
    match verdict[0] {
        FINE => {}
        ALREADY_STARTED => return Err(HandshakeError::AlreadyStarted),
        ENCRYPTION_DIFFERS => {
            let theirs = !me.encrypt;
            return Err(HandshakeError::Encryption { rank, theirs });
        }
        _ => return Err(HandshakeError::UnknownPeer),
    }
    let Some(exchange) = exchange else {
        return Ok((rank, None));
    };
    let mut message = [0; EXCHANGE_BYTES];
    stream.read_exact(&mut message)?;
    let cipher = exchange.finish(&message).map_err(io::Error::other)?;
    Ok((rank, Some(cipher)))
}

/// What the accepting side has of a pending connection who has proved the secret.
pub(super) type Accepted = (Caller, Option<Cipher>);

/// The accepting side, which is given a pending connection's bytes as they come: no pending connection is waited for.
pub(super) struct Answering {
    nonce: [u8; PROOF_BYTES],
    /// What has come of the part that is due.
    received: Vec<u8>,
    hello: Option<Hello>,
}

/// A hello, and how it was answered.
struct Hello {
    bytes: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    caller: Caller,
    encrypt: bool,
}

impl Answering {
    /// For one pending connection, with a nonce that no other gets.
    pub(super) fn new(nonce: [u8; PROOF_BYTES]) -> Self {
        Self {
            nonce,
            received: Vec::new(),
            hello: None,
        }
    }

    /// How many bytes of the pending connection may be read now: none that belongs to what follows the handshake.
    pub(super) fn wanted(&self) -> usize {
        let due = match self.hello {
            // Garbage is refused at its eighth byte, without waiting for more.
            None if self.received.len() < MAGIC.len() => MAGIC.len(),
            None => HELLO_BYTES,
            Some(Hello { encrypt: false, .. }) => ANSWER_BYTES,
            Some(Hello { encrypt: true, .. }) => ANSWER_BYTES + EXCHANGE_BYTES,
        };
        due - self.received.len()
    }

    /// Whether the pending connection has said who it is, which proves nothing yet.
    pub(super) fn has_spoken(&self) -> bool {
        self.hello.is_some()
    }

    /// Takes bytes, as many as [`Self::wanted`] says or fewer; writes what is to be sent into `reply`, and says how the
    /// handshake ended, once it has.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        me: &Identity<'_>,
        started: bool,
        reply: &mut Vec<u8>,
    ) -> Option<Result<Accepted, HandshakeError>> {
        self.received.extend_from_slice(bytes);
        let received = &self.received;
        if self.hello.is_none() && received.len() >= MAGIC.len() && !received.starts_with(&MAGIC) {
            return Some(Err(HandshakeError::UnknownPeer));
        }
        if self.wanted() > 0 {
            return None;
        }
        let part = std::mem::take(&mut self.received);
        match self.hello.take() {
            None => self.greet(&part, me, reply),
            Some(hello) => Some(judge(&hello, &part, me, started, reply)),
        }
    }

    fn greet(
        &mut self,
        part: &[u8],
        me: &Identity<'_>,
        reply: &mut Vec<u8>,
    ) -> Option<Result<Accepted, HandshakeError>> {
        let Ok(bytes) = <[u8; HELLO_BYTES]>::try_from(part) else {
            self.received = part.to_vec();
            return None;
        };
        let caller = Caller {
            rank: Rank(u32_at(&bytes, 12)),
            world: u32_at(&bytes, 16),
            purpose: if bytes[10] == 0 {
                Purpose::Register
            } else {
                Purpose::Mesh
            },
        };
        let theirs = u16::from_le_bytes([bytes[8], bytes[9]]);
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..8].copy_from_slice(&MAGIC);
        challenge[8..10].copy_from_slice(&HANDSHAKE_VERSION.to_le_bytes());
        challenge[12..16].copy_from_slice(&me.rank.0.to_le_bytes());
        if theirs != HANDSHAKE_VERSION {
            challenge[10] = WRONG_VERSION;
            reply.extend_from_slice(&challenge);
            reply.resize(OTHER_VERSION_BYTES, 0);
            let rank = caller.rank;
            return Some(Err(HandshakeError::Version { rank, theirs }));
        }
        challenge[16..].copy_from_slice(&self.nonce);
        reply.extend_from_slice(&challenge);
        self.hello = Some(Hello {
            bytes,
            challenge,
            caller,
            encrypt: bytes[11] != 0,
        });
        None
    }
}

/// Whether the answer to a challenge is right.
fn judge(
    hello: &Hello,
    answer: &[u8],
    me: &Identity<'_>,
    started: bool,
    reply: &mut Vec<u8>,
) -> Result<Accepted, HandshakeError> {
    let said: [&[u8]; 2] = [&hello.bytes, &hello.challenge];
    let (proof, offer) = answer.split_at(ANSWER_BYTES.min(answer.len()));
    let rank = hello.caller.rank;
    if !me.secret.verify(CLIENT, &said, proof) {
        reply.push(WRONG_PROOF);
        reply.resize(VERDICT_BYTES, 0);
        return Err(HandshakeError::WrongSecret { rank });
    }
    let mut exchanged = None;
    let (verdict, outcome) = if started {
        (ALREADY_STARTED, Err(HandshakeError::AlreadyStarted))
    } else if hello.encrypt != me.encrypt {
        let theirs = hello.encrypt;
        let differs = HandshakeError::Encryption { rank, theirs };
        (ENCRYPTION_DIFFERS, Err(differs))
    } else if me.encrypt {
        match KeyExchange::accept(me.secret, &said, offer) {
            Ok((message, cipher)) => {
                exchanged = Some(message);
                (FINE, Ok((hello.caller, Some(cipher))))
            }
            Err(_) => (WRONG_PROOF, Err(HandshakeError::WrongSecret { rank })),
        }
    } else {
        (FINE, Ok((hello.caller, None)))
    };
    let transcript: [&[u8]; 4] = [&hello.bytes, &hello.challenge, answer, &[verdict]];
    reply.push(verdict);
    reply.extend_from_slice(&me.secret.prove(SERVER, &transcript));
    reply.extend_from_slice(exchanged.as_ref().map_or(&[], |message| &message[..]));
    outcome
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests;
