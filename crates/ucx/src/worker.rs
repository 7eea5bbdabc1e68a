//! A worker: one owner's door to UCX.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::admission::AdmissionKey;
use super::endpoint::{Armed, EndpointId};
use super::error::{UcxError, WorkerEvent};
use super::library::Library;
use super::options::Options;
pub use super::raw::EventHandle;
use super::raw::{Context, RawWorker, SENDER_BYTES};
pub use super::wakes::Wakes;
use shardwright_system::Owner;

/// Sends and receives messages. One thread at a time: it may move between threads, and whoever
/// shares it puts it behind a lock.
pub struct Worker {
    rank: Rank,
    /// `None` once closed.
    raw: Option<RawWorker>,
    max_header: usize,
    peers: BTreeMap<EndpointId, Peer>,
    owner: Owner,
}

/// What is known of an endpoint's other side.
#[derive(Clone, Copy, Debug)]
struct Peer {
    rank: Rank,
    abandoned: bool,
}

impl Worker {
    /// Makes the worker of `rank`.
    pub fn create(library: &Library, rank: Rank, options: &Options) -> Result<Self, UcxError> {
        let context = Context::create(
            library.functions(),
            &options.required(),
            &options.wanted(),
            options.num_peers,
        )?;
        let raw = RawWorker::create(
            context,
            options.max_payload,
            options.spare_memory,
            options.report_errors,
        )?;
        let max_header = raw.max_header()?.saturating_sub(SENDER_BYTES);
        Ok(Self {
            rank,
            raw: Some(raw),
            max_header,
            peers: BTreeMap::new(),
            owner: Owner::this_process(),
        })
    }

    /// Takes only messages of ranks below `world` whose header begins with the key, which is cut off; others are
    /// dropped and counted.
    pub fn require(&mut self, key: AdmissionKey, world: u32) -> Result<(), UcxError> {
        self.raw()?.require(key, world);
        Ok(())
    }

    /// How many messages were dropped for want of the key.
    pub fn unknown_peers(&mut self) -> Result<u64, UcxError> {
        Ok(self.raw()?.unknown_peers())
    }

    fn raw(&mut self) -> Result<&mut RawWorker, UcxError> {
        if !self.owner.is_here() {
            return Err(UcxError::Forked);
        }
        self.raw.as_mut().ok_or(UcxError::Closed)
    }

    /// The address that peers connect to.
    pub fn address(&mut self) -> Result<Vec<u8>, UcxError> {
        self.raw()?.address()
    }

    /// The longest header that [`Self::send`] takes.
    pub fn max_header(&self) -> usize {
        self.max_header
    }

    /// Begins to connect to the worker of `peer`; never waits for it.
    pub fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<EndpointId, UcxError> {
        let endpoint = self.raw()?.connect(peer, address)?;
        let rank = peer;
        let abandoned = false;
        self.peers.insert(endpoint, Peer { rank, abandoned });
        Ok(endpoint)
    }

    /// The transports that an endpoint uses now, as `transport/device`. They are settled only
    /// after the first messages.
    pub fn transports(&mut self, endpoint: EndpointId) -> Result<Vec<String>, UcxError> {
        self.raw()?.transports(endpoint)
    }

    /// Sends a message; `token` comes back with its end. Never waits.
    pub fn send(
        &mut self,
        endpoint: EndpointId,
        header: &[u8],
        payload: Vec<Buffer>,
        token: u64,
    ) -> Result<(), UcxError> {
        if header.len() > self.max_header {
            return Err(UcxError::HeaderTooLong {
                length: header.len(),
                limit: self.max_header,
            });
        }
        let Some(peer) = self.peers.get(&endpoint) else {
            return Err(UcxError::NoSuchEndpoint { endpoint });
        };
        let closed = UcxError::EndpointClosed { peer: peer.rank };
        let rank = self.rank;
        let raw = self.raw()?;
        if !raw.is_open(endpoint) {
            return Err(closed);
        }
        let framed = [&rank.0.to_le_bytes(), header].concat();
        raw.send(endpoint, framed, payload, token)
    }

    /// Advances everything; whether anything happened.
    pub fn progress(&mut self) -> Result<bool, UcxError> {
        Ok(self.raw()?.progress())
    }

    /// What has happened since the last call. Calls nothing and waits for nothing.
    pub fn take_events(&mut self) -> Result<Vec<WorkerEvent>, UcxError> {
        let mut events = self.raw()?.take_events();
        for event in &events {
            if let WorkerEvent::EndpointFailed { endpoint, .. } = event {
                // Ends what UCX itself has not ended with the connection.
                self.raw()?.close_endpoint(*endpoint, true);
            }
        }
        if self.peers.values().any(|peer| peer.abandoned) {
            events.retain(|event| self.is_wanted(event));
        }
        Ok(events)
    }

    /// Whether an event is not of an abandoned peer (UCX-5).
    fn is_wanted(&self, event: &WorkerEvent) -> bool {
        let gone = |rank: &Rank| {
            let mut of_rank = self.peers.values().filter(|peer| peer.rank == *rank);
            of_rank.any(|peer| peer.abandoned)
        };
        match event {
            WorkerEvent::Sent { .. } | WorkerEvent::SendFailed { .. } => true,
            WorkerEvent::Received { from, .. }
            | WorkerEvent::ReceiveFailed { from, .. }
            | WorkerEvent::Refused { from, .. } => !gone(from),
            WorkerEvent::EndpointFailed { peer, .. } => !gone(peer),
        }
    }

    /// Memory that was received and is not used any more, for the next messages. Memory that
    /// somebody else still shares is left to them.
    pub fn give_back(&mut self, buffer: Buffer) -> Result<(), UcxError> {
        let raw = self.raw()?;
        if let Ok(memory) = buffer.try_into_words() {
            raw.give_back(memory);
        }
        Ok(())
    }

    /// Ends an endpoint without waiting: what is being sent fails now, and nothing that its peer
    /// has sent is reported any more. A second call does nothing.
    pub fn abandon(&mut self, endpoint: EndpointId) -> Result<(), UcxError> {
        let raw = self.raw.as_mut().ok_or(UcxError::Closed)?;
        let Some(peer) = self.peers.get_mut(&endpoint) else {
            return Err(UcxError::NoSuchEndpoint { endpoint });
        };
        if !peer.abandoned {
            peer.abandoned = true;
            raw.abandon(endpoint, peer.rank);
        }
        Ok(())
    }

    /// The descriptor for waiting and waking from other threads.
    pub fn event_handle(&mut self) -> Result<EventHandle, UcxError> {
        Ok(self.raw()?.event_handle())
    }

    /// Prepares for a sleep on the descriptor. Events that were not taken yet do not count: take
    /// them first.
    pub fn arm(&mut self) -> Result<Armed, UcxError> {
        Ok(if self.raw()?.arm()? {
            Armed::Ready
        } else {
            Armed::Busy
        })
    }

    /// Completes what is being sent, until `deadline` at the latest, and frees everything. Gives
    /// the last events. A second call does nothing.
    pub fn close(&mut self, deadline: Duration) -> Vec<WorkerEvent> {
        let Some(mut raw) = self.raw.take() else {
            return Vec::new();
        };
        if !self.owner.is_here() {
            return Vec::new();
        }
        let start = Instant::now();
        for endpoint in self.peers.keys() {
            raw.close_endpoint(*endpoint, false);
        }
        let handle = raw.event_handle();
        while raw.is_busy() {
            let Some(left) = deadline.checked_sub(start.elapsed()) else {
                break;
            };
            if raw.progress() {
                continue;
            }
            if raw.arm() != Ok(true) {
                std::thread::yield_now();
                continue;
            }
            // Not longer than this: some of UCX's own timers do not wake.
            if let Err(error) = handle.wait(left.min(LONGEST_SLEEP)) {
                tracing::warn!(%error, "waiting for UCX's events failed");
                break;
            }
        }
        for (endpoint, peer) in &self.peers {
            raw.abandon(*endpoint, peer.rank);
        }
        let events = raw.take_events();
        drop(raw);
        events
            .into_iter()
            .filter(|event| self.is_wanted(event))
            .collect()
    }
}

/// The longest sleep while a worker is being closed.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

impl std::fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Worker")
            .field("rank", &self.rank)
            .field("closed", &self.raw.is_none())
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}
