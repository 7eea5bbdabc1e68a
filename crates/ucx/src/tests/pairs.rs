//! Two workers in one process.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::super::{Options, ReceiveRefusal, UcxError, Worker, WorkerEvent};
use super::{Pair, TRANSPORTS, library, options, pattern, received, sent, thread};

const SIZES: [usize; 13] = [
    0,
    1,
    64,
    4 << 10,
    8 << 10,
    8240,
    8260,
    64 << 10,
    (64 << 10) + 1,
    579_763,
    580_001,
    1 << 20,
    64 << 20,
];

#[test]
fn every_size_arrives_intact_over_every_transport() {
    let library = library();
    for transports in TRANSPORTS {
        for report_errors in [true, false] {
            let options = Options {
                report_errors,
                ..options(transports)
            };
            let mut pair = Pair::connected(&library, &options);
            for (seed, size) in SIZES.into_iter().enumerate() {
                let payload = pattern(seed, size);
                pair.send(0, b"head", vec![payload.clone()], seed as u64);
                pair.until(|[sender, receiver]| !receiver.is_empty() && !sender.is_empty());
                let expected = WorkerEvent::Received {
                    from: Rank(0),
                    header: b"head".to_vec(),
                    payload,
                };
                assert!(pair.events[1] == [expected], "{size} over {transports}");
                assert_eq!(pair.events[0], [WorkerEvent::Sent { token: seed as u64 }]);
                pair.events = [Vec::new(), Vec::new()];
            }
        }
    }
}

#[test]
fn the_pieces_of_a_payload_arrive_one_after_another() {
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        for size in [1, 100, 5_000, 300_000, 3_000_000] {
            let pieces = vec![
                pattern(1, size),
                Buffer::default(),
                pattern(2, 7),
                pattern(3, size),
            ];
            let whole: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| piece.as_bytes().to_vec())
                .collect();
            pair.send(1, b"", pieces, 0);
            pair.until(|[receiver, _]| !receiver.is_empty());
            let WorkerEvent::Received { payload, from, .. } = &pair.events[0][0] else {
                panic!("{:?}", pair.events[0]);
            };
            assert_eq!(*from, Rank(1));
            assert!(payload.as_bytes() == whole, "{size} over {transports}");
            pair.events[0].clear();
        }
    }
}

#[test]
fn many_messages_both_ways_at_once_arrive_once_each() {
    const MESSAGES: u64 = 400;
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        let size = |from: usize, number: u64| {
            let mixed = (number * 2 + from as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (1_usize << (mixed >> 60)) * 24 + (mixed & 0xFF) as usize
        };
        for number in 0..MESSAGES {
            for from in 0..2 {
                let payload = pattern(number as usize, size(from, number));
                pair.send(from, &number.to_le_bytes(), vec![payload], number);
            }
        }
        let done = |events: &Vec<WorkerEvent>| {
            received(events) == MESSAGES as usize && sent(events) == MESSAGES as usize
        };
        pair.until(|events| events.iter().all(done));
        for (receiver, events) in pair.events.iter().enumerate() {
            let mut seen = BTreeSet::new();
            for event in events {
                let WorkerEvent::Received {
                    from,
                    header,
                    payload,
                } = event
                else {
                    continue;
                };
                let number = u64::from_le_bytes(header.as_slice().try_into().unwrap());
                assert_eq!(*from, Rank(1 - receiver as u32));
                let expected = pattern(number as usize, size(1 - receiver, number));
                assert!(*payload == expected, "message {number} over {transports}");
                assert!(seen.insert(number), "message {number} came twice");
            }
        }
    }
}

#[test]
fn small_messages_arrive_in_the_order_of_sending() {
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        for number in 0..5_000_u32 {
            let payload = vec![pattern(0, number as usize % 3_000)];
            pair.send(0, &number.to_le_bytes(), payload, 0);
        }
        pair.until(|[_, receiver]| received(receiver) == 5_000);
        let numbers = pair.events[1].iter().map(|event| match event {
            WorkerEvent::Received { header, .. } => {
                u32::from_le_bytes(header.as_slice().try_into().unwrap())
            }
            other => panic!("{other:?}"),
        });
        assert!(numbers.eq(0..5_000), "over {transports}");
    }
}

#[test]
fn a_payload_above_the_limit_is_refused_and_its_sender_is_told() {
    let library = library();
    for transports in TRANSPORTS {
        let options = Options {
            max_payload: 3_000_000,
            ..options(transports)
        };
        let mut pair = Pair::connected(&library, &options);
        pair.send(0, b"", vec![pattern(0, 3_000_001)], 7);
        pair.until(|[sender, receiver]| !receiver.is_empty() && !sender.is_empty());
        let refused = WorkerEvent::Refused {
            from: Rank(0),
            refusal: ReceiveRefusal::TooLong {
                length: 3_000_001,
                limit: 3_000_000,
            },
        };
        assert_eq!(pair.events[1], [refused]);
        let [WorkerEvent::SendFailed { token: 7, reason }] = &*pair.events[0] else {
            panic!("{:?} over {transports}", pair.events[0]);
        };
        assert!(!reason.is_empty());
        // What comes later is not disturbed.
        pair.send(0, b"", vec![pattern(0, 3_000_000)], 8);
        pair.until(|[sender, receiver]| received(receiver) == 1 && sent(sender) == 1);
    }
}

#[test]
fn a_small_payload_above_the_limit_is_refused_too() {
    let library = library();
    let options = Options {
        max_payload: 1_000,
        ..options("posix,self")
    };
    let mut pair = Pair::connected(&library, &options);
    for length in [1_001, 50_000] {
        pair.send(0, b"", vec![pattern(0, length)], 0);
        pair.until(|[_, receiver]| !receiver.is_empty());
        let limit = 1_000;
        let refused = WorkerEvent::Refused {
            from: Rank(0),
            refusal: ReceiveRefusal::TooLong { length, limit },
        };
        assert_eq!(pair.events[1], [refused]);
        pair.events[1].clear();
    }
}

#[test]
fn a_header_that_is_too_long_is_refused_and_the_longest_one_arrives() {
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        let limit = pair.workers[0].max_header();
        assert!(limit >= 1_000, "{limit}");
        let header = vec![5; limit + 1];
        let endpoint = pair.endpoints[0];
        let refused = pair.workers[0].send(endpoint, &header, Vec::new(), 0);
        let length = limit + 1;
        assert_eq!(refused, Err(UcxError::HeaderTooLong { length, limit }));
        for payload in [0, 100, 2_000_000] {
            pair.send(0, &header[1..], vec![pattern(0, payload)], 0);
            pair.until(|[_, receiver]| received(receiver) == 1);
            let WorkerEvent::Received {
                header: arrived, ..
            } = &pair.events[1][0]
            else {
                panic!("{:?}", pair.events[1]);
            };
            assert!(arrived[..] == header[1..]);
            pair.events[1].clear();
        }
    }
}

#[test]
fn abandoning_an_endpoint_ends_its_sends_at_once_and_silences_its_peer() {
    let library = library();
    for transports in TRANSPORTS {
        for report_errors in [true, false] {
            let options = Options {
                report_errors,
                ..options(transports)
            };
            let mut pair = Pair::connected(&library, &options);
            pair.send(0, b"", vec![pattern(0, 10)], 0);
            pair.send(1, b"", vec![pattern(0, 10)], 0);
            pair.until(|[one, other]| received(one) == 1 && received(other) == 1);
            pair.events = [Vec::new(), Vec::new()];
            // The other side takes nothing of this, and sends something that is never fetched.
            for token in 0..5 {
                pair.send(0, b"", vec![pattern(0, 20 << 20)], token);
                pair.send(1, b"", vec![pattern(0, 20 << 20)], token);
            }
            let endpoint = pair.endpoints[0];
            pair.workers[0].abandon(endpoint).unwrap();
            pair.workers[0].abandon(endpoint).unwrap();
            let events = pair.workers[0].take_events().unwrap();
            let failed: BTreeSet<u64> = events
                .iter()
                .map(|event| match event {
                    WorkerEvent::SendFailed { token, .. } => *token,
                    other => panic!("{other:?} over {transports}"),
                })
                .collect();
            assert_eq!(failed, (0..5).collect(), "{transports} {report_errors}");
            let peer = Rank(1);
            let refused = pair.workers[0].send(endpoint, b"", Vec::new(), 9);
            assert_eq!(refused, Err(UcxError::EndpointClosed { peer }));
            for _ in 0..1_000 {
                pair.progress();
                assert_eq!(pair.workers[0].take_events().unwrap(), []);
            }
            let rest = pair.workers[0].close(Duration::from_secs(2));
            assert_eq!(rest, [], "over {transports}");
            pair.workers[1].close(Duration::from_millis(100));
        }
    }
}

#[test]
fn closing_completes_what_was_sent_and_a_second_close_does_nothing() {
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        pair.send(0, b"", vec![pattern(0, 100)], 1);
        pair.until(|[_, receiver]| received(receiver) == 1);
        pair.events = [Vec::new(), Vec::new()];
        let Pair {
            workers: [mut first, mut second],
            endpoints,
            ..
        } = pair;
        first
            .send(endpoints[0], b"last", vec![pattern(1, 5 << 20)], 2)
            .unwrap();
        let handle = first.event_handle().unwrap();
        let closing = thread(move || {
            let events = first.close(super::DEADLINE);
            assert_eq!(first.close(super::DEADLINE), []);
            assert_eq!(first.progress(), Err(UcxError::Closed));
            assert_eq!(first.address(), Err(UcxError::Closed));
            events
        });
        let start = Instant::now();
        let mut events = Vec::new();
        while received(&events) == 0 || !closing.is_finished() {
            second.progress().unwrap();
            events.extend(second.take_events().unwrap());
            assert!(
                start.elapsed() < super::DEADLINE,
                "{events:?} over {transports}"
            );
        }
        assert_eq!(closing.join().unwrap(), [WorkerEvent::Sent { token: 2 }]);
        handle.signal();
        let WorkerEvent::Received { payload, .. } = &events[0] else {
            panic!("{events:?}");
        };
        assert!(*payload == pattern(1, 5 << 20));
    }
}

#[test]
fn workers_are_dropped_in_any_order_with_messages_under_way() {
    let library = library();
    for transports in TRANSPORTS {
        for first in 0..2 {
            for report_errors in [true, false] {
                let options = Options {
                    report_errors,
                    ..options(transports)
                };
                let mut pair = Pair::connected(&library, &options);
                for size in [100, 100_000, 10 << 20] {
                    pair.send(0, b"", vec![pattern(0, size)], 0);
                    pair.send(1, b"", vec![pattern(0, size)], 0);
                }
                for _ in 0..50 {
                    pair.progress();
                }
                let mut workers: Vec<Worker> = pair.workers.into_iter().collect();
                drop(workers.remove(first));
                let mut left = workers.remove(0);
                for _ in 0..50 {
                    left.progress().unwrap();
                    left.take_events().unwrap();
                }
            }
        }
    }
}
