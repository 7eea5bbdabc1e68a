//! Ranks under shuttle: a transport whose threads it schedules, which lets waiting threads receive or does not.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use shardwright_comm::sync::{Condvar, Mutex, MutexGuard, thread};
use shardwright_comm::{
    CommError, CommStats, HeartbeatState, Observation, PeerInfo, Receiver, Transport,
};
use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Message};

use super::rig::{TestRank, config, rank_of, real_time};
use crate::Server;

/// What has been sent to a rank, and who reads it.
#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Held from taking a message until it is delivered: nobody overtakes (CM-2).
    delivering: Mutex<()>,
    server: OnceLock<Arc<Server>>,
}

#[derive(Default)]
struct State {
    messages: VecDeque<(Rank, Message)>,
    /// All that ever came.
    seen: Vec<(Rank, Message)>,
    is_read: bool,
    woken: bool,
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Delivers one message; whether there was one.
    fn deliver(&self) -> bool {
        let _order = self.delivering.lock().unwrap();
        let Some((from, message)) = self.lock().messages.pop_front() else {
            return false;
        };
        let server = self.server.get().expect("set before anything is sent");
        server.deliver(from, message);
        true
    }

    /// The transport's own thread, which reads while nobody does for itself.
    fn read_for_nobody(&self) {
        loop {
            let mut state = self.lock();
            while !state.closed && (state.is_read || state.messages.is_empty()) {
                state = self.wait(state);
            }
            if state.closed {
                return;
            }
            drop(state);
            self.deliver();
        }
    }

    /// All that came from a rank, in its order.
    pub(super) fn from(&self, rank: Rank) -> Vec<Message> {
        let state = self.lock();
        let of_rank = state.seen.iter().filter(|(from, _)| *from == rank);
        of_rank.map(|(_, message)| message.clone()).collect()
    }
}

/// One rank's end of the network.
pub(super) struct End {
    own: Rank,
    inboxes: Arc<Vec<Inbox>>,
    heartbeat_state: Arc<HeartbeatState>,
    /// Whether waiting threads may receive.
    pulls: bool,
}

impl End {
    fn inbox(&self) -> &Inbox {
        &self.inboxes[self.own.0 as usize]
    }
}

impl Transport for End {
    fn rank(&self) -> Rank {
        self.own
    }

    fn world(&self) -> u32 {
        self.inboxes.len() as u32
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.inboxes[to.0 as usize].change(|state| {
            state.seen.push((self.own, message.clone()));
            state.messages.push_back((self.own, message));
        });
        Ok(())
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send(to, message)?;
        if self.pulls {
            self.inbox().deliver();
        }
        Ok(())
    }

    fn peer(&self, _: Rank) -> Option<&PeerInfo> {
        None
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        &self.heartbeat_state
    }

    fn read_until(&self, _: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        let mut state = self.inbox().lock();
        if !self.pulls || state.is_read {
            return false;
        }
        state.is_read = true;
        drop(state);
        loop {
            while self.inbox().deliver() {}
            if look() == Observation::Done {
                break;
            }
            let mut state = self.inbox().lock();
            while state.messages.is_empty() && !state.woken {
                state = self.inbox().wait(state);
            }
            state.woken = false;
        }
        self.inbox().change(|state| state.is_read = false);
        true
    }

    fn wake_reader(&self) {
        self.inbox().change(|state| state.woken = true);
    }

    fn close(&self, _: Option<ErrorReport>) {}

    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

/// A job of ranks in one pipeline, whose transports have threads of their own.
pub(super) struct Job {
    pub(super) ranks: Vec<Arc<TestRank>>,
    pub(super) inboxes: Arc<Vec<Inbox>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Job {
    pub(super) fn new(world: u32, pulls: bool) -> Self {
        let inboxes: Arc<Vec<Inbox>> = Arc::new((0..world).map(|_| Inbox::default()).collect());
        let pipeline: Vec<u32> = (0..world).collect();
        let rank = |rank: u32| {
            let config = real_time(config(rank, &pipeline, world));
            let end = End {
                own: Rank(rank),
                inboxes: Arc::clone(&inboxes),
                heartbeat_state: Arc::default(),
                pulls,
            };
            let made = rank_of(&config, None, Some(Arc::new(end)));
            inboxes[rank as usize]
                .server
                .get_or_init(|| Arc::clone(&made.server));
            made
        };
        let ranks = (0..world).map(rank).collect();
        let read = |rank: usize| {
            let inboxes = Arc::clone(&inboxes);
            thread::spawn(move || inboxes[rank].read_for_nobody())
        };
        let threads = (0..world as usize).map(read).collect();
        Self {
            ranks,
            inboxes,
            threads,
        }
    }

    pub(super) fn end(self) {
        for rank in &self.ranks {
            rank.shut_down();
        }
        for inbox in self.inboxes.iter() {
            inbox.change(|state| state.closed = true);
        }
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}
