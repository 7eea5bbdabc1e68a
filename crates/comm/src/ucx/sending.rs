//! The worker with what is on its way through it; behind one lock.

use std::collections::{BTreeMap, VecDeque};

use shardwright_core::Rank;
use shardwright_wire::Frame;

use super::assembly::{Name, parts_of};
use super::error::{Event, UcxError};
use super::worker::{Armed, EndpointId, Worker};

/// Bytes that may be on their way to one peer before a sender waits for some to arrive.
const BYTES_UNDER_WAY: u64 = 256 << 20;

/// A token names the peer and the bytes that its message keeps.
const TOKEN_BYTES: u32 = 40;

/// What a message must carry to be taken: UCX itself lets anybody connect. The receiver makes it,
/// and the ranks of the job learn it over connections that have proved the job's secret.
pub(super) type Key = [u8; KEY_BYTES];

/// The size of a key.
pub(super) const KEY_BYTES: usize = 16;

pub(super) struct Sending {
    worker: Worker,
    peers: BTreeMap<Rank, Outgoing>,
}

struct Outgoing {
    endpoint: EndpointId,
    key: Key,
    next_message: u64,
    under_way: u64,
    parts: u64,
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
            next_message: 0,
            under_way: 0,
            parts: 0,
        };
        self.peers.insert(peer, outgoing);
        Ok(())
    }

    /// Where peers reach this worker, and with which key.
    pub(super) fn place(&mut self, key: &Key) -> Result<Vec<u8>, UcxError> {
        Ok([&key[..], &self.worker.address()?].concat())
    }

    pub(super) fn reaches(&self, peer: Rank) -> bool {
        self.peers.contains_key(&peer)
    }

    /// Whether there is room for so many bytes more on the way to a peer.
    pub(super) fn has_room(&self, peer: Rank, bytes: u64) -> bool {
        self.peers.get(&peer).is_none_or(|outgoing| {
            outgoing.parts == 0 || outgoing.under_way.saturating_add(bytes) <= BYTES_UNDER_WAY
        })
    }

    /// Messages sent to a peer so far.
    pub(super) fn sent_to(&self, peer: Rank) -> u64 {
        self.peers
            .get(&peer)
            .map_or(0, |outgoing| outgoing.next_message)
    }

    /// How many parts are still on their way.
    pub(super) fn parts_under_way(&self) -> usize {
        self.peers
            .values()
            .map(|outgoing| outgoing.parts as usize)
            .sum()
    }

    pub(super) fn send(&mut self, peer: Rank, frame: Frame) -> Result<(), UcxError> {
        let Some(outgoing) = self.peers.get_mut(&peer) else {
            return Err(UcxError::EndpointClosed { peer });
        };
        let message = outgoing.next_message;
        outgoing.next_message += 1;
        for (part, pieces) in (0..).zip(parts_of(frame)) {
            let bytes = pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
            let bytes = bytes.min((1 << TOKEN_BYTES) - 1);
            let token = u64::from(peer.0) << TOKEN_BYTES | bytes;
            let header = [&outgoing.key[..], &Name { message, part }.to_bytes()].concat();
            self.worker
                .send(outgoing.endpoint, &header, pieces, token)?;
            outgoing.under_way += bytes;
            outgoing.parts += 1;
        }
        Ok(())
    }

    /// Advances a bounded while; the events that are not only this rank's own bookkeeping go to `inbox`.
    pub(super) fn advance(&mut self, inbox: &mut VecDeque<Event>) -> Result<bool, UcxError> {
        let mut happened = false;
        for _ in 0..64 {
            if !self.worker.progress()? {
                break;
            }
            happened = true;
        }
        for event in self.worker.take_events()? {
            happened = true;
            if let Event::Sent { token } | Event::SendFailed { token, .. } = &event {
                let peer = Rank((token >> TOKEN_BYTES) as u32);
                if let Some(outgoing) = self.peers.get_mut(&peer) {
                    outgoing.under_way -= token & ((1 << TOKEN_BYTES) - 1);
                    outgoing.parts -= 1;
                }
            }
            if !matches!(event, Event::Sent { .. }) {
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
    Rank((token >> TOKEN_BYTES) as u32)
}
