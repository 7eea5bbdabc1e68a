//! Who reads: a thread that waits, for itself, or else the one that is there for it.

use std::time::{Duration, Instant};

use shardwright_core::Rank;

use super::engine::{Engine, VERDICT_DEADLINE, lock};
use crate::transport::{Loss, Observation};
use shardwright_system::sync::atomic::Ordering;
use shardwright_system::sync::thread;

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
        let condemned = overdue
            .filter_map(|(peer, from)| {
                let (since, reason) = from.suspected.as_ref()?;
                (since.elapsed() > VERDICT_DEADLINE).then(|| (*peer, reason.clone()))
            })
            .collect();
        drop(delivery);
        // What came meanwhile was left to the holder of the lock.
        self.deliver();
        condemned
    }

    /// Reads for a thread that waits, until it sees that to be over, or for `slice`; `false`, at once, where another reads
    /// already. Where another thread of the rank computes, it sleeps at once.
    pub(super) fn read_until(
        &self,
        slice: Duration,
        look: &mut dyn FnMut() -> Observation,
    ) -> bool {
        let Ok(_reader) = self.reader.try_lock() else {
            return false;
        };
        if self.closing.load(Ordering::SeqCst) {
            return false;
        }
        self.set_read(true);
        let began = Instant::now();
        loop {
            let moved = self.advance();
            let waited = began.elapsed();
            let seen = look();
            if seen == Observation::Done || waited >= slice {
                break;
            }
            if moved {
                continue;
            }
            if waited < self.spin && seen == Observation::Idle {
                // The kernel likes to wake a receiver where its sender runs, who waits for the answer here.
                thread::yield_now();
            } else {
                self.sleep(slice.saturating_sub(waited));
            }
        }
        // What woke this thread would wake the reading thread as well, if it were not armed anew before.
        let settled = self.settle();
        // UE-2: from here on the reading thread is woken, by what has come since then too.
        self.set_read(false);
        // UE-4: settling may have taken what was to wake the reading thread at the end.
        if !settled || self.closing.load(Ordering::SeqCst) {
            self.events.signal();
        }
        true
    }

    /// Says whether a waiting thread reads; the reading thread then sleeps through all events.
    fn set_read(&self, is_read: bool) {
        self.is_read.store(is_read, Ordering::SeqCst);
        if let Err(error) = self.wakes.enable(self.events.descriptor(), !is_read) {
            tracing::error!(%error, "cannot say who is woken by UCX's descriptor");
        }
    }

    /// What a reader waits for may have come by another way.
    pub(super) fn wake_reader(&self) {
        if self.is_read.load(Ordering::SeqCst) {
            self.events.signal();
        }
    }

    /// Reads what is there and arms the descriptor; `false` where it cannot be armed for now,
    /// because a peer's ring is full: UCX tells nobody when there is room again.
    fn settle(&self) -> bool {
        for tried in 0..TRIES {
            if !self.advance() && self.arm() {
                return true;
            }
            // The first time it only takes note of what has woken this thread.
            if tried > 0 {
                thread::yield_now();
            }
        }
        false
    }

    fn arm(&self) -> bool {
        lock(&self.sending).arm().unwrap_or(true)
    }

    pub(super) fn sleep(&self, at_most: Duration) {
        if !self.arm() {
            thread::yield_now();
        } else if let Err(error) = self.events.wait(at_most) {
            tracing::error!(%error, "cannot sleep on UCX's descriptor");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The reading thread's loop, while nobody reads for itself.
    pub(super) fn read_all(&self) {
        loop {
            let settled = if self.is_read.load(Ordering::SeqCst) {
                true
            } else {
                let settled = self.settle();
                // UE-4: what settling took may have been to wake a thread that has begun to read meanwhile.
                self.wake_reader();
                settled
            };
            // Looked at last before sleeping: settling takes what the end has signalled before (UE-4).
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            for (peer, reason) in self.condemned() {
                self.lose(peer, Loss::Broken { reason }, None);
            }
            let sleep = if settled {
                LONGEST_SLEEP
            } else {
                RESTLESS_SLEEP
            };
            if let Err(error) = self.wakes.wait(sleep) {
                tracing::error!(%error, "cannot sleep on UCX's descriptor");
                thread::sleep(LONGEST_SLEEP);
            }
        }
    }
}
