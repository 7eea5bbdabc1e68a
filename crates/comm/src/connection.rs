//! A transport whose descriptors, mappings and memory go when it is closed, whoever still holds it.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Message};

use crate::error::CommError;
use crate::transport::{CommStats, HeartbeatState, Observation, PeerInfo, Transport};
use shardwright_system::Owner;

/// How long [`Transport::close`] waits for threads that are inside a call to leave it.
const CALLERS_DEADLINE: Duration = Duration::from_secs(1);

/// How often it looks.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A transport until it is closed, and what can be said of it afterwards.
///
/// Those who send keep it for their whole lives, which a script may make longer than the job's: its model knows the
/// rank's runtime. So the transport itself is dropped by [`Transport::close`].
pub(crate) struct ClosableTransport {
    rank: Rank,
    peers: Vec<PeerInfo>,
    heartbeat_state: Arc<HeartbeatState>,
    owner: Owner,
    state: RwLock<State>,
}

enum State {
    Open(Arc<dyn Transport>),
    Closed(Box<CommStats>),
}

impl ClosableTransport {
    /// Takes a transport over.
    pub(crate) fn new(transport: Arc<dyn Transport>) -> Arc<Self> {
        let ranks = (0..transport.world()).map(Rank);
        Arc::new(Self {
            rank: transport.rank(),
            peers: ranks
                .filter_map(|rank| transport.peer(rank).cloned())
                .collect(),
            heartbeat_state: Arc::clone(transport.heartbeat_state()),
            owner: Owner::this_process(),
            state: RwLock::new(State::Open(transport)),
        })
    }

    fn transport(&self) -> Option<Arc<dyn Transport>> {
        match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Open(transport) => Some(Arc::clone(transport)),
            State::Closed(_) => None,
        }
    }

    fn open(&self) -> Result<Arc<dyn Transport>, CommError> {
        // In a forked child a thread of the parent may have held the lock.
        self.owner.check()?;
        self.transport().ok_or(CommError::Closed)
    }
}

impl Transport for ClosableTransport {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        u32::try_from(self.peers.len()).expect("ranks are counted in 32 bits")
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.open()?.send(to, message)
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.open()?.send_and_read(to, message)
    }

    fn check(&self, to: Rank) -> Result<(), CommError> {
        self.open()?.check(to)
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.peers.get(rank.0 as usize)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        &self.heartbeat_state
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        self.open()
            .is_ok_and(|transport| transport.read_until(slice, look))
    }

    fn wake_reader(&self) {
        if let Ok(transport) = self.open() {
            transport.wake_reader();
        }
    }

    fn close(&self, report: Option<ErrorReport>) {
        let Ok(transport) = self.open() else {
            return;
        };
        transport.close(report);
        let last = State::Closed(Box::new(transport.stats()));
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *state, last);
        drop(state);
        let left = Arc::downgrade(&transport);
        drop((before, transport));
        // The last of its callers frees it, and nobody is to find its descriptors open after this.
        let deadline = Instant::now() + CALLERS_DEADLINE;
        while left.strong_count() > 0 && Instant::now() < deadline {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        self.transport()
            .map_or(Cow::Borrowed("nothing"), |open| open.reached_by(rank))
    }

    fn devices(&self, rank: Rank) -> Cow<'static, str> {
        self.transport()
            .map_or(Cow::Borrowed("not used"), |open| open.devices(rank))
    }

    fn stats(&self) -> CommStats {
        match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Open(transport) => transport.stats(),
            State::Closed(last) => **last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{TransportKind, numbered};

    #[test]
    fn a_closed_transport_is_dropped_though_somebody_keeps_the_connection() {
        let mut job = TransportKind::Shared.recorded(2);
        let (other, _) = job.pop().unwrap();
        let (transport, recorder) = job.pop().unwrap();
        let left = Arc::downgrade(&transport);
        let connection = ClosableTransport::new(transport);
        other.send(Rank(0), numbered(1)).unwrap();
        recorder.wait_messages(1);
        connection.send(Rank(1), numbered(2)).unwrap();
        assert_eq!(connection.reached_by(Rank(1)), "tcp");
        connection.close(None);
        assert_eq!(left.strong_count(), 0);
        let refused = connection.send(Rank(1), numbered(3)).unwrap_err();
        assert!(matches!(refused, CommError::Closed), "{refused}");
        assert_eq!(connection.stats().messages_received, 1);
        assert_eq!(connection.peer(Rank(1)).unwrap().rank, Rank(1));
        connection.close(None);
    }
}
