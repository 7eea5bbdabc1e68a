use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_buffers::{Import, ImportError, Pool};
use shardwright_core::Rank;
use shardwright_wire::SharedMemory;

use super::buffer::Offered;
use super::{DeviceMemory, Job, PeerDevice};

const ORDINAL: i32 = 0;

/// Device memory of the stand-in for the driver, which cargo builds beside the tests.
fn memory(pool: &Arc<Pool>, bytes: u64) -> Arc<DeviceMemory> {
    let tests = std::env::current_exe().unwrap();
    let library = tests.with_file_name("libshardwright_cuda_rehearsal.so");
    DeviceMemory::load(library.as_os_str(), Arc::clone(pool), bytes).unwrap()
}

#[test]
fn a_place_past_the_end_of_what_device_memory_really_holds_is_refused_whatever_its_owner_says() {
    const HELD: u64 = 1 << 20;
    const BYTES: usize = 4096;
    let (pool, own) = (Pool::new(1 << 20).unwrap(), Pool::new(1 << 20).unwrap());
    let owner = memory(&pool, HELD);
    owner.activate_now(ORDINAL);
    let import = Import::open(&pool.offer(), Rank(1)).unwrap();
    let peer = PeerDevice::of(Arc::clone(&import));
    let mut offer = Offered::from(import.device_offer().unwrap());
    assert_eq!(offer.bytes, HELD);
    offer.bytes = 1 << 40;
    pool.offer_device(offer.into());

    let reader = memory(&own, HELD);
    reader.activate_now(ORDINAL);
    assert!(reader.try_to_open(Rank(0), &peer));
    assert_eq!(peer.refusal(), None);
    let received = |offset, bytes| {
        let lent = pool.lend_block(SharedMemory::Device, offset, Arc::new(()));
        reader.receive(&peer, lent.unwrap(), bytes)
    };
    for offset in [0, HELD - BYTES as u64] {
        assert_eq!(received(offset, BYTES).unwrap().len(), BYTES);
    }
    for (offset, bytes) in [
        (HELD - BYTES as u64, BYTES + 1),
        (HELD, BYTES),
        (1 << 39, BYTES),
        (u64::MAX, BYTES),
    ] {
        let refused = received(offset, bytes).unwrap_err();
        assert!(
            matches!(refused, ImportError::NoSuchPlace { .. }),
            "{refused}"
        );
    }
}

#[test]
fn the_thread_that_is_told_to_look_for_peers_finds_the_device_in_use() {
    const ROUNDS: usize = 200;
    const WAIT: Duration = Duration::from_mins(5);
    let pool = Pool::new(1 << 20).unwrap();
    for round in 0..ROUNDS {
        let memory = memory(&pool, 0);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let deadline = Instant::now() + WAIT;
                // Awake at once, as a thread that has just begun is.
                while Instant::now() < deadline {
                    if let Some(job) = memory.inbox().take(Duration::ZERO).pop_front() {
                        assert!(matches!(job, Job::Look));
                        return memory.is_active();
                    }
                }
                panic!("it was not told to look");
            });
            memory.activate_now(ORDINAL);
            assert!(thread.join().unwrap(), "round {round}");
        });
    }
}
