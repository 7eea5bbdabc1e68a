//! What a transport asks: can this tensor stay where it is, and where is one that came?

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use shardwright_core::Rank;
use shardwright_wire::codec::encode_placed;
use shardwright_wire::{Buffer, Frame, Limits, Message, NoMemory, SharedMemory, SharedPlace};

use super::SHARED_BYTES;
use super::import::{Import, ImportError};
use super::pool::{Offer, Pool};
use crate::counters::Counters;
use crate::cuda::{DeviceMemory, DeviceTensor};
use crate::error::CommError;
use crate::routing::{self, Between, Choice, Decision, Devices, End, Facts, Memory, Route};

/// How the other ranks can be reached.
#[derive(Debug, Default)]
pub struct Reach {
    /// The ranks of this host.
    pub neighbours: BTreeSet<Rank>,
    /// What the configuration allows.
    pub choice: Choice,
    /// This rank's device, where CUDA's driver is.
    pub device: Option<Arc<DeviceMemory>>,
}

/// A rank's persistent buffer, and those of the other ranks of its host.
#[derive(Default)]
pub struct Exchange {
    pool: Option<Arc<Pool>>,
    imports: BTreeMap<Rank, Arc<Import>>,
    reach: Reach,
    ucx_peers: OnceLock<BTreeSet<Rank>>,
    counters: Counters,
}

/// The most bytes that one tensor can have in this rank's buffers.
#[derive(Clone, Copy)]
struct Room {
    host: u64,
    device: u64,
    /// Whether one more block can be lent.
    can_lend: bool,
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
            ucx_peers: OnceLock::new(),
            counters: Counters::default(),
        }
    }

    /// Says which ranks UCX reaches, once it has looked; before, none counts as one.
    pub(crate) fn reached_by_ucx(&self, ranks: BTreeSet<Rank>) {
        self.ucx_peers.get_or_init(|| ranks);
    }

    /// The binary form of a message to a rank; its large tensors are lent to the rank where it
    /// has mapped this rank's buffer.
    pub(crate) fn encode(
        &self,
        to: Rank,
        message: &Message,
        limits: &Limits,
    ) -> Result<Frame, CommError> {
        let mut places = Vec::new();
        let mut decisions = Vec::new();
        let frame = encode_placed(message, limits, &mut |buffer| {
            let bytes = buffer.len() as u64;
            let tensor = DeviceTensor::of(buffer);
            let device = tensor.as_deref();
            let mut room = Room {
                host: u64::MAX,
                device: device.map_or(0, DeviceTensor::device_room),
                can_lend: true,
            };
            let mut place = None;
            let decision = loop {
                let decision = self.decide(to, device.is_some(), bytes, room);
                let full = match decision.route {
                    Route::PeerCopy => {
                        place = self.lend_device(tensor.as_ref());
                        &mut room.device
                    }
                    Route::SharedMemory => {
                        place = self.lend(buffer, tensor.as_ref());
                        &mut room.host
                    }
                    _ => break decision,
                };
                if place.is_some() {
                    break decision;
                }
                if self.pool.as_ref().is_some_and(|pool| pool.can_lend()) {
                    *full = 0;
                } else {
                    room.can_lend = false;
                }
            };
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
        frame.map_err(|error| CommError::Unsendable {
            rank: to,
            reason: error.to_string(),
        })
    }

    /// Whether a rank will copy a tensor out of this rank's device buffer by itself.
    pub(crate) fn copies_from(&self, to: Rank, tensor: &DeviceTensor) -> bool {
        let room = Room {
            host: u64::MAX,
            device: tensor.device_room(),
            can_lend: true,
        };
        self.decide(to, true, tensor.num_bytes(), room).route == Route::PeerCopy
    }

    fn lend_device(&self, tensor: Option<&Arc<DeviceTensor>>) -> Option<SharedPlace> {
        self.reach.device.as_ref()?.lend(tensor?)
    }

    /// Lends host memory: a tensor's own, or what one of a device was staged in. The receiver may write into it, so
    /// what somebody else holds too, such as a result that stays here until it is not needed any more, is copied.
    fn lend(&self, buffer: &Buffer, tensor: Option<&Arc<DeviceTensor>>) -> Option<SharedPlace> {
        let pool = self.pool.as_ref()?;
        let (bytes, sole) = match tensor {
            None => (buffer, true),
            // One is the buffer's own, one is the caller's.
            Some(tensor) => (tensor.on_host_now().ok()?, Arc::strong_count(tensor) <= 2),
        };
        let own = if sole { pool.lend(bytes) } else { None };
        own.or_else(|| pool.lend_copy(bytes.as_bytes()))
    }

    /// By which route a tensor travels when this rank's buffers have so much room.
    fn decide(&self, to: Rank, of_device: bool, bytes: u64, room: Room) -> Decision {
        let end = End {
            memory: if of_device {
                Memory::Cuda
            } else {
                Memory::Host
            },
            host_room: room.host,
            device_room: room.device,
            can_lend: room.can_lend,
        };
        let between = if self.reach.neighbours.contains(&to) {
            Between::SameHost {
                devices: self.devices(to),
                shared_memory: self.pool.as_ref().is_some_and(|pool| pool.is_mapped_by(to)),
            }
        } else {
            Between::Network
        };
        routing::route(&Facts {
            source: end,
            destination: end,
            between,
            ucx_loaded: self
                .ucx_peers
                .get()
                .is_some_and(|peers| peers.contains(&to)),
            device_to_device_disabled: !self
                .reach
                .device
                .as_ref()
                .is_some_and(|device| device.is_enabled()),
            choice: self.reach.choice,
            bytes,
            in_message_below: SHARED_BYTES as u64,
        })
    }

    /// How this rank's device stands to that of a rank of its host, as far as memory has been opened.
    fn devices(&self, to: Rank) -> Devices {
        let opened = self
            .pool
            .as_ref()
            .is_some_and(|pool| pool.device_is_mapped_by(to));
        if !opened {
            return Devices::Apart;
        }
        let other = self
            .imports
            .get(&to)
            .and_then(|import| import.device.devices());
        other.unwrap_or(Devices::Peers)
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
        let device = self.reach.device.as_ref();
        if let Some(device) = device {
            device.open(import);
        }
        let (received, route) = match (place.memory, device) {
            (SharedMemory::Host, _) => (import.receive(place, bytes)?, Route::SharedMemory),
            (SharedMemory::Device, Some(device)) => {
                (device.receive(import, place, bytes)?, Route::PeerCopy)
            }
            (SharedMemory::Device, None) => return Err(ImportError::NoDevice { bytes }),
        };
        self.counters.received(route, bytes as u64);
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

    /// This rank's device, where CUDA's driver is.
    pub fn device(&self) -> Option<&Arc<DeviceMemory>> {
        self.reach.device.as_ref()
    }

    /// The other ranks' buffers.
    pub(crate) fn imports(&self) -> impl Iterator<Item = (Rank, &Arc<Import>)> {
        self.imports.iter().map(|(rank, import)| (*rank, import))
    }

    /// Nothing comes from a rank any more, after what was delivered.
    pub fn lost(&self, rank: Rank) {
        if let Some(import) = self.imports.get(&rank) {
            import.device.close();
        }
    }

    /// The connection is closed: nothing is sent from this rank's buffer any more, nor received.
    pub fn close(&self) {
        self.pool.iter().for_each(|pool| pool.close());
        for import in self.imports.values() {
            import.device.close();
        }
    }

    /// How this rank's device stands to another's, and why they do not copy from each other.
    pub(crate) fn describe_devices(&self, to: Rank) -> String {
        let import = self.imports.get(&to);
        let refusal = import.and_then(|import| import.device.refusal());
        let refused_there = self
            .pool
            .as_ref()
            .is_some_and(|pool| pool.device_is_refused_to(to));
        let opened = import.and_then(|import| import.device.devices());
        match (refusal, opened) {
            (Some(reason), _) => format!("its memory cannot be opened here: {reason}"),
            _ if refused_there => "this rank's memory cannot be opened there".to_owned(),
            (None, Some(Devices::Same)) => "the same device".to_owned(),
            (None, Some(_)) => "copies between two devices".to_owned(),
            (None, None) => "not used".to_owned(),
        }
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
