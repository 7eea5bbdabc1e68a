//! Messages from their parts, in the order of sending, although the parts overtake each other.
//!
//! A message is numbered and travels as part 0, its frame with the small tensors behind it, and
//! one further part for each large tensor, which is thus received where it stays.

use std::collections::BTreeMap;

use shardwright_wire::codec::decode_control;
use shardwright_wire::{
    Buffer, CodecError, Frame, FrameKind, HEADER_BYTES, Header, Incoming, Limits, Message, Placed,
};

use shardwright_buffers::{ImportError, SHARED_BYTES};

/// Messages that may have begun to arrive before one that is still missing.
pub(super) const WINDOW: u64 = 1 << 16;

/// Bytes that are kept of messages behind one that is not complete, and of parts whose message's frame has not come.
/// A rank of the job never has more under way; see [`super::window`].
pub(super) const HELD_BYTES: u64 = 512 << 20;

/// The size of a part's name.
pub(super) const NAME_BYTES: usize = 12;

/// A part of a message that cannot be right.
#[derive(Debug, thiserror::Error)]
pub(super) enum AssemblyError {
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Shared(#[from] ImportError),
    #[error("part {part} of message {message} while message {next} is due")]
    Misplaced { message: u64, part: u32, next: u64 },
    #[error("part {part} of message {message} has {found} bytes; {expected} are due")]
    Size {
        message: u64,
        part: u32,
        found: usize,
        expected: usize,
    },
    #[error("a part without a name")]
    Nameless,
    #[error("{held} bytes behind message {next}; at most {HELD_BYTES} are kept")]
    TooMuch { held: u64, next: u64 },
}

/// Which part of which message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) message: u64,
    pub(super) part: u32,
}

impl Name {
    pub(super) fn to_bytes(self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[..8].copy_from_slice(&self.message.to_le_bytes());
        bytes[8..].copy_from_slice(&self.part.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, AssemblyError> {
        let bytes: &[u8; NAME_BYTES] = bytes.try_into().map_err(|_| AssemblyError::Nameless)?;
        let (message, part) = bytes.split_at(8);
        Ok(Self {
            message: u64::from_le_bytes(message.try_into().map_err(|_| AssemblyError::Nameless)?),
            part: u32::from_le_bytes(part.try_into().map_err(|_| AssemblyError::Nameless)?),
        })
    }
}

fn is_large(bytes: usize) -> bool {
    bytes >= SHARED_BYTES
}

/// The parts of a frame, each a list of pieces, in their order.
pub(super) fn parts_of(frame: Frame) -> Vec<Vec<Buffer>> {
    let mut first = vec![Buffer::copy_of(&frame.head)];
    let mut parts = Vec::new();
    for tensor in frame.tensors {
        if is_large(tensor.len()) {
            parts.push(vec![tensor]);
        } else {
            first.push(tensor);
        }
    }
    parts.insert(0, first);
    parts
}

/// Finds a tensor that lies in shared memory, and learns of those that come with the message.
pub(super) type Finding<'a> = &'a dyn Fn(&Placed) -> Result<Option<Buffer>, ImportError>;

/// What has come from one peer and is not complete.
#[derive(Default)]
pub(super) struct Assembly {
    next: u64,
    begun: BTreeMap<u64, Begun>,
    /// Bytes of all that has begun.
    held: u64,
}

#[derive(Default)]
struct Begun {
    /// Bytes that have come of it, and of them those that came before part 0.
    bytes: u64,
    early_bytes: u64,
    incoming: Option<Incoming>,
    /// The tensors, as far as they are there.
    tensors: Vec<Option<Buffer>>,
    /// For each further part the tensor that it is.
    large: Vec<usize>,
    /// Parts that came before part 0.
    early: BTreeMap<u32, Buffer>,
}

impl Assembly {
    /// How many messages were complete so far.
    pub(super) fn completed(&self) -> u64 {
        self.next
    }

    /// Takes a part; returns the messages that are complete now, in order.
    pub(super) fn take(
        &mut self,
        name: Name,
        payload: Buffer,
        limits: &Limits,
        find: Finding<'_>,
    ) -> Result<Vec<Message>, AssemblyError> {
        let Name { message, part } = name;
        let misplaced = AssemblyError::Misplaced {
            message,
            part,
            next: self.next,
        };
        if !(self.next..self.next.saturating_add(WINDOW)).contains(&message) {
            return Err(misplaced);
        }
        let begun = self.begun.entry(message).or_default();
        let bytes = payload.len() as u64;
        self.held += bytes;
        begun.bytes += bytes;
        if part > 0 && begun.incoming.is_none() {
            // Smaller tensors come with part 0; so the number of early parts is bounded by their bytes.
            if !is_large(payload.len()) {
                return Err(misplaced);
            }
            begun.early_bytes += bytes;
        }
        let early_bytes = begun.early_bytes;
        let of_next = self.begun.get(&self.next).map_or(0, |next| next.bytes);
        let held = (self.held - of_next).max(early_bytes);
        if held > HELD_BYTES {
            let next = self.next;
            return Err(AssemblyError::TooMuch { held, next });
        }
        let begun = self.begun.entry(message).or_default();
        match (part, &begun.incoming) {
            (0, None) => begun.begin(message, &payload, limits, find)?,
            (0, Some(_)) => return Err(misplaced),
            (_, Some(_)) => begun.fill(name, payload)?,
            (_, None) => {
                if begun.early.insert(part, payload).is_some() {
                    return Err(misplaced);
                }
            }
        }
        let mut complete = Vec::new();
        while self.begun.get(&self.next).is_some_and(Begun::is_complete) {
            if let Some(done) = self.begun.remove(&self.next) {
                self.held -= done.bytes;
                complete.extend(done.into_message());
            }
            self.next += 1;
        }
        Ok(complete)
    }
}

impl Begun {
    fn begin(
        &mut self,
        message: u64,
        payload: &Buffer,
        limits: &Limits,
        find: Finding<'_>,
    ) -> Result<(), AssemblyError> {
        let bytes = payload.as_bytes();
        let wrong_size = |expected| AssemblyError::Size {
            message,
            part: 0,
            found: bytes.len(),
            expected,
        };
        let header = bytes
            .first_chunk::<HEADER_BYTES>()
            .ok_or_else(|| wrong_size(HEADER_BYTES))?;
        let header = Header::parse(header, limits)?;
        if header.kind != FrameKind::Message {
            return Err(AssemblyError::Nameless);
        }
        let mut at = HEADER_BYTES + header.control_bytes as usize;
        let control = bytes.get(HEADER_BYTES..at).ok_or_else(|| wrong_size(at))?;
        let incoming = decode_control(control, header.tensor_bytes, limits)?;
        for (index, placed) in incoming.placed().iter().enumerate() {
            let size = placed.bytes;
            self.tensors.push(match find(placed)? {
                Some(found) => Some(found),
                None if is_large(size) => {
                    self.large.push(index);
                    None
                }
                None => {
                    let piece = bytes.get(at..at + size);
                    at += size;
                    Some(Buffer::copy_of(piece.ok_or_else(|| wrong_size(at))?))
                }
            });
        }
        if at != bytes.len() {
            return Err(wrong_size(at));
        }
        self.incoming = Some(incoming);
        self.early_bytes = 0;
        for (part, payload) in std::mem::take(&mut self.early) {
            self.fill(Name { message, part }, payload)?;
        }
        Ok(())
    }

    fn fill(&mut self, name: Name, payload: Buffer) -> Result<(), AssemblyError> {
        let Name { message, part } = name;
        let unknown = || AssemblyError::Misplaced {
            message,
            part,
            next: message,
        };
        let placed = self.incoming.as_ref().map(Incoming::placed);
        let index = *self.large.get(part as usize - 1).ok_or_else(unknown)?;
        let expected = placed.ok_or_else(unknown)?[index].bytes;
        if payload.len() != expected {
            return Err(AssemblyError::Size {
                message,
                part,
                found: payload.len(),
                expected,
            });
        }
        match self.tensors[index].replace(payload) {
            None => Ok(()),
            Some(_) => Err(unknown()),
        }
    }

    fn is_complete(&self) -> bool {
        self.incoming.is_some() && self.tensors.iter().all(Option::is_some)
    }

    fn into_message(self) -> Option<Message> {
        let tensors = self.tensors.into_iter().collect::<Option<Vec<_>>>()?;
        Some(self.incoming?.complete(tensors))
    }
}

#[cfg(test)]
mod tests;
