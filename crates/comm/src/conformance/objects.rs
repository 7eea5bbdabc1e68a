//! The object plane, the barrier and the router, over a transport.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Body, Message, ObjectMessage, Value};

use super::{Recorder, TransportKind, WATCHDOG, numbered};
use crate::deadline::Deadline;
use crate::error::CommError;
use crate::objects::barrier;
use crate::router::Router;
use crate::transport::{Loss, Receiver, Transport};

for_every_kind! { laws_of_kind {
    channels_are_independent_queues
    waiting_ends_by_time_and_by_cancelling
    what_a_lost_peer_had_sent_is_received_then_the_loss_is_told
    nobody_passes_a_barrier_before_all_have_come
    a_barrier_that_a_rank_cannot_reach_fails_for_all
    what_comes_before_the_handler_is_kept_in_order
}}

type Node = (Arc<dyn Transport>, Arc<Router>);

fn nodes(kind: TransportKind, world: usize) -> Vec<Node> {
    let routers: Vec<Arc<Router>> = (0..world).map(|_| Arc::default()).collect();
    let receivers = routers
        .iter()
        .map(|router| Arc::clone(router) as Arc<dyn Receiver>)
        .collect();
    kind.connect(receivers).into_iter().zip(routers).collect()
}

fn object(channel: &str, number: i64) -> Message {
    let body = Body {
        value: Value::Int(number),
        tensors: vec![],
    };
    Message::Object(Box::new(ObjectMessage {
        channel: channel.to_owned(),
        body,
    }))
}

fn receive(node: &Node, from: u32, channel: &str, limit: Duration) -> Result<Body, CommError> {
    node.1.objects().receive(
        Rank(from),
        channel,
        &mut Deadline::new(Some(limit), &mut || true),
    )
}

fn channels_are_independent_queues(kind: TransportKind) {
    let nodes = nodes(kind, 3);
    for number in 0..3 {
        nodes[0].0.send(Rank(1), object("a", number)).unwrap();
        nodes[0].0.send(Rank(1), object("b", 10 + number)).unwrap();
        nodes[2].0.send(Rank(1), object("a", 20 + number)).unwrap();
    }
    for (from, channel, first) in [(0, "b", 10), (2, "a", 20), (0, "a", 0)] {
        for number in 0..3 {
            assert_eq!(
                receive(&nodes[1], from, channel, WATCHDOG).unwrap().value,
                Value::Int(first + number)
            );
        }
    }
    assert_eq!(nodes[1].1.objects().waiting(), 0);
}

fn waiting_ends_by_time_and_by_cancelling(kind: TransportKind) {
    let nodes = nodes(kind, 2);
    let found = receive(&nodes[0], 1, "a", Duration::from_millis(30)).unwrap_err();
    assert!(
        matches!(found, CommError::Timeout { rank: Rank(1), .. }),
        "{found}"
    );
    let found = nodes[0]
        .1
        .objects()
        .receive(Rank(1), "a", &mut Deadline::new(None, &mut || false))
        .unwrap_err();
    assert!(matches!(found, CommError::Cancelled), "{found}");
    nodes[1].0.send(Rank(0), object("a", 4)).unwrap();
    assert_eq!(
        receive(&nodes[0], 1, "a", WATCHDOG).unwrap().value,
        Value::Int(4)
    );
}

fn what_a_lost_peer_had_sent_is_received_then_the_loss_is_told(kind: TransportKind) {
    let nodes = nodes(kind, 2);
    nodes[1].0.send(Rank(0), object("a", 4)).unwrap();
    nodes[1].0.close(None);
    assert_eq!(
        receive(&nodes[0], 1, "a", WATCHDOG).unwrap().value,
        Value::Int(4)
    );
    let found = receive(&nodes[0], 1, "a", WATCHDOG).unwrap_err();
    assert!(
        matches!(
            found,
            CommError::PeerLost {
                rank: Rank(1),
                loss: Loss::Left(None)
            }
        ),
        "{found}"
    );
}

fn nobody_passes_a_barrier_before_all_have_come(kind: TransportKind) {
    {
        let nodes = nodes(kind, 3);
        let group: Vec<Rank> = (0..3).map(Rank).collect();
        let count = std::sync::atomic::AtomicU32::new(0);
        let begin = Barrier::new(3);
        std::thread::scope(|scope| {
            for (transport, router) in &nodes {
                scope.spawn(|| {
                    begin.wait();
                    for round in 1..=20 {
                        count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        let mut go_on = || true;
                        let mut deadline = Deadline::new(Some(WATCHDOG), &mut go_on);
                        barrier(
                            &**transport,
                            router.objects(),
                            &group,
                            "world",
                            &mut deadline,
                        )
                        .unwrap();
                        assert!(count.load(std::sync::atomic::Ordering::SeqCst) >= round * 3);
                    }
                });
            }
        });
    }
}

fn a_barrier_that_a_rank_cannot_reach_fails_for_all(kind: TransportKind) {
    let nodes = nodes(kind, 3);
    let group: Vec<Rank> = (0..3).map(Rank).collect();
    std::thread::scope(|scope| {
        let waiters: Vec<_> = nodes[..2]
            .iter()
            .map(|(transport, router)| {
                let group = &group;
                scope.spawn(move || {
                    let mut go_on = || true;
                    let mut deadline = Deadline::new(Some(WATCHDOG), &mut go_on);
                    barrier(
                        &**transport,
                        router.objects(),
                        group,
                        "world",
                        &mut deadline,
                    )
                    .unwrap_err()
                    .to_string()
                })
            })
            .collect();
        nodes[2].0.close(None);
        for waiter in waiters {
            let text = waiter.join().unwrap();
            assert!(
                text.contains("rank 2") && text.contains("has left the job"),
                "{text}"
            );
        }
    });
}

fn what_comes_before_the_handler_is_kept_in_order(kind: TransportKind) {
    let nodes = nodes(kind, 2);
    for number in 0..5 {
        nodes[0].0.send(Rank(1), numbered(number)).unwrap();
        nodes[0].0.send(Rank(1), object("a", 1)).unwrap();
    }
    for _ in 0..5 {
        receive(&nodes[1], 0, "a", WATCHDOG).unwrap();
    }
    let recorder = Arc::new(Recorder::default());
    nodes[1].1.set_handler(Arc::clone(&recorder) as _);
    nodes[0].0.send(Rank(1), numbered(5)).unwrap();
    let expected: Vec<_> = (0..6).map(|number| (Rank(0), numbered(number))).collect();
    assert_eq!(recorder.wait_messages(6), expected);
    nodes[0].0.close(None);
    assert_eq!(recorder.wait_loss(Rank(0)), Loss::Left(None));
    assert!(nodes[1].1.lost().contains_key(&Rank(0)));
}
