//! What harmful faults do: the receiver loses the sender once, with the reason and in time, and
//! never sees a wrong message.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Message, StepBegin};

use super::{Delivered, Recorder, numbered, numbers_from, only_loss};
use crate::error::CommError;
use crate::in_process::faults::in_process_with_faults;
use crate::transport::{Loss, Transport};
use crate::{Cut, Faults, InProcess};

/// Longer than a machine that has much else to do is silent by itself.
const DEADLINE: Duration = Duration::from_secs(4);
const SEEDS: [u64; 3] = [1, 2, 3];

fn job(world: usize, faults: &Faults) -> Vec<(Arc<InProcess>, Arc<Recorder>)> {
    let recorders = Recorder::several(world);
    let receivers = recorders.iter().map(Recorder::receiver).collect();
    let ranks = in_process_with_faults(receivers, faults).unwrap();
    ranks.into_iter().zip(recorders).collect()
}

fn send_all(job: &[(Arc<InProcess>, Arc<Recorder>)], count: u64) {
    for number in 0..count {
        for (transport, _) in job {
            for (to, _) in job.iter().filter(|(to, _)| to.rank() != transport.rank()) {
                match transport.send(to.rank(), numbered(number)) {
                    Ok(()) | Err(CommError::PeerLost { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

fn prefix(count: usize) -> Vec<u64> {
    (0..count as u64).collect()
}

/// Harms what rank 1 sends to rank 0 from message 40 on, and looks at what the three ranks see.
fn harm_one_pair(
    delivered: RangeInclusive<usize>,
    change: impl Fn(&mut Faults),
    is_expected: impl Fn(&Loss) -> bool,
) {
    const COUNT: u64 = 200;
    for seed in SEEDS {
        let mut faults = Faults {
            after: 40,
            from: Some(Rank(1)),
            to: Some(Rank(0)),
            deadline: DEADLINE,
            ..Faults::harmless(seed)
        };
        change(&mut faults);
        let job = job(3, &faults);
        send_all(&job, COUNT);
        let loss = job[0].1.wait_loss(Rank(1));
        assert!(is_expected(&loss), "{loss:?}");
        assert_eq!(job[1].1.wait_loss(Rank(0)), Loss::Died);
        let harmed = numbers_from(&job[0].1.delivered(), Rank(1));
        assert_eq!(harmed, prefix(harmed.len()));
        assert!(delivered.contains(&harmed.len()), "{}", harmed.len());
        for (own, from) in [(0, 2), (1, 2), (2, 0), (2, 1)] {
            let recorder = &job[own].1;
            let last = Delivered::Message(Rank(from), numbered(COUNT - 1));
            let delivered = recorder.wait("last message", |delivered| delivered.contains(&last));
            assert_eq!(numbers_from(&delivered, Rank(from)), prefix(COUNT as usize));
        }
        for (transport, _) in &job {
            transport.close(None);
        }
        assert_eq!(only_loss(&job[0].1.delivered(), Rank(1)), loss);
        assert_eq!(only_loss(&job[1].1.delivered(), Rank(0)), Loss::Died);
    }
}

fn is_broken_with(loss: &Loss, expected: &str) -> bool {
    matches!(loss, Loss::Broken { reason } if reason.contains(expected))
}

#[test]
fn a_dropped_message_is_missed_within_the_deadline() {
    harm_one_pair(
        40..=40,
        |faults| faults.drop = 1.0,
        |loss| {
            is_broken_with(
                loss,
                "messages 40 to 199 did not arrive within 4 s although sent",
            )
        },
    );
}

#[test]
fn a_message_that_is_missing_among_others_is_named_with_those() {
    let is_expected = |loss: &Loss| {
        is_broken_with(loss, " did not arrive within 4 s while ") && is_broken_with(loss, " did")
    };
    harm_one_pair(40..=198, |faults| faults.drop = 0.1, is_expected);
}

#[test]
fn a_damaged_message_is_never_delivered() {
    harm_one_pair(
        0..=40,
        |faults| faults.corrupt = 1.0,
        |loss| is_broken_with(loss, "it was damaged on its way"),
    );
}

#[test]
fn a_cut_that_is_noticed_is_a_death() {
    harm_one_pair(
        40..=40,
        |faults| faults.cut = Some(Cut::Noticed),
        |loss| *loss == Loss::Died,
    );
}

#[test]
fn a_cut_that_nobody_notices_is_silence() {
    harm_one_pair(
        40..=40,
        |faults| faults.cut = Some(Cut::Silent),
        |loss| *loss == Loss::Silent { seconds: 4 },
    );
}

#[test]
fn a_cut_of_everything_parts_all_from_all() {
    let faults = Faults {
        after: 40,
        cut: Some(Cut::Silent),
        deadline: DEADLINE,
        ..Faults::harmless(4)
    };
    let job = job(3, &faults);
    send_all(&job, 60);
    for (transport, recorder) in &job {
        for (peer, _) in job
            .iter()
            .filter(|(peer, _)| peer.rank() != transport.rank())
        {
            let silent = Loss::Silent { seconds: 4 };
            assert_eq!(recorder.wait_loss(peer.rank()), silent);
            let delivered = recorder.delivered();
            assert_eq!(numbers_from(&delivered, peer.rank()), prefix(40));
            assert_eq!(only_loss(&delivered, peer.rank()), silent);
        }
    }
}

#[test]
fn a_gap_wider_than_the_window_is_not_waited_for() {
    let faults = Faults {
        after: 10,
        drop: 0.001,
        ..Faults::default()
    };
    let job = job(2, &faults);
    // Until the receiver has given this rank up and told it so.
    let refused = (0..1_000_000).find(|number| job[0].0.send(Rank(1), numbered(*number)).is_err());
    assert!(refused.is_some());
    let lost = job[1].1.wait_loss(Rank(0));
    assert!(
        is_broken_with(&lost, "at most 4096 messages may overtake one"),
        "{lost:?}"
    );
}

#[test]
fn what_breaks_a_limit_is_refused_at_the_sender_and_leaves_no_gap() {
    let job = job(2, &Faults::harmless(1));
    let too_long = Message::StepBegin(StepBegin {
        function: "x".repeat(257 << 20),
        step: shardwright_core::StepEpoch(0),
        num_microbatches: 1,
        one_at_a_time: false,
    });
    let found = job[0].0.send(Rank(1), too_long).unwrap_err();
    assert!(
        matches!(found, CommError::Unsendable { rank: Rank(1), .. }),
        "{found}"
    );
    job[0].0.send(Rank(1), numbered(7)).unwrap();
    assert_eq!(job[1].1.wait_messages(1), [(Rank(0), numbered(7))]);
    assert!(job[1].0.stats().bytes_received > 0);
}
