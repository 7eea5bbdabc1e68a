//! Suspended workers that receive messages while they wait, over a transport that lets them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shardwright_comm::{
    CommError, CommStats, HeartbeatState, InProcess, Loss, Observation, PeerInfo, Receiver,
    Transport, in_process,
};
use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Heartbeat, Message, Value};

use super::rig::{Ended, WATCHDOG, config, on_every_rank, plan, rank_of, real_time, shut_down};
use super::steps::chain;
use crate::Server;

/// Keeps what comes until somebody reads: a waiting thread, or its own thread while none does.
#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Held from taking a message until it is delivered: nobody overtakes (CM-2).
    delivering: Mutex<()>,
}

#[derive(Default)]
struct State {
    messages: VecDeque<(Rank, Message)>,
    server: Option<Arc<Server>>,
    is_read: bool,
    woken: bool,
    closed: bool,
    read_by_waiting: u64,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Delivers one message; whether there was one.
    fn deliver(&self) -> bool {
        let _order = self.delivering.lock().unwrap();
        let mut state = self.lock();
        let Some((from, message)) = state.messages.pop_front() else {
            return false;
        };
        state.read_by_waiting += u64::from(state.is_read);
        let server = state.server.clone().unwrap();
        drop(state);
        server.deliver(from, message);
        true
    }

    fn read_for_nobody(&self) {
        loop {
            let mut state = self.lock();
            while !state.closed && (state.is_read || state.messages.is_empty()) {
                state = self.changed.wait(state).unwrap();
            }
            if state.closed {
                return;
            }
            drop(state);
            self.deliver();
        }
    }
}

impl Receiver for Inbox {
    fn deliver(&self, from: Rank, message: Message) {
        self.lock().messages.push_back((from, message));
        self.changed.notify_all();
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        let server = self.lock().server.clone();
        server.unwrap().peer_lost(from, loss);
    }

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

struct Pulled {
    inner: Arc<InProcess>,
    inbox: Arc<Inbox>,
}

impl Transport for Pulled {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.inner.send(to, message)
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.inner.peer(rank)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        self.inner.heartbeat_state()
    }

    /// Ignores the slice: who is not woken hangs.
    fn read_until(&self, _: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        let mut state = self.inbox.lock();
        if state.is_read {
            return false;
        }
        state.is_read = true;
        drop(state);
        let watchdog = Instant::now() + WATCHDOG;
        loop {
            while self.inbox.deliver() {}
            if look() == Observation::Done {
                break;
            }
            let mut state = self.inbox.lock();
            while state.messages.is_empty() && !state.woken {
                let left = watchdog.saturating_duration_since(Instant::now());
                assert!(!left.is_zero(), "rank {} was not woken", self.rank());
                state = self.inbox.changed.wait_timeout(state, left).unwrap().0;
            }
            state.woken = false;
        }
        self.inbox.lock().is_read = false;
        self.inbox.changed.notify_all();
        true
    }

    fn wake_reader(&self) {
        self.inbox.lock().woken = true;
        self.inbox.changed.notify_all();
    }

    fn close(&self, report: Option<ErrorReport>) {
        self.inner.close(report);
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

#[test]
fn steps_end_whoever_receives_and_waiting_workers_do() {
    const WORLD: u32 = 3;
    let inboxes: Vec<Arc<Inbox>> = (0..WORLD).map(|_| Arc::default()).collect();
    let receivers = inboxes
        .iter()
        .map(|inbox| Arc::clone(inbox) as Arc<dyn Receiver>)
        .collect();
    let transports = in_process(receivers).unwrap();
    let ranks: Vec<_> = (0..WORLD)
        .zip(transports.into_iter().zip(&inboxes))
        .map(|(rank, (inner, inbox))| {
            let own = Pulled {
                inner: Arc::clone(&inner),
                inbox: Arc::clone(inbox),
            };
            let made = rank_of(
                &real_time(config(rank, &[0, 1, 2], WORLD)),
                Some(inner),
                Some(Arc::new(own)),
            );
            inbox.lock().server = Some(Arc::clone(&made.server));
            made
        })
        .collect();
    let threads: Vec<_> = inboxes
        .iter()
        .map(|inbox| {
            let inbox = Arc::clone(inbox);
            let named = std::thread::Builder::new().name("reader".to_owned());
            named.spawn(move || inbox.read_for_nobody()).unwrap()
        })
        .collect();
    let behaviour = chain(WORLD);
    let ends = on_every_rank(&ranks, move |rank| {
        let ends: Vec<Ended> = (1..=20)
            .map(|step| rank.step(plan(step, "train_step", 6), &behaviour))
            .collect();
        ends
    });
    for ended in ends {
        let expected: Vec<_> = (1..=20).map(|step| Ended::Done(Value::Int(step))).collect();
        assert_eq!(ended, expected);
    }
    for inbox in &inboxes {
        assert!(inbox.lock().read_by_waiting > 100, "workers received");
    }
    shut_down(&ranks);
    for inbox in &inboxes {
        let mut state = inbox.lock();
        state.closed = true;
        state.server = None;
        inbox.changed.notify_all();
    }
    for thread in threads {
        thread.join().unwrap();
    }
}
