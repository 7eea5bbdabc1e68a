//! The order of a microbatch's calls on a rank (EX-14): one machine, event by event.

use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_wire::{
    Body, Buffer, Delivery, HeldTensor, Message, Phase, Place, Request, TaskEvent, TaskName,
    TaskOrder, TaskSource, TensorMeta, TensorPart, Value,
};

use super::alone::*;
use super::rig::{config, forward, new_request};
use crate::{Effect, Grant, Machine, MainEvent, Task};

const STEP: StepEpoch = StepEpoch(1);

fn part(is_here: bool) -> TensorPart {
    let meta = TensorMeta {
        dtype: "float32".to_owned(),
        shape: vec![2],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: true,
    };
    let held = HeldTensor {
        holder: Rank(2),
        requester: Rank(0),
        request: RequestId(1),
        index: 0,
    };
    TensorPart {
        meta,
        data: Buffer::copy_of(if is_here { &[1; 8] } else { &[] }),
        held: (!is_here).then_some(held),
    }
}

fn with(part: TensorPart) -> Body {
    Body {
        value: Value::Tensor(0),
        tensors: vec![part],
    }
}

/// A request for a forward at a place in the program, with its argument or without.
fn request(id: u64, microbatch: u32, path: &[u32], is_here: bool) -> Request {
    Request {
        id: RequestId(id),
        step: STEP,
        model: ModelId(0),
        work: forward(1),
        microbatch: MicrobatchId(microbatch),
        requester: Rank(0),
        place: Place {
            parent: None,
            call: CallId(0),
        },
        path: CallPath(path.to_vec()),
        hold: true,
        released: Vec::new(),
        body: with(part(is_here)),
    }
}

fn deliver(peer: &mut Machine, request: Request) {
    peer.deliver(Rank(0), Message::Request(Box::new(request)), at(0));
    if let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) {
        peer.worker_returns(worker, at(0)).unwrap();
    }
}

/// The argument that a request lacked.
fn argument(peer: &mut Machine, request: u64) {
    let delivery = Delivery {
        step: STEP,
        requester: Rank(0),
        request: RequestId(request),
        index: 0,
        body: with(part(true)),
    };
    peer.deliver(Rank(2), Message::Delivery(Box::new(delivery)), at(0));
}

/// Rank 1 of three in a step, in a tensor-parallel group of these ranks.
fn peer(tensor_group: &[u32]) -> Machine {
    let mut config = config(1, &[0, 1, 2], 4);
    config.tensor_group = tensor_group.iter().map(|rank| Rank(*rank)).collect();
    let mut peer = Machine::new(config);
    enter(&mut peer, 1).unwrap();
    peer.deliver(Rank(0), begin(1), at(0));
    peer
}

/// It serves request 9 of a microbatch of its own, so that others come before it is free.
fn busy() -> Machine {
    let mut peer = peer(&[1]);
    deliver(&mut peer, request(9, 0, &[0], true));
    assert_eq!(running(&mut peer), Some(9));
    peer
}

/// Ends the task that runs; the request that runs next.
fn next(peer: &mut Machine, ended: u64) -> Option<u64> {
    let body = with(part(true));
    peer.respond(Rank(0), RequestId(ended), body, at(0))
        .unwrap();
    peer.worker_returns(WorkerId(0), at(0)).unwrap();
    running(peer)
}

fn running(peer: &mut Machine) -> Option<u64> {
    match peer.take_grant(WorkerId(0))? {
        Grant::Task(Task::Request(request)) => Some(request.id.0),
        other => panic!("only requests come: {other:?}"),
    }
}

#[test]
fn of_the_calls_that_have_come_the_first_in_the_program_begins() {
    let mut peer = busy();
    deliver(&mut peer, request(3, 1, &[2, 0], true));
    deliver(&mut peer, request(4, 1, &[1, 0], true));
    deliver(&mut peer, request(5, 1, &[1], true));
    assert_eq!(next(&mut peer, 9), Some(5));
    assert_eq!(next(&mut peer, 5), Some(4));
    assert_eq!(next(&mut peer, 4), Some(3));
}

#[test]
fn a_later_call_waits_for_an_earlier_one_that_lacks_tensors_and_never_the_other_way_round() {
    let mut peer = busy();
    // The earlier one comes last, as in the deadlock that this order is against.
    deliver(&mut peer, request(3, 1, &[1, 0], false));
    deliver(&mut peer, request(4, 1, &[0, 1, 0], true));
    assert_eq!(next(&mut peer, 9), Some(4));
    deliver(&mut peer, request(5, 1, &[2], true));
    assert_eq!(next(&mut peer, 4), None);
    argument(&mut peer, 3);
    assert_eq!(running(&mut peer), Some(3));
    assert_eq!(next(&mut peer, 3), Some(5));
}

#[test]
fn microbatches_do_not_wait_for_one_another() {
    let mut peer = busy();
    deliver(&mut peer, request(3, 1, &[0], false));
    deliver(&mut peer, request(4, 2, &[1], true));
    assert_eq!(next(&mut peer, 9), Some(4));
}

#[test]
fn a_request_stands_behind_its_task_and_one_in_anothers_name_behind_what_its_sender_did() {
    let mut peer = busy();
    let new = || new_request(forward(2), MicrobatchId(0), Value::None);
    let worker = WorkerId(0);
    peer.take_effects();
    for _ in 0..2 {
        peer.send_request(Some(worker), Rank(2), new(), at(0))
            .unwrap();
    }
    let announced = (Rank(0), RequestId(10));
    peer.send_request_for(worker, announced, Rank(2), new(), at(0))
        .unwrap();
    let paths: Vec<String> = peer
        .take_effects()
        .into_iter()
        .filter_map(|effect| match effect {
            Effect::Send {
                message: Message::Request(request),
                ..
            } => Some(request.path.to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(paths, ["0.0", "0.1", "0.2"]);
}

#[test]
fn where_another_ranks_order_is_followed_that_one_has_chosen() {
    let mut peer = peer(&[3, 1]);
    // Here the earlier one came before the later one had begun, where the order comes from it came after.
    deliver(&mut peer, request(3, 1, &[0], false));
    deliver(&mut peer, request(4, 1, &[1], true));
    let turn = TaskName {
        source: TaskSource::Request {
            place: 0,
            id: RequestId(4),
        },
        phase: Phase::Forward,
        microbatch: MicrobatchId(1),
        module: Some((ModelId(0), ModuleId(1))),
    };
    let order = TaskOrder {
        step: STEP,
        number: 0,
        events: vec![TaskEvent::Turn(turn)],
    };
    peer.deliver(Rank(3), Message::TaskOrder(Box::new(order)), at(0));
    if let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) {
        peer.worker_returns(worker, at(0)).unwrap();
    }
    assert_eq!(running(&mut peer), Some(4));
}
