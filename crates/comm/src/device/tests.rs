use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_cuda::DeviceTensor;
use shardwright_wire::{Buffer, Message, TensorPart};

use super::testing::{FromDevice, ORDINAL, STREAM, configure, join};
use crate::conformance::{Recorder, WATCHDOG, heavy};
use crate::error::CommError;
use crate::routing::{Reason, Route};
use crate::tcp::testing::all_options;
use crate::transport::{Loss, Transport};

pub(super) const BYTES: usize = 100_000;

pub(super) struct Rank2 {
    pub(super) node: Arc<FromDevice>,
    pub(super) delivered: Arc<Recorder>,
}

/// Two ranks of one host whose device buffers have so many bytes; 0 for none.
pub(super) fn pair(device_bytes: u64) -> [Rank2; 2] {
    let recorders: [Arc<Recorder>; 2] = Default::default();
    let mut options = all_options(2);
    for options in &mut options {
        "localhost".clone_into(&mut options.host_name);
        options.buffer_bytes = 32 << 20;
        configure(options, device_bytes);
    }
    let joined: Vec<_> = options
        .into_iter()
        .zip(&recorders)
        .map(|(options, recorder)| join(options, recorder.receiver()))
        .collect();
    let mut nodes = joined.into_iter().map(|thread| thread.join().unwrap());
    recorders.map(|delivered| Rank2 {
        node: nodes.next().unwrap(),
        delivered,
    })
}

/// Both ranks use the device, and have opened the other's buffer where there are buffers.
pub(super) fn introduce(ranks: &[Rank2; 2], opens: bool) -> usize {
    for round in 1..1000 {
        for (rank, other) in [(0, 1), (1, 0)] {
            let message = heavy(BYTES, round as u8);
            ranks[rank].node.send(Rank(other), message).unwrap();
        }
        for rank in ranks {
            rank.delivered.wait_messages(round);
        }
        let copied = |rank: &Rank2| rank.node.stats().by_route[index(Route::PeerCopy)].tensors_sent;
        if !opens || ranks.iter().all(|rank| copied(rank) > 0) {
            return round;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the device buffers are never opened");
}

pub(super) fn index(route: Route) -> usize {
    Route::ALL.iter().position(|one| *one == route).unwrap()
}

pub(super) fn sent_by(rank: &Rank2, route: Route) -> u64 {
    rank.node.stats().by_route[index(route)].tensors_sent
}

pub(super) fn because(rank: &Rank2, reason: Reason) -> u64 {
    let index = Reason::ALL.iter().position(|one| *one == reason).unwrap();
    rank.node.stats().by_reason[index]
}

pub(super) fn tensor_of(message: &Message) -> &TensorPart {
    &message.body().unwrap().tensors[0]
}

/// A received tensor in memory of the receiver's own, as torch would take it.
pub(super) fn taken(rank: &Rank2, data: &Buffer) -> Vec<u8> {
    let target: &'static [u8] = Vec::leak(vec![0_u8; data.len()]);
    let address = target.as_ptr().expose_provenance() as u64;
    assert!(
        rank.node
            .memory
            .receive_into(data, ORDINAL, address, STREAM)
            .unwrap()
    );
    // Behind the copy, on the same stream, so that it is there when this has come.
    let behind = rank.node.on_device(&[1]).unwrap();
    assert_eq!(behind.as_bytes(), [1]);
    std::hint::black_box(target).to_vec()
}

pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < WATCHDOG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn tensors_go_from_device_to_device_once_both_ends_have_opened_them() {
    let ranks = pair(4 << 20);
    let before = introduce(&ranks, true);
    ranks[0].node.send(Rank(1), heavy(BYTES, 77)).unwrap();
    let messages = ranks[1].delivered.wait_messages(before + 1);
    let received = &tensor_of(&messages[before].1).data;
    assert_eq!(taken(&ranks[1], received), vec![77; BYTES]);
    assert_eq!(
        sent_by(&ranks[0], Route::SharedMemory),
        because(&ranks[0], Reason::NoPeerAccess)
    );
    let copied = ranks[1].node.stats().by_route[index(Route::PeerCopy)];
    assert_eq!(copied.tensors_received, sent_by(&ranks[0], Route::PeerCopy));
}

#[test]
fn a_tensor_that_stays_here_too_goes_from_device_to_device_as_often_as_it_is_asked_for() {
    let ranks = pair(4 << 20);
    let before = introduce(&ranks, true);
    let held = ranks[0].node.on_device(&vec![6; BYTES]).unwrap();
    let copies = sent_by(&ranks[0], Route::PeerCopy);
    for _ in 0..3 {
        let mut message = heavy(BYTES, 0);
        let Message::Object(object) = &mut message else {
            panic!("an object");
        };
        object.body.tensors[0].data = held.clone();
        ranks[0].node.send_as_it_is(Rank(1), message).unwrap();
    }
    let messages = ranks[1].delivered.wait_messages(before + 3);
    for (_, message) in &messages[before..] {
        assert_eq!(taken(&ranks[1], &tensor_of(message).data), vec![6; BYTES]);
    }
    assert_eq!(sent_by(&ranks[0], Route::PeerCopy), copies + 3);
    assert_eq!(because(&ranks[0], Reason::SourceDeviceFull), 0);
}

#[test]
fn a_full_device_buffer_gives_host_memory_and_says_so() {
    let ranks = pair(BYTES as u64 / 2);
    let mut sent = introduce(&ranks, false);
    eventually("the ranks open each other's buffers", || {
        ranks[0].node.send(Rank(1), heavy(BYTES, 5)).unwrap();
        sent += 1;
        let messages = ranks[1].delivered.wait_messages(sent);
        let received = &tensor_of(&messages[sent - 1].1).data;
        assert_eq!(received.as_bytes(), vec![5; BYTES]);
        because(&ranks[0], Reason::SourceDeviceFull) > 0
    });
    assert_eq!(sent_by(&ranks[0], Route::PeerCopy), 0);
    assert_eq!(sent_by(&ranks[0], Route::SharedMemory), sent as u64);
}

#[test]
fn without_device_to_device_transfers_tensors_are_staged() {
    let ranks = pair(0);
    introduce(&ranks, false);
    ranks[0].node.send(Rank(1), heavy(BYTES, 5)).unwrap();
    let messages = ranks[1].delivered.wait_messages(2);
    let received = &tensor_of(&messages[1].1).data;
    assert_eq!(taken(&ranks[1], received), vec![5; BYTES]);
    assert_eq!(because(&ranks[0], Reason::DeviceToDeviceDisabled), 2);
}

#[test]
fn a_tensor_leaves_with_the_bytes_that_it_has_in_the_order_of_its_stream() {
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    let node = &ranks[0].node;
    let first = node.on_device(&vec![1; BYTES]).unwrap();
    // On the same stream, behind the copy above.
    let second = node.on_device(&vec![2; BYTES]).unwrap();
    assert_eq!(second.as_bytes(), vec![2; BYTES]);
    assert_eq!(first.as_bytes(), vec![1; BYTES]);
}

#[test]
fn messages_without_tensors_stay_behind_those_that_wait_for_the_device() {
    let ranks = pair(4 << 20);
    let before = introduce(&ranks, true);
    for number in 0..50 {
        ranks[0].node.send(Rank(1), heavy(BYTES, number)).unwrap();
        let light = crate::conformance::numbered(u64::from(number));
        ranks[0].node.send(Rank(1), light).unwrap();
    }
    let messages = ranks[1].delivered.wait_messages(before + 100);
    for (number, pair) in messages[before..].chunks_exact(2).enumerate() {
        assert_eq!(tensor_of(&pair[0].1).data.as_bytes()[0], number as u8);
        assert_eq!(crate::conformance::number_of(&pair[1].1), number as u64);
    }
}

#[test]
fn blocks_come_back_when_tensors_are_dropped_and_when_receivers_have_copied_them() {
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    for _ in 0..20 {
        drop(ranks[0].node.on_device(&vec![3; 1 << 20]));
    }
    let most = || {
        let data = ranks[0].node.on_device(&vec![4; 4_000_000])?;
        DeviceTensor::of(&data).filter(|tensor| tensor.device_room() > 0)
    };
    ranks[0].delivered.clear();
    ranks[1].delivered.clear();
    eventually("all but nothing of the buffer is free again", || {
        most().is_some()
    });
    let copies = sent_by(&ranks[0], Route::PeerCopy);
    let mut messages = Vec::new();
    eventually("there is room again", || {
        ranks[0].node.send(Rank(1), heavy(1 << 20, 9)).unwrap();
        messages = ranks[1].delivered.wait_messages(1);
        ranks[1].delivered.clear();
        sent_by(&ranks[0], Route::PeerCopy) > copies
    });
    assert!(most().is_none(), "the receiver holds a part");
    let received = &tensor_of(&messages[0].1).data;
    assert_eq!(taken(&ranks[1], received), vec![9; 1 << 20]);
    drop(messages);
    eventually("what was received is given back", || most().is_some());
}

#[test]
fn a_closed_connection_takes_nothing_more_and_waits_for_no_device() {
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    ranks[0].node.send(Rank(1), heavy(BYTES, 5)).unwrap();
    ranks[0].node.close(None);
    let refused = ranks[0].node.send(Rank(1), heavy(BYTES, 6)).unwrap_err();
    assert!(matches!(refused, CommError::Closed), "{refused}");
    assert_eq!(ranks[1].delivered.wait_loss(Rank(0)), Loss::Left(None));
}
