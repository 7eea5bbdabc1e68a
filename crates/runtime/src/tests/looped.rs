//! What a machine counts for `looped`: its turns, by direction and microbatch.

use shardwright_core::{MicrobatchId, Rank, RequestId, WorkerId};
use shardwright_schedule::Schedule;
use shardwright_wire::{Phase, Value};

use super::alone::at;
use super::order::{ask, peer_under, serve, serve_and};
use super::rig::{backward, close, forward, new_request};
use super::waits::{answer_of, root_of_two};
use crate::{Grant, Machine, Waiting};

const LOOPED: &str = "looped(active=4)";

fn looped() -> Schedule {
    LOOPED.parse().expect("a schedule")
}

fn root() -> Machine {
    root_of_two(LOOPED)
}

#[test]
fn a_peer_serves_forward_and_backward_by_turns_whatever_it_closes_meanwhile() {
    let mut peer = peer_under(looped());
    for id in [1, 2, 3] {
        ask(&mut peer, id, forward(1), 0);
        assert_eq!(serve(&mut peer), Some(id));
    }
    ask(&mut peer, 4, forward(1), 0);
    let last = serve_and(&mut peer, |peer| {
        ask(peer, 5, forward(1), 1);
        ask(peer, 6, forward(1), 1);
        ask(peer, 7, backward(1, RequestId(1)), 0);
        ask(peer, 8, backward(1, RequestId(2)), 0);
        ask(peer, 9, close(1, RequestId(3)), 0);
    });
    assert_eq!(last, Some(4));
    let served: Vec<_> = std::iter::from_fn(|| serve(&mut peer)).collect();
    assert_eq!(served, [9, 7, 5, 8, 6]);
}

/// A worker asks for something and waits for it, and the answer is there already.
fn waits_for_what_is_there(root: &mut Machine, worker: WorkerId, microbatch: u32) -> Waiting {
    let id = asks(root, worker, microbatch);
    root.deliver(Rank(1), answer_of(id.0), at(0));
    root.wait(worker, &[id], Phase::Forward, at(0)).unwrap()
}

fn asks(root: &mut Machine, worker: WorkerId, microbatch: u32) -> RequestId {
    let request = new_request(forward(1), MicrobatchId(microbatch), Value::None);
    root.send_request(Some(worker), Rank(1), request, at(0))
        .unwrap()
}

#[test]
fn a_worker_that_goes_on_without_giving_up_the_turn_has_begun_another_one() {
    let mut root = root();
    let [first, second] = [WorkerId(0), WorkerId(1)];
    // Microbatch 1 has two turns, and waits.
    root.wait(second, &[RequestId(2)], Phase::Forward, at(0))
        .unwrap();
    root.deliver(Rank(1), answer_of(2), at(0));
    assert_eq!(root.take_grant(second), Some(Grant::Resume));
    let id = asks(&mut root, second, 1);
    root.wait(second, &[id], Phase::Forward, at(0)).unwrap();
    // Microbatch 0 has two as well, and goes on with a third.
    root.deliver(Rank(1), answer_of(1), at(0));
    assert_eq!(root.take_grant(first), Some(Grant::Resume));
    assert_eq!(waits_for_what_is_there(&mut root, first, 0), Waiting::Over);
    root.deliver(Rank(1), answer_of(id.0), at(0));
    assert_eq!(
        waits_for_what_is_there(&mut root, first, 0),
        Waiting::Suspended
    );
    assert_eq!(root.take_grant(second), Some(Grant::Resume));
}

#[test]
fn a_backward_that_begins_on_another_rank_is_no_backward_turn_here() {
    let mut root = root();
    let [first, second] = [WorkerId(0), WorkerId(1)];
    assert_eq!(root.begin_backward_elsewhere(second, at(0)), Ok(true));
    let asked = new_request(backward(1, RequestId(2)), MicrobatchId(1), Value::None);
    let id = root.send_request(Some(second), Rank(1), asked, at(0));
    let id = id.unwrap();
    // With a forward ready its backward keeps the turn, since the turn was a forward.
    root.deliver(Rank(1), answer_of(1), at(0));
    root.deliver(Rank(1), answer_of(id.0), at(0));
    assert_eq!(
        root.wait(second, &[id], Phase::Backward, at(0)),
        Ok(Waiting::Over)
    );
    // The forward has its turn after that one.
    root.worker_returns(second, at(0)).unwrap();
    assert_eq!(root.take_grant(first), Some(Grant::Resume));
}
