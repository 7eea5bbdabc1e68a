//! What messages over UCX reach, for the fuzz targets: who is let in, and how parts become messages. Behind the feature
//! `fuzzing`; no part of the library's interface.

use shardwright_buffers::ImportError;
use shardwright_core::Rank;
use shardwright_ucx::{Admission, KEY_BYTES};
use shardwright_wire::{Buffer, Frame, Limits, Message, Placed};

use super::assembly::{Assembly, Name, parts_of};

/// The key of the receiver.
pub const KEY: [u8; KEY_BYTES] = [0x33; KEY_BYTES];

/// The ranks of the job.
pub const WORLD: u32 = 4;

/// A receiver of parts, of which one sender's are put together.
pub struct PartReceiver {
    admission: Admission,
    assembly: Assembly,
}

impl Default for PartReceiver {
    fn default() -> Self {
        let mut admission = Admission::default();
        admission.require(KEY, WORLD);
        Self {
            admission,
            assembly: Assembly::default(),
        }
    }
}

impl PartReceiver {
    /// What the receiver does with a header and a payload: nothing for an unknown peer; for a rank, the messages that are
    /// complete now, or why the rank is given up.
    pub fn receive(
        &mut self,
        from: u32,
        header: &[u8],
        payload: &[u8],
        limits: &Limits,
    ) -> Option<Result<Vec<Message>, String>> {
        let name = self.admission.admit(Rank(from), header)?;
        if let Err(refusal) = self.admission.announce(Rank(from), payload.len()) {
            return Some(Err(refusal.to_string()));
        }
        self.admission.arrived(Rank(from), payload.len());
        let nowhere = |placed: &Placed| match placed.shared {
            None => Ok(None),
            Some(place) => Err(ImportError::NoSuchPlace {
                bytes: placed.bytes,
                offset: place.offset,
                slot: place.slot,
            }),
        };
        let assembled = Name::from_bytes(name).and_then(|name| {
            self.assembly
                .take(name, Buffer::copy_of(payload), limits, &nowhere)
        });
        Some(assembled.map_err(|error| error.to_string()))
    }

    /// How many messages were complete so far.
    pub fn completed(&self) -> u64 {
        self.assembly.completed()
    }

    /// How many were dropped for want of the key.
    pub fn unknown_peers(&self) -> u64 {
        self.admission.unknown_peers()
    }
}

/// The headers and payloads of a frame that is a sender's message of this number.
pub fn parts(message: u64, frame: Frame) -> Vec<(Vec<u8>, Vec<u8>)> {
    (0..)
        .zip(parts_of(frame))
        .map(|(part, pieces)| {
            let name = Name { message, part }.to_bytes();
            let payload: Vec<&[u8]> = pieces.iter().map(Buffer::as_bytes).collect();
            ([&KEY[..], &name].concat(), payload.concat())
        })
        .collect()
}
