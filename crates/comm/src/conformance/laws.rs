//! What every transport keeps (CM-1 to CM-4).

use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Heartbeat, Message};

use super::{Delivered, Recorder, TransportKind, WATCHDOG, heavy, number_of, numbered};
use crate::error::CommError;
use crate::transport::{Loss, Receiver};

for_every_kind! { laws_of_kind {
    messages_of_a_pair_arrive_in_the_order_of_sending
    no_send_waits_for_its_receiver
    a_receiver_may_send_while_it_is_delivered_to
    a_large_message_arrives_whole
    concurrent_senders_lose_nothing
    everybody_hears_a_shutdown_notice_after_what_was_sent_before
    everybody_may_leave_at_once
    a_death_is_seen_once_and_sending_then_fails
    a_closed_rank_is_told_nothing_and_sends_nothing
    heartbeats_carry_the_state_of_their_sender
    sending_to_nobody_is_refused
}}

fn messages_of_a_pair_arrive_in_the_order_of_sending(kind: TransportKind) {
    let job = kind.recorded(3);
    std::thread::scope(|scope| {
        for (transport, _) in &job {
            scope.spawn(|| {
                for number in 0..300 {
                    for to in (0..3).map(Rank).filter(|to| *to != transport.rank()) {
                        transport.send(to, numbered(number)).unwrap();
                    }
                }
            });
        }
    });
    for (transport, recorder) in &job {
        let messages = recorder.wait_messages(600);
        for from in (0..3).map(Rank).filter(|from| *from != transport.rank()) {
            let order: Vec<u64> = messages
                .iter()
                .filter(|(rank, _)| *rank == from)
                .map(|(_, message)| number_of(message))
                .collect();
            assert_eq!(order, (0..300).collect::<Vec<_>>());
        }
    }
}

/// Takes nothing until the gate opens.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    recorder: Recorder,
}

impl Receiver for Gate {
    fn deliver(&self, from: Rank, message: Message) {
        let open = self.open.lock().unwrap();
        let (open, timeout) = self
            .changed
            .wait_timeout_while(open, WATCHDOG, |open| !*open)
            .unwrap();
        drop(open);
        assert!(!timeout.timed_out());
        self.recorder.deliver(from, message);
    }

    fn peer_lost(&self, _: Rank, _: Loss) {}

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

fn no_send_waits_for_its_receiver(kind: TransportKind) {
    let gates: Vec<Arc<Gate>> = (0..2).map(|_| Arc::default()).collect();
    let job = kind.connect(
        gates
            .iter()
            .map(|gate| Arc::clone(gate) as Arc<dyn Receiver>)
            .collect(),
    );
    // More than any socket's buffer, in both directions at once.
    for _ in 0..200 {
        job[0].send(Rank(1), heavy(1 << 16, 1)).unwrap();
        job[1].send(Rank(0), heavy(1 << 16, 2)).unwrap();
    }
    for gate in &gates {
        *gate.open.lock().unwrap() = true;
        gate.changed.notify_all();
    }
    for gate in &gates {
        assert_eq!(gate.recorder.wait_messages(200).len(), 200);
    }
}

/// Answers every message below a hundred with the next.
#[derive(Default)]
struct Echo {
    transport: Mutex<Option<Arc<dyn crate::Transport>>>,
    recorder: Recorder,
}

impl Receiver for Echo {
    fn deliver(&self, from: Rank, message: Message) {
        let number = number_of(&message);
        let transport = self.transport.lock().unwrap().clone();
        if let Some(transport) = transport
            && number < 100
        {
            transport.send(from, numbered(number + 1)).unwrap();
        }
        self.recorder.deliver(from, message);
    }

    fn peer_lost(&self, _: Rank, _: Loss) {}

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

fn a_receiver_may_send_while_it_is_delivered_to(kind: TransportKind) {
    let echoes: Vec<Arc<Echo>> = (0..2).map(|_| Arc::default()).collect();
    let job = kind.connect(
        echoes
            .iter()
            .map(|echo| Arc::clone(echo) as Arc<dyn Receiver>)
            .collect(),
    );
    for (echo, transport) in echoes.iter().zip(&job) {
        *echo.transport.lock().unwrap() = Some(Arc::clone(transport));
    }
    job[0].send(Rank(1), numbered(0)).unwrap();
    let last = echoes[1].recorder.wait_messages(51).pop().unwrap();
    assert_eq!(number_of(&last.1), 100);
    for echo in &echoes {
        *echo.transport.lock().unwrap() = None;
    }
}

fn a_large_message_arrives_whole(kind: TransportKind) {
    let job = kind.recorded(2);
    let message = heavy(64 << 20, 7);
    job[0].0.send(Rank(1), message.clone()).unwrap();
    job[1].0.send(Rank(0), heavy(64 << 20, 9)).unwrap();
    assert!(job[1].1.wait_messages(1)[0].1 == message);
    assert!(job[0].1.wait_messages(1)[0].1 == heavy(64 << 20, 9));
}

fn concurrent_senders_lose_nothing(kind: TransportKind) {
    let job = kind.recorded(2);
    std::thread::scope(|scope| {
        for sender in 0..8_u64 {
            let transport = &job[0].0;
            scope.spawn(move || {
                for number in 0..200 {
                    transport
                        .send(Rank(1), numbered(sender * 1000 + number))
                        .unwrap();
                }
            });
        }
    });
    let mut numbers: Vec<u64> = job[1]
        .1
        .wait_messages(1600)
        .iter()
        .map(|(_, message)| number_of(message))
        .collect();
    for sender in 0..8 {
        let own: Vec<u64> = numbers
            .iter()
            .copied()
            .filter(|number| number / 1000 == sender)
            .collect();
        assert!(own.is_sorted());
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 1600);
    assert_eq!(job[0].0.stats().messages_sent, 1600);
    assert_eq!(job[1].0.stats().messages_received, 1600);
}

fn report(rank: u32) -> ErrorReport {
    ErrorReport {
        rank: Rank(rank),
        host: "host".to_owned(),
        module: None,
        microbatch: None,
        phase: None,
        kind: "ValueError".to_owned(),
        message: "no".to_owned(),
        traceback: String::new(),
    }
}

fn everybody_hears_a_shutdown_notice_after_what_was_sent_before(kind: TransportKind) {
    let job = kind.recorded(3);
    for number in 0..50 {
        job[2].0.send(Rank(0), numbered(number)).unwrap();
        job[2].0.send(Rank(1), heavy(1 << 16, 0)).unwrap();
    }
    let began = Instant::now();
    job[2].0.close(Some(report(2)));
    assert!(began.elapsed() < std::time::Duration::from_secs(4));
    for (_, recorder) in &job[..2] {
        assert_eq!(
            recorder.wait_loss(Rank(2)),
            Loss::Left(Some(Box::new(report(2))))
        );
        assert_eq!(recorder.wait_messages(50).len(), 50);
    }
    let found = job[0].0.send(Rank(2), numbered(0)).unwrap_err();
    assert!(
        matches!(
            found,
            CommError::PeerLost {
                rank: Rank(2),
                loss: Loss::Left(Some(_))
            }
        ),
        "{found}"
    );
    job[0].0.send(Rank(1), numbered(1)).unwrap();
    job[0].0.close(None);
    assert_eq!(job[1].1.wait_loss(Rank(0)), Loss::Left(None));
}

fn everybody_may_leave_at_once(kind: TransportKind) {
    let job = kind.recorded(4);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (transport, _) in &job {
            scope.spawn(|| transport.close(None));
        }
    });
    assert!(began.elapsed() < std::time::Duration::from_secs(8));
    for (_, recorder) in &job {
        recorder.wait("nothing but shutdown notices", |delivered| {
            delivered.iter().all(|event| {
                matches!(
                    event,
                    Delivered::Heartbeat(..) | Delivered::Lost(_, Loss::Left(None))
                )
            })
        });
    }
}

fn a_death_is_seen_once_and_sending_then_fails(kind: TransportKind) {
    let (mut survivors, doomed) = kind.doomed(2);
    let (survivor, recorder) = survivors.pop().unwrap();
    doomed.die();
    assert_eq!(recorder.wait_loss(Rank(1)), Loss::Died);
    let found = survivor.send(Rank(1), numbered(0)).unwrap_err();
    assert!(
        matches!(
            found,
            CommError::PeerLost {
                rank: Rank(1),
                loss: Loss::Died
            }
        ),
        "{found}"
    );
    survivor.close(None);
    let delivered = recorder.wait("loss", |delivered| !delivered.is_empty());
    assert_eq!(
        delivered
            .iter()
            .filter(|event| matches!(event, Delivered::Lost(..)))
            .count(),
        1
    );
}

fn a_closed_rank_is_told_nothing_and_sends_nothing(kind: TransportKind) {
    let job = kind.recorded(2);
    job[0].0.close(None);
    assert_eq!(job[1].1.wait_loss(Rank(0)), Loss::Left(None));
    let before = job[0].1.wait("anything", |_| true).len();
    assert!(matches!(
        job[0].0.send(Rank(1), numbered(0)),
        Err(CommError::Closed)
    ));
    assert!(matches!(
        job[1].0.send(Rank(0), numbered(0)),
        Err(CommError::PeerLost { .. })
    ));
    job[0].0.close(None);
    assert_eq!(job[0].1.wait("anything", |_| true).len(), before);
}

fn heartbeats_carry_the_state_of_their_sender(kind: TransportKind) {
    let job = kind.recorded(2);
    let heartbeat_state = job[1].0.heartbeat_state();
    heartbeat_state.enter_step(5);
    heartbeat_state.set_executing(true);
    heartbeat_state.advance();
    heartbeat_state.advance();
    let expected = Delivered::Heartbeat(
        Rank(1),
        Heartbeat {
            step: 5,
            executing: true,
            sending: false,
            progress: 2,
        },
    );
    job[0].1.wait("heartbeat with the state", |delivered| {
        delivered.contains(&expected)
    });
}

fn sending_to_nobody_is_refused(kind: TransportKind) {
    let job = kind.recorded(2);
    for nobody in [Rank(0), Rank(2)] {
        let found = job[0].0.send(nobody, numbered(0)).unwrap_err();
        assert!(matches!(found, CommError::NotAPeer { .. }), "{found}");
    }
    assert_eq!(job[0].0.peer(Rank(1)).unwrap().rank, Rank(1));
    assert!(job[0].0.peer(Rank(2)).is_none());
}
