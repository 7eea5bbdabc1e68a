//! Persistent buffers: nobody's bytes are another's, and everything comes back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use shardwright_core::Rank;
use shardwright_wire::{Buffer, SharedPlace};

use super::{Import, Pool};
use shardwright_system::sync::{Condvar, Mutex, explore, on_threads, thread, with};

const PEER: Rank = Rank(1);
const BYTES: usize = 100;

/// A rank's buffer for three blocks, its peer's view of it, and the messages between them.
struct Pair {
    pool: Arc<Pool>,
    import: Arc<Import>,
    sent: Mutex<Vec<(SharedPlace, u8)>>,
    arrived: Condvar,
}

impl Pair {
    fn new() -> Arc<Self> {
        let pool = Pool::new(3 * 128).unwrap();
        let import = Import::open(&pool.offer(), PEER).unwrap();
        Arc::new(Self {
            pool,
            import,
            sent: Mutex::default(),
            arrived: Condvar::default(),
        })
    }

    /// A block of this process, filled with a number that no other holder writes.
    fn filled(&self, fill: u8) -> Buffer {
        let buffer = self.pool.copy_of(&[fill; BYTES]);
        thread::yield_now();
        assert_eq!(
            buffer.as_bytes(),
            [fill; BYTES],
            "BU-1: two have this block"
        );
        buffer
    }

    fn lend(&self, fill: u8) {
        let buffer = self.filled(fill);
        if let Some(place) = self.pool.lend(&buffer) {
            drop(buffer);
            let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
            sent.push((place, fill));
            drop(sent);
            self.arrived.notify_one();
        }
    }

    fn receive(&self) {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, fill) = loop {
            if let Some(message) = sent.pop() {
                break message;
            }
            sent = self
                .arrived
                .wait(sent)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(sent);
        let tensor = self.import.receive(place, BYTES).unwrap();
        thread::yield_now();
        assert_eq!(
            tensor.as_bytes(),
            [fill; BYTES],
            "BU-1: two have this block"
        );
        thread::yield_now();
        assert_eq!(
            tensor.as_bytes(),
            [fill; BYTES],
            "BU-1: two have this block"
        );
    }
}

#[test]
fn no_two_holders_have_a_block_and_all_blocks_come_back() {
    explore(12_000, || {
        let pair = Pair::new();
        // Three blocks are enough for what these threads hold at once, so that every lending succeeds.
        on_threads([
            with(&pair, |pair| {
                for fill in [1, 2] {
                    pair.lend(fill);
                }
            }),
            with(&pair, |pair| {
                for _ in 0..2 {
                    pair.receive();
                }
            }),
            with(&pair, |pair| {
                for fill in [11, 12, 13] {
                    drop(pair.filled(fill));
                }
            }),
        ]);
        assert_eq!(pair.pool.used_bytes(), 0, "all blocks are back");
    });
}

#[test]
fn a_block_that_another_thread_of_its_rank_still_reads_is_not_lent() {
    explore(12_000, || {
        let pair = Pair::new();
        let buffer = pair.filled(1);
        let shared = buffer.clone();
        let is_read = Arc::new(AtomicBool::new(true));
        let reads = Arc::clone(&is_read);
        on_threads([
            with(&pair, move |pair| {
                if let Some(place) = pair.pool.lend(&buffer) {
                    // A receiver may write from now on.
                    assert!(!reads.load(Ordering::SeqCst), "BU-1: two have this block");
                    drop(buffer);
                    drop(pair.import.receive(place, BYTES).unwrap());
                }
            }),
            with(&pair, move |_| {
                thread::yield_now();
                assert_eq!(shared.as_bytes(), [1; BYTES]);
                is_read.store(false, Ordering::SeqCst);
                drop(shared);
            }),
        ]);
        assert_eq!(pair.pool.used_bytes(), 0);
    });
}

#[test]
fn a_place_is_taken_once() {
    explore(8_000, || {
        let pair = Pair::new();
        let buffer = pair.filled(1);
        let place = pair.pool.lend(&buffer).unwrap();
        drop(buffer);
        let takes = || {
            with(&pair, move |pair| {
                if let Ok(tensor) = pair.import.receive(place, BYTES) {
                    let mut sent = pair.sent.lock().unwrap();
                    sent.push((place, 0));
                    drop(sent);
                    std::mem::forget(tensor);
                }
            })
        };
        on_threads([takes(), takes()]);
        assert_eq!(pair.sent.lock().unwrap().len(), 1);
    });
}
