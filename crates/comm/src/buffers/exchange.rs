//! What a transport asks: can this tensor stay where it is, and where is one that came?

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shardwright_core::Rank;
use shardwright_wire::codec::encode_placed;
use shardwright_wire::{Buffer, CodecError, Frame, Limits, Message, NoMemory, SharedPlace};

use super::SHARED_BYTES;
use super::import::{Import, ImportError};
use super::pool::{Offer, Pool};
use crate::counters::Counters;
use crate::routing::{Decision, Reason, Route};

/// A rank's persistent buffer, and those of the other ranks of its host.
#[derive(Default)]
pub struct Exchange {
    pool: Option<Arc<Pool>>,
    imports: BTreeMap<Rank, Arc<Import>>,
    neighbours: BTreeSet<Rank>,
    counters: Counters,
}

impl Exchange {
    /// Maps what the other ranks of this host offer. Ranks whose buffer cannot be mapped send bytes.
    pub fn new(pool: Option<Arc<Pool>>, own: Rank, offers: &BTreeMap<Rank, Offer>) -> Self {
        let mut imports = BTreeMap::new();
        for (rank, offer) in offers {
            match Import::open(offer, own) {
                Ok(import) => {
                    imports.insert(*rank, import);
                }
                Err(error) => {
                    tracing::warn!(rank = %own, peer = %rank, %error, "no shared memory with a rank of this host; its tensors travel inside messages");
                }
            }
        }
        Self {
            pool,
            imports,
            neighbours: offers.keys().copied().collect(),
            ..Self::default()
        }
    }

    /// The binary form of a message to a rank; its large tensors are lent to the rank where it
    /// has mapped this rank's buffer.
    pub fn encode(
        &self,
        to: Rank,
        message: &Message,
        limits: &Limits,
    ) -> Result<Frame, CodecError> {
        let pool = self.pool.as_ref().filter(|pool| pool.is_mapped_by(to));
        let mut places = Vec::new();
        let mut decisions = Vec::new();
        let frame = encode_placed(message, limits, &mut |buffer| {
            let place = pool.and_then(|pool| lend(pool, buffer));
            decisions.push((self.decision(to, buffer, place), buffer.len() as u64));
            places.extend(place);
            place
        });
        if frame.is_err() {
            for place in places {
                pool.inspect(|pool| pool.revoke(place));
            }
        } else {
            for (decision, bytes) in decisions {
                self.counters.sent(decision.route, bytes);
                self.counters.decided(decision);
            }
        }
        frame
    }

    /// By which route a tensor travels that got this place, and why.
    fn decision(&self, to: Rank, buffer: &Buffer, place: Option<SharedPlace>) -> Decision {
        let (route, because) = match (place, &self.pool) {
            _ if buffer.len() < SHARED_BYTES => (Route::InMessage, Reason::Small),
            (Some(_), _) => (Route::SharedMemory, Reason::Best),
            (None, None) => (Route::Tcp, Reason::Configured),
            (None, Some(pool)) if pool.is_mapped_by(to) => (Route::Tcp, Reason::SourceHostFull),
            _ if self.neighbours.contains(&to) => (Route::Tcp, Reason::NoSharedMemory),
            _ => (Route::Tcp, Reason::NoUcx),
        };
        Decision { route, because }
    }

    /// The bytes that a message of a rank names.
    pub fn receive(
        &self,
        from: Rank,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let import = self.imports.get(&from).ok_or(ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        })?;
        let received = import.receive(place, bytes)?;
        self.counters.received(Route::SharedMemory, bytes as u64);
        Ok(received)
    }

    /// Memory for bytes that follow in a frame: of this rank's buffer where there is room, so
    /// that its pages are warm.
    pub fn filled_by<E: From<NoMemory>>(
        &self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Buffer, E> {
        let filled = match &self.pool {
            Some(pool) if bytes >= SHARED_BYTES => pool.filled_by(bytes, fill),
            _ => Buffer::filled_by(bytes, fill),
        }?;
        let small = bytes < SHARED_BYTES;
        let route = if small { Route::InMessage } else { Route::Tcp };
        self.counters.received(route, bytes as u64);
        Ok(filled)
    }

    /// What travelled by which route.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Bytes of this rank's buffer that are in use, here or at peers.
    pub fn used_bytes(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.used_bytes())
    }
}

fn lend(pool: &Arc<Pool>, buffer: &Buffer) -> Option<SharedPlace> {
    (buffer.len() >= SHARED_BYTES)
        .then(|| pool.lend(buffer))
        .flatten()
}
