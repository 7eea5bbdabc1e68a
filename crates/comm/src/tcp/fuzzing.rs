//! What an unknown peer's or a peer's bytes reach, for the fuzz targets: the same code as behind a socket, over memory,
//! with nonces that never change. Behind the feature `fuzzing`; no part of the library's interface.

use std::io::{self, Read, Write};

use shardwright_core::Rank;
use shardwright_wire::{Limits, Message, Value};

use super::connection::KeyExchange;
use super::handshake::{Answering, Identity, Purpose, call_over};
use super::stream::{Received, read_frame};
use super::table::{Registration, Row};
use crate::exchange::Exchange;
use crate::secret::{PROOF_BYTES, Secret};

const WORLD: u32 = 4;
const CALLER: Rank = Rank(1);
const ANSWERER: Rank = Rank(0);
const CALLER_NONCE: [u8; PROOF_BYTES] = [0x11; PROOF_BYTES];
const ANSWERER_NONCE: [u8; PROOF_BYTES] = [0x22; PROOF_BYTES];

/// Reads frames as the thread of a connection does, until one cannot be read; how it ended.
pub fn read_frames(
    from: &mut impl Read,
    limits: &Limits,
    mut each: impl FnMut(Option<Message>),
) -> String {
    let exchange = Exchange::default();
    loop {
        match read_frame(from, CALLER, limits, &exchange) {
            Ok(Received::Message(message)) => each(Some(message)),
            Ok(Received::Heartbeat(_)) => each(None),
            Err(error) => return error.to_string(),
        }
    }
}

/// What one side of a handshake did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// Whether it took the other side for a rank of the job.
    pub accepted: bool,
    /// How many bytes it has read.
    pub read: usize,
    /// The bytes it has written.
    pub written: Vec<u8>,
}

/// What the answering rank does with these bytes of a pending connection, which come in pieces of at most `piece`.
pub fn answer(bytes: &[u8], started: bool, piece: usize) -> Side {
    let secret = secret();
    let me = identity(ANSWERER, &secret);
    let mut answering = Answering::new(ANSWERER_NONCE);
    let mut side = Side {
        accepted: false,
        read: 0,
        written: Vec::new(),
    };
    loop {
        let rest = &bytes[side.read..];
        let count = rest.len().min(answering.wanted()).min(piece.max(1));
        let (now, _) = rest.split_at(count);
        side.read += count;
        if let Some(outcome) = answering.take(now, &me, started, &mut side.written) {
            side.accepted = outcome.is_ok();
            return side;
        }
        if count == 0 {
            return side;
        }
    }
}

/// What a rank that encrypts reads of records that its peer has sealed, after `harm` was done to their bytes; the
/// contents as they were sealed, and what was opened before an error ended the connection.
pub fn opened(contents: &[Vec<u8>], harm: impl FnOnce(&mut Vec<u8>)) -> (Vec<u8>, Vec<u8>) {
    let secret = secret();
    let transcript: [&[u8]; 1] = [b"a handshake"];
    let mut caller = KeyExchange::of_caller(&secret, &transcript).expect("the protocol is known");
    let offer = caller.offer().expect("a new exchange");
    let (message, reader) =
        KeyExchange::accept(&secret, &transcript, &offer).expect("a genuine offer");
    let writer = caller.finish(&message).expect("a genuine answer");
    let mut wire = Vec::new();
    for content in contents {
        wire.extend(writer.sealed(content).expect("a small record"));
    }
    harm(&mut wire);
    let (mut from, mut got, mut piece) = (&wire[..], Vec::new(), [0; 64]);
    while let Ok(count @ 1..) = reader.read(&mut from, &mut piece) {
        got.extend_from_slice(&piece[..count]);
    }
    (contents.concat(), got)
}

/// What the calling rank does with these bytes of whoever answers.
pub fn call(bytes: &[u8], register: bool) -> Side {
    let mut wire = Wire::new(bytes);
    let secret = secret();
    let purpose = if register {
        Purpose::Register
    } else {
        Purpose::Mesh
    };
    let me = identity(CALLER, &secret);
    let outcome = call_over(&mut wire, &CALLER_NONCE, &me, purpose);
    wire.end(outcome.is_ok())
}

/// All bytes of the genuine caller and of the genuine answerer, in a handshake that succeeds.
pub fn genuine(register: bool) -> (Vec<u8>, Vec<u8>) {
    let hello = call(&[], register).written;
    let challenge = answer(&hello, false, usize::MAX).written;
    let caller = call(&challenge, register).written;
    let answerer = answer(&caller, false, usize::MAX).written;
    (caller, answerer)
}

/// A registration as it was understood, sent on.
pub fn registration(value: &Value) -> Option<Value> {
    Registration::from_value(value).map(|registration| registration.to_value())
}

/// A table of all ranks as it was understood, sent on.
pub fn table(value: &Value, world: u32) -> Option<Value> {
    let rows = Row::table_from_value(value, world)?;
    Some(Value::List(rows.iter().map(Row::to_value).collect()))
}

fn secret() -> Secret {
    Secret::new(b"the secret of the fuzz targets".to_vec()).expect("long enough")
}

fn identity(rank: Rank, secret: &Secret) -> Identity<'_> {
    Identity {
        rank,
        world: WORLD,
        secret,
        encrypt: false,
    }
}

/// One end of a connection whose other end has said everything already.
struct Wire<'a> {
    all: usize,
    incoming: &'a [u8],
    written: Vec<u8>,
}

impl<'a> Wire<'a> {
    fn new(incoming: &'a [u8]) -> Self {
        Self {
            all: incoming.len(),
            incoming,
            written: Vec::new(),
        }
    }

    fn end(self, accepted: bool) -> Side {
        Side {
            accepted,
            read: self.all - self.incoming.len(),
            written: self.written,
        }
    }
}

impl Read for Wire<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.incoming.read(into)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.written.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
