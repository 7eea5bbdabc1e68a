//! The end of an engine, in three steps: what was sent leaves, deliveries end, memory is freed.

use std::time::{Duration, Instant};

use super::engine::{Engine, lock};
use shardwright_system::sync::atomic::Ordering;

impl Engine {
    /// Waits until what was sent has left.
    pub(super) fn flush(&self, deadline: Duration) -> bool {
        let began = Instant::now();
        loop {
            let moved = self.advance();
            if lock(&self.sending).parts_under_way() == 0 {
                return true;
            }
            if began.elapsed() > deadline {
                return false;
            }
            if !moved {
                self.sleep(Duration::from_millis(5));
            }
        }
    }

    /// Nothing is delivered any more (CM-4); the reading thread ends.
    pub(super) fn stop(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.events.signal();
        drop(lock(&self.delivery));
    }

    /// Frees everything; the reading thread has ended.
    pub(super) fn close(&self, deadline: Duration) {
        lock(&self.sending).close(deadline);
        lock(&self.inbox).clear();
        lock(&self.delivery).clear();
    }
}
