//! Held results and requests that wait for them (EX-11): one machine, event by event.

use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_wire::{
    Body, Buffer, Delivery, Fetch, HeldTensor, Message, Phase, Place, Request, Response,
    ResponseOutcome, TensorMeta, TensorPart, Value, Work,
};

use super::alone::*;
use super::rig::{backward, config, forward, new_request, plan};
use crate::{Effect, Expected, FailureKind, Grant, Machine, MainEvent, Task};

const STEP: StepEpoch = StepEpoch(1);
const SMALL: u64 = 4;
const LARGE: u64 = 4096;

fn part(elements: u64, fill: u8) -> TensorPart {
    let meta = TensorMeta {
        dtype: "float32".to_owned(),
        shape: vec![elements],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: true,
    };
    TensorPart::new(meta, Buffer::copy_of(&vec![fill; 4 * elements as usize]))
}

/// The tensor of the answer to a request of rank 0, as another rank names it.
fn held(holder: u32, request: u64) -> HeldTensor {
    HeldTensor {
        holder: Rank(holder),
        requester: Rank(0),
        request: RequestId(request),
        index: 0,
    }
}

fn lacking(tensor: HeldTensor) -> TensorPart {
    TensorPart {
        data: Buffer::default(),
        held: Some(tensor),
        ..part(LARGE, 0)
    }
}

fn with(part: TensorPart) -> Body {
    Body {
        value: Value::Tensor(0),
        tensors: vec![part],
    }
}

/// A request of rank 0.
fn request(id: u64, work: Work, body: Body, released: &[u64]) -> Message {
    Message::Request(Box::new(Request {
        id: RequestId(id),
        step: STEP,
        model: ModelId(0),
        work,
        microbatch: MicrobatchId(0),
        requester: Rank(0),
        place: Place {
            parent: None,
            call: CallId(0),
        },
        path: CallPath(vec![id as u32]),
        hold: true,
        released: released.iter().copied().map(RequestId).collect(),
        body,
    }))
}

fn fetch(tensor: HeldTensor, to: u32, request: u64) -> Message {
    Message::Fetch(Fetch {
        step: STEP,
        tensor,
        to: Rank(to),
        requester: Rank(0),
        request: RequestId(request),
        index: 0,
    })
}

fn delivery(request: u64, part: TensorPart) -> Message {
    Message::Delivery(Box::new(Delivery {
        step: STEP,
        requester: Rank(0),
        request: RequestId(request),
        index: 0,
        body: with(part),
    }))
}

/// Rank 1 of three in a step, with an idle worker.
fn peer() -> Machine {
    peer_in(&[])
}

/// The same, in a tensor-parallel group of these ranks.
fn peer_in(tensor_group: &[u32]) -> Machine {
    let mut config = config(1, &[0, 1, 2], 4);
    config.tensor_group = tensor_group.iter().map(|rank| Rank(*rank)).collect();
    let mut peer = Machine::new(config);
    enter(&mut peer, 1).unwrap();
    peer.deliver(Rank(0), begin(1), at(0));
    peer
}

/// Delivers a request, whose task the peer's worker then has.
fn serve(peer: &mut Machine, message: Message) -> Request {
    peer.deliver(Rank(0), message, at(0));
    if let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) {
        peer.worker_returns(worker, at(0)).unwrap();
    }
    task(peer).expect("it may run")
}

/// The request that the peer's worker has been given.
fn task(peer: &mut Machine) -> Option<Request> {
    match peer.take_grant(WorkerId(0))? {
        Grant::Task(Task::Request(request)) => Some(*request),
        other => panic!("{other:?} is no request"),
    }
}

fn answer(peer: &mut Machine, id: u64, part: TensorPart) {
    peer.respond(Rank(0), RequestId(id), with(part), at(0))
        .unwrap();
    peer.worker_returns(WorkerId(0), at(0)).unwrap();
}

/// The messages that a machine has sent.
fn sent(machine: &mut Machine) -> Vec<(Rank, Message)> {
    let effects = machine.take_effects().into_iter();
    effects
        .filter_map(|effect| match effect {
            Effect::Send { to, message } => Some((to, message)),
            _ => None,
        })
        .collect()
}

/// The part of the answer that the peer has just sent, and to whom deliveries went.
fn answered(peer: &mut Machine) -> (TensorPart, Vec<(Rank, RequestId)>) {
    let mut answers = Vec::new();
    let mut deliveries = Vec::new();
    for (to, message) in sent(peer) {
        match message {
            Message::Response(response) => match response.outcome {
                ResponseOutcome::Value(answer) => answers.extend(answer.body.tensors),
                ResponseOutcome::Failed(report) => panic!("{report:?}"),
            },
            Message::Delivery(delivery) => deliveries.push((to, delivery.request)),
            Message::TaskOrder(_) => {}
            other => panic!("{other:?} was not expected"),
        }
    }
    (answers.remove(0), deliveries)
}

#[test]
fn an_answer_leaves_its_large_tensors_behind() {
    let mut peer = peer();
    serve(&mut peer, request(7, forward(1), with(part(SMALL, 1)), &[]));
    answer(&mut peer, 7, part(LARGE, 2));
    let (told, _) = answered(&mut peer);
    assert!(!told.is_here());
    assert_eq!(told.held, Some(held(1, 7)));
    serve(&mut peer, request(8, forward(2), with(part(SMALL, 1)), &[]));
    answer(&mut peer, 8, part(SMALL, 2));
    let (told, _) = answered(&mut peer);
    assert!(told.is_here());
    assert_eq!(peer.stats().held_responses, 2);
}

#[test]
fn what_comes_with_the_answer_is_the_same_for_all_tensor_parallel_ranks() {
    let mut scalar = part(1, 2);
    (scalar.meta.shape, scalar.meta.strides) = (vec![], vec![]);
    for (result, comes) in [
        (part(LARGE, 2), false),
        (part(SMALL, 2), false),
        (part(0, 2), false),
        (scalar, true),
    ] {
        let mut peer = peer_in(&[1, 3]);
        serve(&mut peer, request(7, forward(1), with(part(SMALL, 1)), &[]));
        let shape = result.meta.shape.clone();
        answer(&mut peer, 7, result);
        let (told, _) = answered(&mut peer);
        assert_eq!(told.is_here(), comes, "a result of shape {shape:?}");
    }
}

#[test]
fn what_comes_with_the_answer_is_the_same_for_all_microbatches() {
    for (first, others) in [(LARGE, SMALL), (SMALL, LARGE)] {
        let mut peer = peer();
        for (id, elements) in [(7, first), (8, others), (9, first)] {
            serve(
                &mut peer,
                request(id, forward(1), with(part(SMALL, 1)), &[]),
            );
            answer(&mut peer, id, part(elements, 2));
            let (told, _) = answered(&mut peer);
            assert_eq!(told.is_here(), first == SMALL, "request {id}");
        }
    }
}

#[test]
fn a_tensor_goes_to_whom_it_is_for_before_the_answer_or_after_and_until_it_is_released() {
    let mut peer = peer();
    peer.deliver(Rank(0), fetch(held(1, 7), 2, 20), at(0));
    serve(&mut peer, request(7, forward(1), with(part(SMALL, 1)), &[]));
    answer(&mut peer, 7, part(LARGE, 2));
    assert_eq!(answered(&mut peer).1, [(Rank(2), RequestId(20))]);
    peer.deliver(Rank(0), fetch(held(1, 7), 0, 21), at(0));
    let deliveries = sent(&mut peer);
    let [(Rank(0), Message::Delivery(delivery))] = &deliveries[..] else {
        panic!("{deliveries:?}")
    };
    assert_eq!(delivery.body.tensors[0], part(LARGE, 2));
    // Told with the next request; then also of one that has no answer yet.
    serve(
        &mut peer,
        request(8, forward(1), with(part(SMALL, 1)), &[7, 8]),
    );
    assert_eq!(peer.stats().held_responses, 0);
    peer.deliver(Rank(0), fetch(held(1, 8), 2, 22), at(0));
    answer(&mut peer, 8, part(LARGE, 2));
    assert_eq!(answered(&mut peer).1, [(Rank(2), RequestId(22))]);
    assert_eq!(peer.stats().held_responses, 0);
}

#[test]
fn a_request_waits_for_the_tensors_that_it_lacks() {
    for early in [false, true] {
        let mut peer = peer();
        let request = request(7, forward(1), with(lacking(held(2, 5))), &[]);
        if early {
            peer.deliver(Rank(2), delivery(7, part(LARGE, 3)), at(0));
            let served = serve(&mut peer, request);
            assert_eq!(served.body.tensors, [part(LARGE, 3)]);
            continue;
        }
        peer.deliver(Rank(0), request, at(0));
        assert_eq!(peer.poll_main(at(0)), None);
        peer.deliver(Rank(2), delivery(7, part(LARGE, 3)), at(0));
        let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) else {
            panic!("it may run")
        };
        peer.worker_returns(worker, at(0)).unwrap();
        assert_eq!(task(&mut peer).unwrap().body.tensors, [part(LARGE, 3)]);
    }
}

#[test]
fn a_rank_gives_itself_what_it_holds() {
    let mut peer = peer();
    serve(&mut peer, request(7, forward(1), with(part(SMALL, 1)), &[]));
    peer.deliver(
        Rank(0),
        request(8, forward(2), with(lacking(held(1, 7))), &[]),
        at(0),
    );
    peer.deliver(Rank(0), fetch(held(1, 7), 1, 8), at(0));
    answer(&mut peer, 7, part(LARGE, 2));
    assert_eq!(task(&mut peer).unwrap().body.tensors, [part(LARGE, 2)]);
}

#[test]
fn a_backward_that_comes_before_its_forward_is_over_waits_for_it() {
    let mut peer = peer();
    serve(&mut peer, request(7, forward(1), with(part(SMALL, 1)), &[]));
    peer.deliver(
        Rank(0),
        request(8, backward(1, RequestId(7)), with(part(SMALL, 1)), &[]),
        at(0),
    );
    assert_eq!(task(&mut peer), None);
    answer(&mut peer, 7, part(SMALL, 2));
    assert_eq!(task(&mut peer).unwrap().id, RequestId(8));
}

/// A root that goes on without the answer to request 1 of rank 1.
fn going_on(expected: TensorPart) -> Machine {
    let mut root = Machine::new(config(0, &[0, 1], 2));
    root.begin_step(plan(1, "train_step", 1), at(0)).unwrap();
    root.enter_main(at(0));
    root.poll_main(at(0));
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    root.take_grant(WorkerId(0));
    let mut new = new_request(forward(1), MicrobatchId(0), Value::None);
    new.hold = true;
    new.expected = Some(Expected::of(&with(expected).into()));
    root.send_request(Some(WorkerId(0)), Rank(1), new, at(0))
        .unwrap();
    root
}

fn respond(root: &mut Machine, part: TensorPart) {
    let response = Response {
        id: RequestId(1),
        step: STEP,
        responder: Rank(1),
        outcome: ResponseOutcome::Value(with(part).into()),
    };
    root.deliver(Rank(1), Message::Response(Box::new(response)), at(0));
}

#[test]
fn a_step_does_not_end_before_every_answer_is_there_and_as_expected() {
    let mut root = going_on(part(SMALL, 0));
    root.release(Rank(1), &[RequestId(1)]);
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    assert_eq!(root.poll_main(at(0)), None);
    respond(&mut root, part(SMALL, 9));
    assert_eq!(root.poll_main(at(0)), Some(MainEvent::RootDone));
    assert_eq!(root.stats().live_requests, 0);
}

#[test]
fn an_answer_unlike_the_expected_one_fails_the_step() {
    let mut root = going_on(part(SMALL, 0));
    respond(&mut root, part(LARGE, 0));
    root.worker_returns(WorkerId(0), at(0)).unwrap();
    let Some(MainEvent::Failed(failed)) = root.poll_main(at(0)) else {
        panic!("it has departed")
    };
    assert_eq!(
        (failed.kind, failed.report.rank, failed.report.phase),
        (FailureKind::Departure, Rank(1), Some(Phase::Forward))
    );
    assert_eq!(aborts_sent(&mut root), 1);
}

#[test]
fn a_tensor_that_is_fetched_comes_as_an_answer() {
    let mut root = going_on(part(LARGE, 0));
    let tensor = held(1, 1);
    let id = root.fetch(WorkerId(0), tensor, at(0)).unwrap();
    let asked = sent(&mut root).pop();
    assert_eq!(asked, Some((Rank(1), fetch(tensor, 0, id.0))));
    root.deliver(Rank(1), delivery(id.0, part(LARGE, 4)), at(0));
    let answers = root.take_responses(&[id]).unwrap();
    assert_eq!(answers, [with(part(LARGE, 4)).into()]);
}

#[test]
fn what_a_request_lacks_is_asked_of_its_holder() {
    let mut root = going_on(part(LARGE, 0));
    sent(&mut root);
    root.release(Rank(1), &[RequestId(9)]);
    let mut new = new_request(forward(2), MicrobatchId(0), Value::None);
    new.body = with(lacking(held(1, 1)));
    root.send_request(Some(WorkerId(0)), Rank(1), new, at(0))
        .unwrap();
    let messages = sent(&mut root);
    let [(_, Message::Request(asked)), (_, asked_for)] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!(asked.released, [RequestId(9)]);
    assert_eq!(*asked_for, fetch(held(1, 1), 1, 2));
}

#[test]
fn calls_of_one_caller_are_executed_in_their_order() {
    let mut peer = peer();
    let lacking_one = request(7, forward(1), with(lacking(held(2, 5))), &[]);
    peer.deliver(Rank(0), lacking_one, at(0));
    peer.deliver(
        Rank(0),
        request(8, forward(1), with(part(SMALL, 1)), &[]),
        at(0),
    );
    assert_eq!(peer.poll_main(at(0)), None);
    peer.deliver(Rank(2), delivery(7, part(LARGE, 3)), at(0));
    let Some(MainEvent::StartWorker(worker)) = peer.poll_main(at(0)) else {
        panic!("the first may run")
    };
    peer.worker_returns(worker, at(0)).unwrap();
    assert_eq!(task(&mut peer).unwrap().id, RequestId(7));
    answer(&mut peer, 7, part(SMALL, 2));
    assert_eq!(task(&mut peer).unwrap().id, RequestId(8));
}
