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
use crate::routing::{self, Between, Choice, Decision, Devices, End, Facts, Memory, Rdma, Route};

/// How the other ranks can be reached.
#[derive(Debug, Default)]
pub struct Reach {
    /// The ranks of this host.
    pub neighbours: BTreeSet<Rank>,
    /// Those that UCX reaches.
    pub ucx_peers: BTreeSet<Rank>,
    /// What the configuration allows.
    pub choice: Choice,
}

/// A rank's persistent buffer, and those of the other ranks of its host.
#[derive(Default)]
pub struct Exchange {
    pool: Option<Arc<Pool>>,
    imports: BTreeMap<Rank, Arc<Import>>,
    reach: Reach,
    counters: Counters,
}

impl Exchange {
    /// Maps what the other ranks of this host offer. Ranks whose buffer cannot be mapped send bytes.
    pub fn new(
        pool: Option<Arc<Pool>>,
        own: Rank,
        offers: &BTreeMap<Rank, Offer>,
        reach: Reach,
    ) -> Self {
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
            reach,
            counters: Counters::default(),
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
        let mut places = Vec::new();
        let mut decisions = Vec::new();
        let frame = encode_placed(message, limits, &mut |buffer| {
            let bytes = buffer.len() as u64;
            let mut decision = self.decide(to, bytes, u64::MAX);
            let mut place = None;
            if decision.route == Route::SharedMemory {
                place = self.pool.as_ref().and_then(|pool| pool.lend(buffer));
                if place.is_none() {
                    decision = self.decide(to, bytes, 0);
                }
            }
            decisions.push((decision, bytes));
            places.extend(place);
            place
        });
        if frame.is_err() {
            for place in places {
                self.pool.iter().for_each(|pool| pool.revoke(place));
            }
        } else {
            for (decision, bytes) in decisions {
                self.counters.sent(decision.route, bytes);
                self.counters.decided(decision);
            }
        }
        frame
    }

    /// By which route a tensor travels when this rank's buffer has so much room.
    fn decide(&self, to: Rank, bytes: u64, host_room: u64) -> Decision {
        let end = End {
            memory: Memory::Host,
            host_room,
            device_room: 0,
        };
        let between = if self.reach.neighbours.contains(&to) {
            Between::SameHost {
                devices: Devices::Apart,
                shared_memory: self.pool.as_ref().is_some_and(|pool| pool.is_mapped_by(to)),
            }
        } else {
            // What RDMA there is matters to devices only.
            Between::Network {
                rdma: Rdma::Unavailable,
            }
        };
        routing::route(&Facts {
            source: end,
            destination: end,
            between,
            ucx_loaded: self.reach.ucx_peers.contains(&to),
            device_to_device_disabled: false,
            choice: self.reach.choice,
            bytes,
            in_message_below: SHARED_BYTES as u64,
        })
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
        self.received(Route::Tcp, bytes);
        Ok(filled)
    }

    /// Counts a tensor whose bytes came with a message, or by `route` where it is large.
    pub fn received(&self, route: Route, bytes: usize) {
        let small = bytes < SHARED_BYTES;
        let route = if small { Route::InMessage } else { route };
        self.counters.received(route, bytes as u64);
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
