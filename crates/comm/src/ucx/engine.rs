//! Moves messages through a UCX worker that several threads share.
//!
//! Who sends hands its message to UCX itself; who waits for a message reads for itself, and
//! sleeps on the worker's descriptor; one thread reads while nobody waits.
//!
//! - UE-1: messages are delivered under one lock, which is never held while the worker's lock is
//!   asked for by a receiver that sends.
//! - UE-2: a reader that leaves arms the descriptor before it says so: what has come since then wakes the
//!   thread at once, what came before was read.
//! - UE-3: after a loss was told nothing of that peer is delivered (CM-3).
//! - UE-4: who arms the descriptor takes what was to wake others, and so wakes them again or looks for them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::{Frame, Limits};

use shardwright_ucx::{AdmissionKey, EventHandle, KEY_BYTES, UcxError, Wakes, Worker, WorkerEvent};

use super::assembly::{Assembly, Name};
use super::sending::{Sending, peer_of};
use crate::BACKLOG_DEADLINE;
use crate::error::CommError;
use crate::exchange::Exchange;
use crate::routing::Route;
use crate::transport::{Loss, Receiver};
use shardwright_system::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shardwright_system::sync::{Mutex, MutexGuard, thread};

/// How long a failed connection may wait for the liveness link to say what became of its peer.
pub(super) const VERDICT_DEADLINE: Duration = Duration::from_secs(2);

pub(super) struct Engine {
    receiver: Arc<dyn Receiver>,
    pub(super) events: EventHandle,
    pub(super) wakes: Wakes,
    pub(super) sending: Mutex<Sending>,
    key: AdmissionKey,
    pub(super) inbox: Mutex<VecDeque<WorkerEvent>>,
    pub(super) delivery: Mutex<BTreeMap<Rank, From>>,
    /// Held by the one waiting thread that reads for itself.
    pub(super) reader: Mutex<()>,
    pub(super) is_read: AtomicBool,
    pub(super) closing: AtomicBool,
    pub(super) spin: Duration,
    setup: OnceLock<(Limits, Arc<Exchange>)>,
    sent: AtomicU64,
    received: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
}

/// Who delivers what is found while sending.
#[derive(Clone, Copy)]
pub(super) enum Reading {
    /// The sending thread: waking another one costs more than a delivery.
    Here,
    /// Another one.
    Elsewhere,
}

/// What is known of one sender.
#[derive(Default)]
pub(super) struct From {
    assembly: Assembly,
    pub(super) lost: Option<Loss>,
    pub(super) suspected: Option<(Instant, String)>,
}

/// Counters: messages sent and received, bytes sent and received, messages without the key.
pub(super) type Counts = [u64; 5];

impl Engine {
    /// Of a job of `world` ranks.
    pub(super) fn new(
        mut worker: Worker,
        world: u32,
        spin: Duration,
        receiver: Arc<dyn Receiver>,
    ) -> Result<Self, UcxError> {
        let mut key = [0; KEY_BYTES];
        getrandom::fill(&mut key).map_err(|error| UcxError::Call {
            action: "make a key",
            reason: error.to_string(),
        })?;
        let events = worker.event_handle()?;
        let wakes = Wakes::of(events.descriptor()).map_err(|error| UcxError::Call {
            action: "watch its event descriptor",
            reason: error.to_string(),
        })?;
        let mut sending = Sending::new(worker);
        sending.require(key, world)?;
        Ok(Self {
            key,
            receiver,
            events,
            wakes,
            sending: Mutex::new(sending),
            inbox: Mutex::default(),
            delivery: Mutex::default(),
            reader: Mutex::default(),
            is_read: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            spin,
            setup: OnceLock::new(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
        })
    }

    /// Connects to the workers of the peers, but for those to whom UCX has no way, which the others get told by
    /// [`Self::reaches`], and those who left meanwhile. Nothing is delivered before.
    pub(super) fn begin(
        &self,
        limits: Limits,
        exchange: Arc<Exchange>,
        addresses: &BTreeMap<Rank, Vec<u8>>,
    ) -> Result<(), UcxError> {
        for (peer, address) in addresses {
            let connected = lock(&self.sending).connect(*peer, address);
            match connected {
                Ok(()) => {}
                Err(UcxError::Unreachable { .. }) => {
                    tracing::debug!(%peer, "no way of UCX to a rank; its messages go over TCP");
                }
                Err(_) if self.hears_of_loss(*peer) => {}
                Err(error) => return Err(error),
            }
        }
        self.setup.get_or_init(|| (limits, exchange));
        Ok(())
    }

    /// Whether the liveness link says within a while that a peer is gone.
    fn hears_of_loss(&self, peer: Rank) -> bool {
        let deadline = Instant::now() + VERDICT_DEADLINE;
        loop {
            let delivery = lock(&self.delivery);
            if delivery.get(&peer).is_some_and(|from| from.lost.is_some()) {
                return true;
            }
            drop(delivery);
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Where peers reach this rank, and with which key.
    pub(super) fn place(&self) -> Result<Vec<u8>, UcxError> {
        lock(&self.sending).place(&self.key)
    }

    pub(super) fn reaches(&self, peer: Rank) -> bool {
        lock(&self.sending).reaches(peer)
    }

    pub(super) fn sent_to(&self, peer: Rank) -> u64 {
        lock(&self.sending).sent_to(peer)
    }

    pub(super) fn counts(&self) -> Counts {
        let [sent, received, bytes_sent, bytes_received] = [
            &self.sent,
            &self.received,
            &self.bytes_sent,
            &self.bytes_received,
        ]
        .map(|count| count.load(Ordering::Relaxed));
        let unknown_peers = lock(&self.sending).unknown_peers();
        [sent, received, bytes_sent, bytes_received, unknown_peers]
    }

    /// Sends a frame; waits only while too much is on its way already.
    pub(super) fn send(&self, peer: Rank, frame: Frame, reading: Reading) -> Result<(), CommError> {
        let bytes = frame.num_bytes();
        let began = Instant::now();
        let mut sending = lock(&self.sending);
        while !sending.has_room(peer, bytes) {
            let queued = sending.parts_under_way();
            let moved = self.read(&mut sending);
            drop(sending);
            if let Some(error) = self.refusal(peer) {
                return Err(error);
            }
            if began.elapsed() > BACKLOG_DEADLINE {
                return Err(CommError::Backlog {
                    rank: peer,
                    queued,
                    waited: BACKLOG_DEADLINE,
                });
            }
            if !moved {
                thread::sleep(Duration::from_micros(50));
            }
            sending = lock(&self.sending);
        }
        let outcome = sending.send(peer, frame);
        self.read(&mut sending);
        drop(sending);
        if !lock(&self.inbox).is_empty() {
            match reading {
                Reading::Here => self.deliver(),
                // What came meanwhile is for those who read: a send does not wait for receivers.
                Reading::Elsewhere => self.events.signal(),
            }
        }
        match outcome {
            Ok(()) => {
                self.sent.fetch_add(1, Ordering::Relaxed);
                self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(self.refusal(peer).unwrap_or(CommError::PeerLost {
                rank: peer,
                loss: Loss::Broken {
                    reason: error.to_string(),
                },
            })),
        }
    }

    fn refusal(&self, peer: Rank) -> Option<CommError> {
        if self.closing.load(Ordering::SeqCst) {
            return Some(CommError::Closed);
        }
        // Whoever delivers may be the one who asks.
        let from = match self.delivery.try_lock() {
            Ok(delivery) => delivery,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let loss = from.get(&peer).and_then(|from| from.lost.clone());
        drop(from);
        // What came meanwhile was left to the holder of the lock.
        if !lock(&self.inbox).is_empty() {
            self.events.signal();
        }
        Some(CommError::PeerLost {
            rank: peer,
            loss: loss?,
        })
    }

    fn read(&self, sending: &mut Sending) -> bool {
        match sending.advance(&mut lock(&self.inbox)) {
            Ok(happened) => happened,
            Err(UcxError::Closed) => false,
            Err(error) => {
                tracing::error!(%error, "UCX does not go on");
                false
            }
        }
    }

    /// Reads and delivers what is there; whether anything was.
    pub(super) fn advance(&self) -> bool {
        let happened = self.read(&mut lock(&self.sending));
        self.deliver();
        happened
    }

    pub(super) fn deliver(&self) {
        // Who cannot have the lock leaves its events to the holder, which looks again after giving it up.
        while !lock(&self.inbox).is_empty() && self.setup.get().is_some() {
            let mut delivery = match self.delivery.try_lock() {
                Ok(delivery) => delivery,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            loop {
                let Some(event) = lock(&self.inbox).pop_front() else {
                    break;
                };
                self.take(&mut delivery, event);
            }
        }
    }

    fn take(&self, delivery: &mut BTreeMap<Rank, From>, event: WorkerEvent) {
        let (peer, reason) = match event {
            WorkerEvent::Received {
                from,
                header,
                payload,
            } => {
                let state = delivery.entry(from).or_default();
                if state.lost.is_some() || self.closing.load(Ordering::SeqCst) {
                    return;
                }
                self.bytes_received
                    .fetch_add(payload.len() as u64, Ordering::Relaxed);
                let Some((limits, exchange)) = self.setup.get() else {
                    return;
                };
                let assembled = Name::from_bytes(&header).and_then(|name| {
                    state.assembly.take(name, payload, limits, &|placed| {
                        if let Some(place) = placed.shared {
                            return exchange.receive(from, place, placed.bytes).map(Some);
                        }
                        exchange.received(Route::HostStaged, placed.bytes);
                        Ok(None)
                    })
                });
                match assembled {
                    Ok(messages) => {
                        for message in messages {
                            self.received.fetch_add(1, Ordering::Relaxed);
                            self.receiver.deliver(from, message);
                        }
                        return;
                    }
                    Err(error) => (from, error.to_string()),
                }
            }
            WorkerEvent::Refused { from, refusal } => (from, refusal.to_string()),
            WorkerEvent::ReceiveFailed { from, reason } => (from, reason),
            WorkerEvent::EndpointFailed { peer, reason, .. } => (peer, reason),
            WorkerEvent::SendFailed { token, reason } => (peer_of(token), reason),
            WorkerEvent::Sent { .. } => return,
        };
        let state = delivery.entry(peer).or_default();
        // A peer that died breaks its connection too, and the liveness link knows better what happened.
        state
            .suspected
            .get_or_insert_with(|| (Instant::now(), reason));
    }

    /// A peer is gone: says so once, after all that it had sent before a shutdown notice was delivered.
    pub(super) fn lose(&self, peer: Rank, loss: Loss, announced: Option<u64>) {
        let deadline = Instant::now() + VERDICT_DEADLINE;
        loop {
            let moved = self.advance();
            let completed = lock(&self.delivery)
                .get(&peer)
                .map_or(0, |from| from.assembly.completed());
            let missing = announced.is_some_and(|announced| completed < announced);
            if !moved && (!missing || Instant::now() > deadline) {
                break;
            }
            if !moved {
                thread::sleep(Duration::from_micros(200));
            }
        }
        let mut delivery = lock(&self.delivery);
        let state = delivery.entry(peer).or_default();
        let known = state.lost.is_some();
        state.lost.get_or_insert_with(|| loss.clone());
        drop(delivery);
        lock(&self.sending).abandon(peer);
        self.deliver();
        if !known && !self.closing.load(Ordering::SeqCst) {
            self.receiver.peer_lost(peer, loss);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
