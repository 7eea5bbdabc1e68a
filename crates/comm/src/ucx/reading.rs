//! Who reads: a thread that waits, for itself, or else the one that is there for it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use shardwright_core::Rank;

use super::engine::{Engine, VERDICT_DEADLINE, lock};
use super::wakes::Wakes;
use crate::transport::Loss;

/// How often the descriptor is tried to be armed before its thread sleeps all the same.
const TRIES: usize = 50;

/// How long the reading thread sleeps then.
const RESTLESS_SLEEP: Duration = Duration::from_micros(200);

/// The longest sleep of the reading thread: how late a verdict is noticed at most.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);

impl Engine {
    /// Peers whose connection failed a while ago and of whom nothing else was heard.
    fn condemned(&self) -> Vec<(Rank, String)> {
        let delivery = lock(&self.delivery);
        let overdue = delivery.iter().filter(|(_, from)| from.lost.is_none());
        overdue
            .filter_map(|(peer, from)| {
                let (since, reason) = from.suspected.as_ref()?;
                (since.elapsed() > VERDICT_DEADLINE).then(|| (*peer, reason.clone()))
            })
            .collect()
    }

    /// Reads for a thread that waits, until `done` or for `slice`; `false`, at once, where another reads already.
    pub(super) fn read_until(&self, slice: Duration, done: &mut dyn FnMut() -> bool) -> bool {
        let Ok(_reader) = self.reader.try_lock() else {
            return false;
        };
        if self.closing.load(Ordering::SeqCst) {
            return false;
        }
        self.is_read.store(true, Ordering::SeqCst);
        let began = Instant::now();
        loop {
            let moved = self.advance();
            let waited = began.elapsed();
            if done() || waited >= slice {
                break;
            }
            if moved || waited < self.spin {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(slice.saturating_sub(waited));
        }
        self.is_read.store(false, Ordering::SeqCst);
        // UE-2: from here on the reading thread is woken.
        if !self.settle() {
            self.events.signal();
        }
        true
    }

    /// Reads what is there and arms the descriptor; `false` where it cannot be armed for now,
    /// because a peer's ring is full: UCX tells nobody when there is room again.
    fn settle(&self) -> bool {
        for _ in 0..TRIES {
            if !self.advance() && self.arm() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    fn arm(&self) -> bool {
        lock(&self.sending).arm().unwrap_or(true)
    }

    pub(super) fn sleep(&self, at_most: Duration) {
        if !self.arm() {
            std::thread::yield_now();
        } else if let Err(error) = self.events.wait(at_most) {
            tracing::error!(%error, "cannot sleep on UCX's descriptor");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The reading thread's loop, while nobody reads for itself.
    pub(super) fn read_all(&self) {
        let wakes = match Wakes::of(self.events.descriptor()) {
            Ok(wakes) => wakes,
            Err(error) => {
                tracing::error!(%error, "no second descriptor for UCX's events");
                return;
            }
        };
        while !self.closing.load(Ordering::SeqCst) {
            let settled = self.is_read.load(Ordering::SeqCst) || self.settle();
            for (peer, reason) in self.condemned() {
                self.lose(peer, Loss::Broken { reason }, None);
            }
            let sleep = if settled {
                LONGEST_SLEEP
            } else {
                RESTLESS_SLEEP
            };
            if let Err(error) = wakes.wait(sleep) {
                tracing::error!(%error, "cannot sleep on UCX's descriptor");
                std::thread::sleep(LONGEST_SLEEP);
            }
        }
    }
}
