use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shardwright_core::Rank;
use shardwright_wire::{Buffer, SharedPlace};

use super::layout::ALIGNMENT;
use super::{Import, ImportError, Offer, Pool};

const PEER: Rank = Rank(1);

/// A rank's buffer, and the same memory as its peer maps it.
fn pair(bytes: u64) -> (Arc<Pool>, Arc<Import>) {
    let pool = Pool::new(bytes).unwrap();
    let import = Import::open(&pool.offer(), PEER).unwrap();
    (pool, import)
}

fn tensor(pool: &Arc<Pool>, bytes: usize, fill: u8) -> Buffer {
    pool.copy_of(&vec![fill; bytes])
}

#[test]
fn a_lent_tensor_is_read_in_place_and_comes_back_when_dropped() {
    let (pool, import) = pair(1 << 20);
    let sent = tensor(&pool, 5000, 7);
    let place = pool.lend(&sent).unwrap();
    let address = sent.as_lent().unwrap().start();
    drop(sent);
    let received = import.receive(place, 5000).unwrap();
    assert_eq!(received.as_bytes(), vec![7; 5000]);
    assert_ne!(
        received.as_lent().unwrap().start(),
        address,
        "another mapping"
    );
    assert!(pool.used_bytes() >= 5000);
    drop(received);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn what_the_receiver_writes_into_its_tensor_reaches_nobody_else() {
    let (pool, import) = pair(1 << 20);
    let buffers: Vec<Buffer> = (0..8).map(|fill| tensor(&pool, 4096, fill)).collect();
    let places: Vec<SharedPlace> = buffers.iter().map(|one| pool.lend(one).unwrap()).collect();
    drop(buffers);
    let received: Vec<Buffer> = places
        .iter()
        .map(|place| import.receive(*place, 4096).unwrap())
        .collect();
    for (fill, buffer) in (0..).zip(&received) {
        assert_eq!(buffer.as_bytes(), vec![fill; 4096]);
    }
    let again = tensor(&pool, 4096, 99);
    for (fill, buffer) in (0..).zip(&received) {
        assert_eq!(buffer.as_bytes(), vec![fill; 4096]);
    }
    assert_eq!(again.as_bytes(), vec![99; 4096]);
}

#[test]
fn what_somebody_else_still_holds_is_not_lent() {
    let (pool, _import) = pair(1 << 20);
    let buffer = tensor(&pool, 4096, 1);
    let kept = buffer.clone();
    assert_eq!(pool.lend(&buffer), None);
    drop(kept);
    assert!(pool.lend(&buffer).is_some());
    assert_eq!(
        pool.lend(&Buffer::copy_of(&[1; 4096])),
        None,
        "heap memory is not of the pool"
    );
    let (other, _import) = pair(1 << 20);
    assert_eq!(pool.lend(&tensor(&other, 4096, 1)), None, "another pool's");
}

#[test]
fn what_somebody_else_still_holds_is_copied_and_the_copy_lent() {
    let (pool, import) = pair(1 << 20);
    let held = tensor(&pool, 8192, 1);
    let place = pool.lend_copy(held.as_bytes()).unwrap();
    let received = import.receive(place, 8192).unwrap();
    assert_eq!(received.as_bytes(), vec![1; 8192]);
    let own = pool.lend(&held).unwrap();
    assert_ne!(place.offset, own.offset, "what the receiver writes into");
    pool.revoke(own);
    drop(received);
    assert_eq!(pool.used_bytes(), 8192);
    assert_eq!(pool.lend_copy(&vec![1; 1 << 20]), None, "no room");
}

/// A message with a tensor.
#[test]
fn what_does_not_fit_lies_on_the_heap() {
    let (pool, import) = pair(8192);
    let first = tensor(&pool, 8192, 1);
    assert!(first.as_lent().is_some());
    assert!(
        tensor(&pool, 64, 2).as_lent().is_none(),
        "the buffer is full"
    );
    let place = pool.lend(&first).unwrap();
    drop(first);
    let received = import.receive(place, 8192).unwrap();
    assert!(tensor(&pool, 64, 2).as_lent().is_none(), "the peer has it");
    drop(received);
    assert!(tensor(&pool, 64, 2).as_lent().is_some());
}

#[test]
fn a_block_that_was_not_sent_after_all_is_free_again() {
    let (pool, _import) = pair(8192);
    let buffer = tensor(&pool, 8192, 1);
    let place = pool.lend(&buffer).unwrap();
    drop(buffer);
    assert!(tensor(&pool, 64, 2).as_lent().is_none());
    pool.revoke(place);
    assert!(tensor(&pool, 64, 2).as_lent().is_some());
}

#[test]
fn many_lendings_in_any_order_lose_nothing() {
    let (pool, import) = pair(1 << 20);
    let mut held: Vec<(u8, Buffer)> = Vec::new();
    let mut state = 1_u64;
    for round in 0..20_000_u32 {
        // A linear congruential generator: the test is the same each time.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let (size, fill) = (2048 + (state >> 40) as usize % 30_000, round as u8);
        let buffer = tensor(&pool, size, fill);
        if buffer.as_lent().is_some() {
            let place = pool.lend(&buffer).unwrap();
            drop(buffer);
            held.push((fill, import.receive(place, size).unwrap()));
        }
        if held.len() > 20 {
            let (fill, buffer) = held.swap_remove((state >> 33) as usize % held.len());
            assert!(buffer.as_bytes().iter().all(|byte| *byte == fill));
        }
    }
    held.clear();
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn places_that_are_not_lent_are_refused() {
    let (pool, import) = pair(1 << 20);
    let buffer = tensor(&pool, 4096, 1);
    let place = pool.lend(&buffer).unwrap();
    let wrong = [
        (
            SharedPlace {
                slot: place.slot + 1,
                ..place
            },
            4096,
        ),
        (
            SharedPlace {
                slot: u32::MAX,
                ..place
            },
            4096,
        ),
        (SharedPlace { offset: 0, ..place }, 4096),
        (
            SharedPlace {
                offset: place.offset + 1,
                ..place
            },
            16,
        ),
        (
            SharedPlace {
                offset: u64::MAX - ALIGNMENT + 1,
                ..place
            },
            4096,
        ),
        (place, (1 << 20) + 1),
        (place, usize::MAX),
    ];
    for (place, bytes) in wrong {
        assert!(
            matches!(
                import.receive(place, bytes),
                Err(ImportError::NoSuchPlace { .. })
            ),
            "{place:?} {bytes}"
        );
    }
    let received = import.receive(place, 4096).unwrap();
    assert!(import.receive(place, 4096).is_err(), "it is taken already");
    drop(received);
    assert!(import.receive(place, 4096).is_err(), "it was given back");
}

#[test]
fn only_the_offered_memory_is_mapped() {
    let pool = Pool::new(1 << 20).unwrap();
    let offer = pool.offer();
    let open = |offer: &Offer| Import::open(offer, PEER);
    assert!(open(&offer).is_ok());
    let refused = [
        Offer {
            token: [0; 16],
            ..offer.clone()
        },
        Offer {
            bytes: offer.bytes + 1,
            ..offer.clone()
        },
        Offer {
            fd: 0,
            ..offer.clone()
        },
        Offer {
            fd: 100_000,
            ..offer.clone()
        },
        Offer {
            pid: u32::MAX,
            ..offer.clone()
        },
    ];
    for offer in refused {
        assert!(open(&offer).is_err(), "{offer:?}");
    }
    let unknown_peer = memfd_create(super::pool::NAME, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&unknown_peer, offer.bytes).unwrap();
    let unsealed = Offer {
        fd: unknown_peer.as_raw_fd(),
        ..offer
    };
    assert!(matches!(
        open(&unsealed),
        Err(ImportError::Other {
            reason: "it could shrink",
            ..
        })
    ));
}

#[test]
fn a_closed_buffer_goes_though_a_peer_keeps_a_tensor_which_stays_whole() {
    let (pool, import) = pair(1 << 20);
    let sent = tensor(&pool, 5000, 7);
    let place = pool.lend(&sent).unwrap();
    drop(sent);
    let received = import.receive(place, 5000).unwrap();
    let left = Arc::downgrade(&pool);
    pool.close();
    assert!(tensor(&pool, 5000, 8).as_lent().is_none(), "on the heap");
    drop(pool);
    assert_eq!(left.strong_count(), 0);
    assert_eq!(received.as_bytes(), vec![7; 5000]);
}
