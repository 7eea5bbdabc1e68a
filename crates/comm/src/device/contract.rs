//! What CUDA's contract asks of a program, and the stand-in for its driver ends a process for.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_cuda::Capturing;

use super::testing::{ORDINAL, STREAM, rehearsal};
use super::tests::{BYTES, Rank2, introduce, pair, sent_by, taken, tensor_of};
use crate::conformance::heavy;
use crate::routing::Route;
use crate::transport::Transport;

/// A tensor of the first rank that the second has received and not copied; how many messages there were.
fn received_by_the_second(ranks: &[Rank2; 2], fill: u8) -> usize {
    let before = introduce(ranks, true);
    let copies = sent_by(&ranks[0], Route::PeerCopy);
    ranks[0].node.send(Rank(1), heavy(BYTES, fill)).unwrap();
    ranks[1].delivered.wait_messages(before + 1);
    assert_eq!(sent_by(&ranks[0], Route::PeerCopy), copies + 1);
    before + 1
}

/// Tests share the stand-in, and with it the stream that some of them stop.
static STOPPED: Mutex<()> = Mutex::new(());

#[test]
fn transfers_spoil_no_graph_that_a_script_captures_meanwhile() {
    let script = rehearsal();
    let captured = script.stream();
    let ranks = pair(4 << 20);
    script.begin_capture(&captured);
    // Everything that the driver is ever asked for: memory, handles, locked memory, copies and queries.
    let number = received_by_the_second(&ranks, 5);
    let staged = ranks[0].node.on_device(&vec![6; BYTES]).unwrap();
    assert_eq!(staged.as_bytes(), vec![6; BYTES]);
    let messages = ranks[1].delivered.wait_messages(number);
    let received = &tensor_of(&messages[number - 1].1).data;
    assert_eq!(taken(&ranks[1], received), vec![5; BYTES]);
    script.end_capture(&captured).unwrap();
}

#[test]
fn a_tensor_of_a_stream_that_is_captured_is_refused_and_the_graph_stays_whole() {
    let script = rehearsal();
    let captured = script.stream();
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    let memory = &ranks[0].node.memory;
    let source: &'static [u8] = Vec::leak(vec![7; BYTES]);
    let address = source.as_ptr().expose_provenance() as u64;
    let send = || memory.send_from(ORDINAL, address, BYTES, captured.handle());
    script.begin_capture(&captured);
    assert!(matches!(send(), Err(Capturing)));
    let received = ranks[1].node.on_device(&vec![1; BYTES]).unwrap();
    let taken = memory.receive_into(&received, ORDINAL, address, captured.handle());
    assert_eq!(taken, Err(Capturing));
    script.end_capture(&captured).unwrap();
    assert_eq!(send().unwrap().unwrap().as_bytes(), vec![7; BYTES]);
}

#[test]
fn device_memory_stays_as_long_as_a_peer_that_goes_on_has_a_tensor_in_it() {
    let ranks = pair(4 << 20);
    let number = received_by_the_second(&ranks, 8);
    // The stand-in ends the process when memory is freed that somebody has open.
    ranks[0].node.close(None);
    let messages = ranks[1].delivered.wait_messages(number);
    let received = &tensor_of(&messages[number - 1].1).data;
    assert_eq!(taken(&ranks[1], received), vec![8; BYTES]);
}

#[test]
fn both_ranks_may_leave_at_once() {
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    std::thread::scope(|scope| {
        for rank in &ranks {
            scope.spawn(|| rank.node.close(None));
        }
    });
}

#[test]
fn a_slow_queue_is_waited_for_and_not_taken_for_a_device_that_has_failed() {
    let _alone = STOPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let script = rehearsal();
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    script.stop(STREAM, true);
    let data = ranks[0].node.on_device(&vec![9; BYTES]).unwrap();
    let prepared = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| data.prepare());
        // Several times as long as it takes until the wait is told of.
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished());
        script.stop(STREAM, false);
        waiting.join().unwrap()
    });
    prepared.unwrap();
    assert_eq!(data.as_bytes(), vec![9; BYTES]);
}

#[test]
fn nobody_waits_for_a_device_for_long_once_the_connection_is_closed() {
    let _alone = STOPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let script = rehearsal();
    let ranks = pair(4 << 20);
    introduce(&ranks, true);
    script.stop(STREAM, true);
    let data = ranks[0].node.on_device(&vec![9; BYTES]).unwrap();
    let refused = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| data.prepare());
        ranks[0].node.close(None);
        let refused = waiting.join().unwrap();
        script.stop(STREAM, false);
        refused
    });
    assert_eq!(refused.unwrap_err(), "the device is not in use any more");
}
