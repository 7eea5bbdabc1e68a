//! The worker with what is on its way through it; behind one lock.

use std::collections::{BTreeMap, VecDeque};

use shardwright_core::Rank;
use shardwright_ucx::{AdmissionKey, Armed, EndpointId, KEY_BYTES, UcxError, Worker, WorkerEvent};
use shardwright_wire::Frame;

use super::assembly::{Name, parts_of};
use super::window::Window;

/// A token names the peer and the message: more messages than any job sends to one rank.
const TOKEN_MESSAGE_BITS: u32 = 40;

pub(super) struct Sending {
    worker: Worker,
    peers: BTreeMap<Rank, Outgoing>,
}

struct Outgoing {
    endpoint: EndpointId,
    key: AdmissionKey,
    window: Window,
}

impl Sending {
    pub(super) fn new(worker: Worker) -> Self {
        Self {
            worker,
            peers: BTreeMap::new(),
        }
    }

    /// Begins to connect to the worker of a peer, which takes only what carries its key.
    pub(super) fn connect(&mut self, peer: Rank, place: &[u8]) -> Result<(), UcxError> {
        let Some((key, address)) = place.split_first_chunk::<KEY_BYTES>() else {
            return Err(UcxError::NoKey { peer });
        };
        let endpoint = self.worker.connect(peer, address)?;
        let outgoing = Outgoing {
            endpoint,
            key: *key,
            window: Window::default(),
        };
        self.peers.insert(peer, outgoing);
        Ok(())
    }

    /// Where peers reach this worker, and with which key.
    pub(super) fn place(&mut self, key: &AdmissionKey) -> Result<Vec<u8>, UcxError> {
        Ok([&key[..], &self.worker.address()?].concat())
    }

    pub(super) fn reaches(&self, peer: Rank) -> bool {
        self.peers.contains_key(&peer)
    }

    /// Whether there is room for so many bytes more on the way to a peer.
    pub(super) fn has_room(&self, peer: Rank, bytes: u64) -> bool {
        self.peers
            .get(&peer)
            .is_none_or(|outgoing| outgoing.window.has_room(bytes))
    }

    /// Messages sent to a peer so far.
    pub(super) fn sent_to(&self, peer: Rank) -> u64 {
        self.peers
            .get(&peer)
            .map_or(0, |outgoing| outgoing.window.next())
    }

    /// How many parts are still on their way.
    pub(super) fn parts_under_way(&self) -> usize {
        self.peers
            .values()
            .map(|outgoing| outgoing.window.parts())
            .sum()
    }

    /// Takes only messages of ranks below `world` that carry the key.
    pub(super) fn require(&mut self, key: AdmissionKey, world: u32) -> Result<(), UcxError> {
        self.worker.require(key, world)
    }

    /// How many messages were dropped for want of the key.
    pub(super) fn unknown_peers(&mut self) -> u64 {
        self.worker.unknown_peers().unwrap_or_default()
    }

    pub(super) fn send(&mut self, peer: Rank, frame: Frame) -> Result<(), UcxError> {
        let Some(outgoing) = self.peers.get_mut(&peer) else {
            return Err(UcxError::EndpointClosed { peer });
        };
        let message = outgoing.window.begin(frame.num_bytes());
        let token = u64::from(peer.0) << TOKEN_MESSAGE_BITS | message;
        let mut outcome = Ok(());
        for (part, pieces) in (0..).zip(parts_of(frame)) {
            let header = [&outgoing.key[..], &Name { message, part }.to_bytes()].concat();
            outcome = self.worker.send(outgoing.endpoint, &header, pieces, token);
            if outcome.is_err() {
                break;
            }
            outgoing.window.add(message);
        }
        outgoing.window.settle();
        outcome
    }

    /// Advances a bounded while; the events that are not only this rank's own bookkeeping go to `inbox`.
    pub(super) fn advance(&mut self, inbox: &mut VecDeque<WorkerEvent>) -> Result<bool, UcxError> {
        let mut happened = false;
        for _ in 0..64 {
            if !self.worker.progress()? {
                break;
            }
            happened = true;
        }
        for event in self.worker.take_events()? {
            happened = true;
            if let WorkerEvent::Sent { token } | WorkerEvent::SendFailed { token, .. } = &event
                && let Some(outgoing) = self.peers.get_mut(&peer_of(*token))
            {
                let message = token & ((1 << TOKEN_MESSAGE_BITS) - 1);
                outgoing.window.remove(message);
            }
            if !matches!(event, WorkerEvent::Sent { .. }) {
                inbox.push_back(event);
            }
        }
        Ok(happened)
    }

    pub(super) fn arm(&mut self) -> Result<bool, UcxError> {
        Ok(self.worker.arm()? == Armed::Ready)
    }

    /// Ends what is on its way to a peer and from it.
    pub(super) fn abandon(&mut self, peer: Rank) {
        if let Some(outgoing) = self.peers.get(&peer)
            && let Err(error) = self.worker.abandon(outgoing.endpoint)
        {
            tracing::debug!(%peer, %error, "the endpoint was closed before");
        }
    }

    pub(super) fn close(&mut self, deadline: std::time::Duration) {
        drop(self.worker.close(deadline));
    }
}

/// Whom a token of [`Sending::send`] names.
pub(super) fn peer_of(token: u64) -> Rank {
    Rank((token >> TOKEN_MESSAGE_BITS) as u32)
}
