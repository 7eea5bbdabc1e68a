//! What a transport asks: can this tensor stay where it is, and where is one that came?

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use shardwright_buffers::{Import, ImportError, Offer, Pool, SHARED_BYTES};
use shardwright_core::Rank;
use shardwright_cuda::{DeviceMemory, DeviceTensor, PeerDevice};
use shardwright_wire::codec::encode_placed;
use shardwright_wire::{Buffer, Frame, Limits, Message, NoMemory, SharedMemory, SharedPlace};

use crate::counters::TransportCounters;
use crate::error::CommError;
use crate::routing::{
    self, Between, Devices, End, Facts, MemoryKind, Route, RouteDecision, TransportChoice,
};

/// How the other ranks can be reached.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    /// The ranks of this host.
    pub(crate) neighbours: BTreeSet<Rank>,
    /// What the configuration allows.
    pub(crate) choice: TransportChoice,
    /// This rank's device, where CUDA's driver is.
    pub(crate) device: Option<Arc<DeviceMemory>>,
}

/// A rank's persistent buffer, and those of the other ranks of its host.
#[derive(Default)]
pub(crate) struct Exchange {
    pool: Option<Arc<Pool>>,
    peers: BTreeMap<Rank, PeerDevice>,
    pub(crate) reach: Reach,
    ucx_peers: OnceLock<BTreeSet<Rank>>,
    counters: TransportCounters,
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
    pub(crate) fn new(
        pool: Option<Arc<Pool>>,
        own: Rank,
        offers: &BTreeMap<Rank, Offer>,
        reach: Reach,
    ) -> Self {
        let mut peers = BTreeMap::new();
        for (rank, offer) in offers {
            match Import::open(offer, own) {
                Ok(import) => {
                    peers.insert(*rank, PeerDevice::of(import));
                }
                Err(error) => {
                    tracing::warn!(rank = %own, peer = %rank, %error, "no shared memory with a rank of this host; its tensors travel inside messages");
                }
            }
        }
        Self {
            pool,
            peers,
            reach,
            ucx_peers: OnceLock::new(),
            counters: TransportCounters::default(),
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
    fn decide(&self, to: Rank, of_device: bool, bytes: u64, room: Room) -> RouteDecision {
        let end = End {
            memory: if of_device {
                MemoryKind::Cuda
            } else {
                MemoryKind::Host
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
        let peer = self.peers.get(&to);
        match peer.and_then(PeerDevice::is_same_device) {
            Some(true) => Devices::Same,
            Some(false) | None => Devices::Peers,
        }
    }

    /// The bytes that a message of a rank names.
    pub(crate) fn receive(
        &self,
        from: Rank,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let peer = self.peers.get(&from).ok_or(ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        })?;
        let device = self.reach.device.as_ref();
        if let Some(device) = device {
            device.open(peer);
        }
        let (received, route) = match (place.memory, device) {
            (SharedMemory::Host, _) => (peer.import().receive(place, bytes)?, Route::SharedMemory),
            (SharedMemory::Device, Some(device)) => {
                (device.receive(peer, place, bytes)?, Route::PeerCopy)
            }
            (SharedMemory::Device, None) => return Err(ImportError::NoDevice { bytes }),
        };
        self.counters.received(route, bytes as u64);
        Ok(received)
    }

    /// Memory for bytes that follow in a frame: of this rank's buffer where there is room, so
    /// that its pages are warm.
    pub(crate) fn filled_by<E: From<NoMemory>>(
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
    pub(crate) fn received(&self, route: Route, bytes: usize) {
        let small = bytes < SHARED_BYTES;
        let route = if small { Route::InMessage } else { route };
        self.counters.received(route, bytes as u64);
    }

    /// The other ranks' buffers.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (Rank, &PeerDevice)> {
        self.peers.iter().map(|(rank, peer)| (*rank, peer))
    }

    /// Nothing comes from a rank any more, after what was delivered.
    pub(crate) fn lost(&self, rank: Rank) {
        if let Some(peer) = self.peers.get(&rank) {
            peer.close();
        }
    }

    /// Bytes of this rank's buffer that are in use, here or where they were sent to.
    pub(crate) fn buffer_used_bytes(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.used_bytes())
    }

    /// The connection is closed: nothing is sent from this rank's buffer any more, nor received.
    pub(crate) fn close(&self) {
        self.pool.iter().for_each(|pool| pool.close());
        self.peers.values().for_each(PeerDevice::close);
    }

    /// How this rank's device stands to another's, and why they do not copy from each other.
    pub(crate) fn describe_devices(&self, to: Rank) -> String {
        let peer = self.peers.get(&to);
        let refusal = peer.and_then(PeerDevice::refusal);
        let refused_there = self
            .pool
            .as_ref()
            .is_some_and(|pool| pool.device_is_refused_to(to));
        let same = peer.and_then(PeerDevice::is_same_device);
        match (refusal, same) {
            (Some(reason), _) => format!("its memory cannot be opened here: {reason}"),
            _ if refused_there => "this rank's memory cannot be opened there".to_owned(),
            (None, Some(true)) => "the same device".to_owned(),
            (None, Some(false)) => "copies between two devices".to_owned(),
            (None, None) => "not used".to_owned(),
        }
    }

    /// What travelled by which route.
    pub(crate) fn counters(&self) -> &TransportCounters {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use shardwright_wire::SharedMemory;

    use super::*;
    use crate::conformance::heavy;
    use crate::routing::Reason;

    const OWN: Rank = Rank(0);
    const PEER: Rank = Rank(1);

    fn message(data: &Buffer) -> Message {
        let Message::Object(mut object) = heavy(data.len(), 0) else {
            panic!("an object");
        };
        object.body.tensors[0].data = data.clone();
        Message::Object(object)
    }

    #[test]
    fn a_held_tensor_goes_through_shared_memory_as_often_as_it_is_asked_for() {
        let pool = Pool::new(8 << 20).unwrap();
        let reach = Reach {
            neighbours: BTreeSet::from([PEER]),
            ..Reach::default()
        };
        let exchange = Exchange::new(Some(Arc::clone(&pool)), OWN, &BTreeMap::new(), reach);
        let _import = Import::open(&pool.offer(), PEER).unwrap();
        let held = pool.copy_of(&vec![1; 100_000]);
        let send = |data: &Buffer| {
            let frame = exchange.encode(PEER, &message(data), &Limits::default());
            frame.expect("a good message").tensors.len()
        };
        for _ in 0..3 {
            assert_eq!(send(&held), 0, "its bytes are not in the message");
        }
        let on_the_heap = Buffer::copy_of(&vec![1; 100_000]);
        assert_eq!(send(&on_the_heap), 0, "nor those of what had no room once");
        let carried = |route: Route| exchange.counters().by_route()[route as usize].tensors_sent;
        let because = |reason: Reason| exchange.counters().by_reason()[reason as usize];
        assert_eq!(carried(Route::SharedMemory), 4);
        assert_eq!(because(Reason::Best), 4);
        // Now there is no room, and then no slot: each is told.
        let rest = pool.copy_of(&vec![1; (8 << 20) - 550_000]);
        assert_eq!(send(&held), 1);
        assert_eq!(because(Reason::SourceHostFull), 1);
        assert!(exchange.buffer_used_bytes() > 8 << 19);
        drop(rest);
        assert!(exchange.buffer_used_bytes() < 8 << 19);
        while pool.lend_copy(&[1]).is_some() {}
        assert_eq!(send(&held), 1);
        assert_eq!(carried(Route::Tcp), 2);
        assert_eq!(because(Reason::SourceHostFull), 1);
        assert_eq!(because(Reason::SourceLoansFull), 1);
    }

    #[test]
    fn ranks_are_lent_to_once_they_have_mapped_the_buffer() {
        let pool = Pool::new(1 << 20).unwrap();
        assert!(!pool.is_mapped_by(PEER));
        let offers = BTreeMap::from([(OWN, pool.offer())]);
        let exchange = Exchange::new(None, PEER, &offers, Reach::default());
        assert!(pool.is_mapped_by(PEER));
        assert!(!pool.is_mapped_by(Rank(2)));
        let nowhere = SharedPlace {
            memory: SharedMemory::Host,
            slot: 0,
            offset: 256 << 10,
        };
        assert!(
            exchange.receive(Rank(2), nowhere, 64).is_err(),
            "rank 2 offered nothing"
        );
        let beyond = Rank(1 << 20);
        assert!(Import::open(&pool.offer(), beyond).is_err());
        assert!(!pool.is_mapped_by(beyond));
    }
}
