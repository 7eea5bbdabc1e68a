//! Threads that send at the same time.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use shardwright_comm::{
    CommError, CommStats, HeartbeatState, Loss, PeerInfo, Receiver, Transport, in_process,
};
use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Heartbeat, Message};

use super::rig::{WATCHDOG, config, plan, real_time};
use crate::{LocalError, Server};

/// A transport whose first message takes as long as the test likes; it keeps what is sent, in order.
struct Slow {
    inner: Arc<dyn Transport>,
    sent: Mutex<Sent>,
    changed: Condvar,
}

#[derive(Default)]
struct Sent {
    has_begun: bool,
    may_end: bool,
    kinds: Vec<&'static str>,
}

impl Slow {
    /// Waits until `holds` holds of what was sent.
    fn wait_until(&self, holds: impl Fn(&Sent) -> bool) {
        let deadline = Instant::now() + WATCHDOG;
        let mut sent = self.sent.lock().unwrap();
        while !holds(&sent) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "sent so far: {:?}", sent.kinds);
            sent = self.changed.wait_timeout(sent, left).unwrap().0;
        }
    }

    fn change(&self, change: impl FnOnce(&mut Sent)) {
        change(&mut self.sent.lock().unwrap());
        self.changed.notify_all();
    }
}

/// Who hears nothing.
struct Nobody;

impl Receiver for Nobody {
    fn deliver(&self, _: Rank, _: Message) {}

    fn peer_lost(&self, _: Rank, _: Loss) {}

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

impl Transport for Slow {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn send(&self, _: Rank, message: Message) -> Result<(), CommError> {
        if matches!(message, Message::StepBegin(_)) {
            self.change(|sent| sent.has_begun = true);
            self.wait_until(|sent| sent.may_end);
        }
        self.change(|sent| {
            sent.kinds.push(match message {
                Message::StepBegin(_) => "begin",
                Message::Abort(_) => "abort",
                _ => "other",
            });
        });
        Ok(())
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.inner.peer(rank)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        self.inner.heartbeat_state()
    }

    fn close(&self, report: Option<ErrorReport>) {
        self.inner.close(report);
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

#[test]
fn a_thread_does_not_overtake_one_that_sends_and_does_not_wait_for_it() {
    let receivers: Vec<Arc<dyn Receiver>> = vec![Arc::new(Nobody), Arc::new(Nobody)];
    let transport = Arc::new(Slow {
        inner: in_process(receivers).unwrap().swap_remove(0),
        sent: Mutex::default(),
        changed: Condvar::new(),
    });
    let server = Server::attach(Some(transport.clone()), real_time(config(0, &[0, 1], 2)));
    std::thread::scope(|threads| {
        let beginning = threads.spawn(|| server.begin_step(plan(1, "train", 1)));
        transport.wait_until(|sent| sent.has_begun);
        let error = LocalError {
            origin: None,
            module: None,
            microbatch: None,
            phase: None,
            kind: "ValueError".to_owned(),
            message: "no".to_owned(),
            traceback: String::new(),
        };
        server.fail(None, error);
        assert!(transport.sent.lock().unwrap().kinds.is_empty());

        let closing = threads.spawn(|| server.close(WATCHDOG));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!closing.is_finished(), "messages are still to be sent");
        transport.change(|sent| sent.may_end = true);
        closing.join().unwrap();
        assert_eq!(transport.sent.lock().unwrap().kinds, ["begin", "abort"]);
        beginning.join().unwrap().unwrap();
    });
}
