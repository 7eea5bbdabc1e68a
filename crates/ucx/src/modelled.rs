//! Workers and descriptors as checks of concurrency have them: what UCX and the kernel promise, and no more.
//!
//! The descriptor of a worker becomes readable with the first message after it was armed, or with a signal; to arm it
//! makes it unreadable, and does not succeed then. A wait that is to last no longer than a poll ends at once.
#![allow(
    dead_code,
    missing_docs,
    clippy::needless_pass_by_value,
    clippy::struct_excessive_bools,
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the face of the real ones, which may refuse; only tests have networks"
)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::admission::AdmissionKey;
use super::endpoint::{Armed, EndpointId};
use super::error::{UcxError, WorkerEvent};
use super::library::Library;
use super::options::Options;
use shardwright_system::sync::{Condvar, Mutex, MutexGuard, thread};

/// What lasts no longer than this is a poll.
const POLL: Duration = Duration::from_millis(5);

/// What connects the workers of a check.
#[derive(Default)]
pub struct Network {
    ends: Mutex<BTreeMap<Rank, Arc<End>>>,
}

/// One worker's end of it.
#[derive(Default)]
struct End {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    arrived: VecDeque<WorkerEvent>,
    events: Vec<WorkerEvent>,
    /// What messages begin with.
    key: AdmissionKey,
    armed: bool,
    readable: bool,
    /// Whether who waits for edges is to be told of them, and whether there was one.
    watched: bool,
    edge: bool,
}

impl State {
    fn become_readable(&mut self) {
        self.readable = true;
        self.edge |= self.watched;
    }
}

impl End {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait(&self, at_most: Duration, is_over: impl Fn(&mut State) -> bool) {
        if at_most <= POLL {
            thread::yield_now();
            return;
        }
        let mut state = self.lock();
        while !is_over(&mut state) {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A worker that sends by putting messages at their receivers' ends.
pub struct Worker {
    rank: Rank,
    network: Arc<Network>,
    end: Arc<End>,
}

impl Worker {
    /// Checks do not run over the real UCX.
    pub fn create(_: &Library, _: Rank, _: &Options) -> Result<Self, UcxError> {
        Err(UcxError::Closed)
    }

    pub fn join(network: &Arc<Network>, rank: Rank) -> Self {
        let mut ends = network.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let end = Arc::clone(ends.entry(rank).or_default());
        drop(ends);
        Self {
            rank,
            network: Arc::clone(network),
            end,
        }
    }

    pub fn address(&mut self) -> Result<Vec<u8>, UcxError> {
        Ok(self.rank.0.to_le_bytes().to_vec())
    }

    pub fn connect(&mut self, peer: Rank, _: &[u8]) -> Result<EndpointId, UcxError> {
        Ok(EndpointId(peer.0))
    }

    pub fn send(
        &mut self,
        endpoint: EndpointId,
        header: &[u8],
        payload: Vec<Buffer>,
        token: u64,
    ) -> Result<(), UcxError> {
        let ends = self.network.ends.lock();
        let ends = ends.unwrap_or_else(PoisonError::into_inner);
        let peer = Arc::clone(&ends[&Rank(endpoint.0)]);
        drop(ends);
        let pieces: Vec<_> = payload.iter().map(Buffer::as_bytes).collect();
        let message = WorkerEvent::Received {
            from: self.rank,
            header: header.to_vec(),
            payload: Buffer::copy_of(&pieces.concat()),
        };
        peer.change(|state| {
            state.arrived.push_back(message);
            if std::mem::take(&mut state.armed) {
                state.become_readable();
            }
        });
        self.end.lock().events.push(WorkerEvent::Sent { token });
        Ok(())
    }

    pub fn require(&mut self, key: AdmissionKey, _: u32) -> Result<(), UcxError> {
        self.end.lock().key = key;
        Ok(())
    }

    pub fn unknown_peers(&mut self) -> Result<u64, UcxError> {
        Ok(0)
    }

    pub fn progress(&mut self) -> Result<bool, UcxError> {
        let mut state = self.end.lock();
        let mut event = state.arrived.pop_front();
        if let Some(WorkerEvent::Received { header, .. }) = &mut event {
            assert!(header.starts_with(&state.key), "peers know the key");
            header.drain(..state.key.len());
        }
        let happened = event.is_some();
        state.events.extend(event);
        Ok(happened)
    }

    pub fn take_events(&mut self) -> Result<Vec<WorkerEvent>, UcxError> {
        Ok(std::mem::take(&mut self.end.lock().events))
    }

    pub fn arm(&mut self) -> Result<Armed, UcxError> {
        let mut state = self.end.lock();
        if std::mem::take(&mut state.readable) || !state.arrived.is_empty() {
            return Ok(Armed::Busy);
        }
        state.armed = true;
        Ok(Armed::Ready)
    }

    pub fn abandon(&mut self, _: EndpointId) -> Result<(), UcxError> {
        Ok(())
    }

    pub fn event_handle(&mut self) -> Result<EventHandle, UcxError> {
        Ok(EventHandle(Arc::clone(&self.end)))
    }

    pub fn close(&mut self, _: Duration) -> Vec<WorkerEvent> {
        Vec::new()
    }
}

/// A worker's descriptor, and the way to signal it.
pub struct EventHandle(Arc<End>);

impl EventHandle {
    pub fn descriptor(&self) -> &Self {
        self
    }

    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        self.0.wait(timeout, |state| state.readable);
        Ok(true)
    }

    pub fn signal(&self) {
        self.0.change(State::become_readable);
    }
}

/// Tells of a descriptor's edges (`epoll` with `EPOLLET`).
pub struct Wakes(Arc<End>);

impl Wakes {
    pub fn of(events: &EventHandle) -> io::Result<Self> {
        events.0.lock().watched = true;
        Ok(Self(Arc::clone(&events.0)))
    }

    pub fn enable(&self, _: &EventHandle, enabled: bool) -> io::Result<()> {
        self.0.change(|state| {
            state.watched = enabled;
            state.edge = enabled && state.readable;
        });
        Ok(())
    }

    pub fn wait(&self, at_most: Duration) -> io::Result<()> {
        // The kernel looks again before it tells: what was taken meanwhile wakes nobody.
        self.0.wait(at_most, |state| {
            std::mem::take(&mut state.edge) && state.readable
        });
        Ok(())
    }
}
