//! Laws of many messages: order, content, and what a shutdown notice or a death amid them does.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use shardwright_core::{Rank, derive_seed};
use shardwright_wire::{
    Body, Buffer, Heartbeat, Message, NoMemory, ObjectMessage, TensorPart, Value,
};

use super::{
    Delivered, TransportKind, WATCHDOG, heavy, meta_of_bytes, numbered, numbers_from, only_loss,
};
use crate::error::CommError;
use crate::transport::{Loss, Receiver, Transport};

for_every_kind! { laws_of_kind {
    twenty_thousand_messages_arrive_once_intact_and_in_order
    large_tensors_keep_their_place_among_small_messages
    threads_that_send_at_once_keep_their_own_order
    a_shutdown_notice_amid_traffic_is_heard_once_and_last
    a_death_amid_traffic_is_told_once_by_every_survivor
}}

const WORLD: u32 = 4;
/// Of each of twelve pairs.
const EACH: u64 = 1667;

fn others(own: Rank, world: u32) -> impl Iterator<Item = Rank> {
    (0..world).map(Rank).filter(move |rank| *rank != own)
}

/// A message of a size and content of its own: up to three tensors of up to 64 KiB, small ones
/// more often.
fn drawn(stream: u64, from: Rank, to: Rank, number: u64) -> Message {
    let pair = derive_seed(stream, u64::from(from.0 << 8 | to.0));
    let seed = derive_seed(pair, number);
    let tensor = |index: u64| {
        let draw = derive_seed(seed, index);
        let bytes = (draw >> 8) % (2 << (draw % 16));
        let data = Buffer::filled_by(bytes as usize, |into| {
            let mut fill = draw;
            for byte in into {
                fill = fill.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
                *byte = (fill >> 56) as u8;
            }
            Ok::<_, NoMemory>(())
        });
        TensorPart::new(meta_of_bytes(bytes), data.unwrap())
    };
    let body = Body {
        value: Value::Int(i64::try_from(number).unwrap()),
        tensors: (1..=seed % 4).map(tensor).collect(),
    };
    Message::Object(Box::new(ObjectMessage {
        channel: format!("stream {stream}"),
        body,
    }))
}

/// Compares each message with the one that is due.
#[derive(Default)]
struct Ledger {
    own: Rank,
    state: Mutex<LedgerState>,
    changed: Condvar,
}

#[derive(Default)]
struct LedgerState {
    next: BTreeMap<Rank, u64>,
    wrong: Option<String>,
}

impl Ledger {
    /// Waits until every peer's messages have come.
    fn wait(&self, each: u64) {
        let deadline = Instant::now() + WATCHDOG;
        let mut state = self.state.lock().unwrap();
        let complete = |state: &LedgerState| {
            others(self.own, WORLD).all(|from| state.next.get(&from) == Some(&each))
        };
        while !complete(&state) && state.wrong.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "only {:?} came", state.next);
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
        assert_eq!(state.wrong, None);
    }
}

impl Receiver for Ledger {
    fn deliver(&self, from: Rank, message: Message) {
        let mut state = self.state.lock().unwrap();
        let next = state.next.entry(from).or_default();
        let number = *next;
        *next += 1;
        if message != drawn(0, from, self.own, number) {
            state.wrong = Some(format!("message {number} from rank {from} is another"));
        }
        drop(state);
        self.changed.notify_all();
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.state.lock().unwrap().wrong = Some(format!("rank {from} was lost: {loss:?}"));
        self.changed.notify_all();
    }

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

fn twenty_thousand_messages_arrive_once_intact_and_in_order(kind: TransportKind) {
    let ledger = |rank| {
        Arc::new(Ledger {
            own: Rank(rank),
            ..Ledger::default()
        })
    };
    let ledgers: Vec<Arc<Ledger>> = (0..WORLD).map(ledger).collect();
    let job = kind.connect(
        ledgers
            .iter()
            .map(|ledger| Arc::clone(ledger) as Arc<dyn Receiver>)
            .collect(),
    );
    std::thread::scope(|scope| {
        for transport in &job {
            scope.spawn(|| {
                let own = transport.rank();
                for number in 0..EACH {
                    for to in others(own, WORLD) {
                        transport.send(to, drawn(0, own, to, number)).unwrap();
                    }
                }
            });
        }
    });
    for ledger in &ledgers {
        ledger.wait(EACH);
    }
    for transport in &job {
        let stats = transport.stats();
        let expected = EACH * u64::from(WORLD - 1);
        assert_eq!(
            (stats.messages_sent, stats.messages_received),
            (expected, expected)
        );
    }
}

fn large_tensors_keep_their_place_among_small_messages(kind: TransportKind) {
    let job = kind.recorded(2);
    let sent: Vec<Message> = (0..12)
        .map(|number| match number % 5 {
            3 => heavy(64 << 20, number as u8),
            _ => numbered(number),
        })
        .collect();
    for message in &sent {
        job[0].0.send(Rank(1), message.clone()).unwrap();
    }
    let arrived = job[1].1.wait_messages(sent.len());
    assert_eq!(arrived.len(), sent.len());
    for (number, ((from, message), expected)) in arrived.iter().zip(&sent).enumerate() {
        assert!((*from, message) == (Rank(0), expected), "message {number}");
    }
}

fn threads_that_send_at_once_keep_their_own_order(kind: TransportKind) {
    const EACH: usize = 120;
    let job = kind.recorded(2);
    let send = |transport: &dyn Transport, stream: u64| {
        let (from, to) = (transport.rank(), Rank(1 - transport.rank().0));
        for number in 0..EACH as u64 {
            transport.send(to, drawn(stream, from, to, number)).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for (transport, _) in &job {
            for stream in 0..6 {
                scope.spawn(move || send(&**transport, stream));
            }
        }
    });
    for (transport, recorder) in &job {
        let mut next = BTreeMap::new();
        let arrived = recorder.wait_messages(6 * EACH);
        assert_eq!(arrived.len(), 6 * EACH);
        for (from, message) in arrived {
            let Message::Object(object) = &message else {
                panic!("{message:?} was never sent");
            };
            let stream: u64 = object
                .channel
                .strip_prefix("stream ")
                .unwrap()
                .parse()
                .unwrap();
            let number = next.entry(stream).or_default();
            assert!(message == drawn(stream, from, transport.rank(), *number));
            *number += 1;
        }
    }
}

/// Sends numbered messages in turn to several ranks; stops where a peer is gone or the connection
/// closed.
fn send_while_possible(transport: &dyn Transport, to: &[Rank], count: u64) {
    let mut left = to.to_vec();
    for number in 0..count {
        left.retain(|to| match transport.send(*to, numbered(number)) {
            Ok(()) => true,
            Err(CommError::PeerLost { .. } | CommError::Closed) => false,
            Err(error) => panic!("{error}"),
        });
    }
}

/// The numbers begin with 0 and have no gap.
fn assert_prefix(numbers: &[u64], least: u64) {
    assert!(
        numbers.iter().copied().eq(0..numbers.len() as u64),
        "{numbers:?}"
    );
    assert!(numbers.len() as u64 >= least, "only {}", numbers.len());
}

fn a_shutdown_notice_amid_traffic_is_heard_once_and_last(kind: TransportKind) {
    const COUNT: u64 = 1500;
    const BEFORE: u64 = 300;
    let job = kind.recorded(3);
    let leaving = Rank(2);
    std::thread::scope(|scope| {
        for (transport, _) in &job[..2] {
            let to: Vec<Rank> = others(transport.rank(), 3).collect();
            scope.spawn(move || send_while_possible(&**transport, &to, COUNT));
        }
        let (transport, _) = &job[2];
        send_while_possible(&**transport, &[Rank(0), Rank(1)], BEFORE);
        for thread in 0..2 {
            scope.spawn(move || {
                // Apart from the numbers that are in order.
                for _ in 0..100_000 {
                    match transport.send(Rank(thread), heavy(64, 0)) {
                        Ok(()) => {}
                        Err(CommError::Closed) => return,
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        for (_, recorder) in &job[..2] {
            let is_amid =
                |event: &Delivered| matches!(event, Delivered::Message(_, Message::Object(_)));
            recorder.wait("messages amid which to leave", |delivered| {
                delivered.iter().filter(|event| is_amid(event)).count() >= 100
            });
        }
        let began = Instant::now();
        transport.close(None);
        assert!(began.elapsed() < WATCHDOG / 2);
    });
    let of_leaver = job[2].1.delivered();
    for (transport, recorder) in &job[..2] {
        let other = Rank(1 - transport.rank().0);
        let delivered = recorder.wait("all messages and the loss", |delivered| {
            let lost = delivered
                .iter()
                .any(|event| matches!(event, Delivered::Lost(..)));
            lost && delivered.contains(&Delivered::Message(other, numbered(COUNT - 1)))
        });
        assert_eq!(only_loss(&delivered, leaving), Loss::Left(None));
        let ordered: Vec<Delivered> = delivered
            .into_iter()
            .filter(|event| !matches!(event, Delivered::Message(_, Message::Object(_))))
            .collect();
        assert_eq!(
            numbers_from(&ordered, leaving),
            (0..BEFORE).collect::<Vec<_>>()
        );
        assert_eq!(
            numbers_from(&ordered, other),
            (0..COUNT).collect::<Vec<_>>()
        );
        let found = transport.send(leaving, numbered(0)).unwrap_err();
        assert!(
            matches!(found, CommError::PeerLost { rank: Rank(2), .. }),
            "{found}"
        );
    }
    for from in [Rank(0), Rank(1)] {
        assert_prefix(&numbers_from(&of_leaver, from), 0);
    }
    assert_eq!(
        job[2].1.delivered(),
        of_leaver,
        "told after close had returned"
    );
}

fn a_death_amid_traffic_is_told_once_by_every_survivor(kind: TransportKind) {
    const COUNT: u64 = 1500;
    let (survivors, doomed) = kind.doomed(4);
    let dead = Rank(3);
    std::thread::scope(|scope| {
        for (transport, _) in &survivors {
            let to: Vec<Rank> = others(transport.rank(), 4).collect();
            scope.spawn(move || send_while_possible(&**transport, &to, COUNT));
        }
        for number in 0..100 {
            for to in others(dead, 4) {
                doomed.send(to, numbered(number));
            }
        }
        // Some of its messages have come everywhere; where a death takes the rest along, it may.
        for (_, recorder) in &survivors {
            recorder.wait("message of the doomed rank", |delivered| {
                !numbers_from(delivered, dead).is_empty()
            });
        }
        doomed.die();
    });
    for (transport, recorder) in &survivors {
        let peers: Vec<Rank> = others(transport.rank(), 3).collect();
        let delivered = recorder.wait("all messages and the loss", |delivered| {
            let any_lost = delivered
                .iter()
                .any(|event| matches!(event, Delivered::Lost(..)));
            let last =
                |from: &Rank| delivered.contains(&Delivered::Message(*from, numbered(COUNT - 1)));
            any_lost && peers.iter().all(last)
        });
        assert_eq!(only_loss(&delivered, dead), Loss::Died);
        assert_prefix(&numbers_from(&delivered, dead), 1);
        for from in peers {
            assert_eq!(
                numbers_from(&delivered, from),
                (0..COUNT).collect::<Vec<_>>()
            );
        }
        let losses = delivered
            .iter()
            .filter(|event| matches!(event, Delivered::Lost(..)));
        assert_eq!(losses.count(), 1);
        let found = transport.send(dead, numbered(0)).unwrap_err();
        assert!(
            matches!(found, CommError::PeerLost { rank: Rank(3), .. }),
            "{found}"
        );
    }
}
