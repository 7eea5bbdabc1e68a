//! Connections with faults, and what the sequencer makes of them; without threads or a clock.

use proptest::prelude::*;
use shardwright_core::StepEpoch;
use shardwright_wire::codec::encode;
use shardwright_wire::{Limits, Message, StepBegin};

use super::*;
use crate::in_process::faults::frame::{pack, unpack};
use crate::in_process::faults::sequence::Sequencer;

const COUNT: u64 = 60;
const WINDOW: usize = 64;

/// What the receiver saw.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    delivered: Vec<u64>,
    duplicates: u64,
    overtaken: u64,
    loss: Option<String>,
}

fn packed(number: u64) -> Vec<u8> {
    let message = Message::StepBegin(StepBegin {
        step: StepEpoch(number),
        function: "train".to_owned(),
        num_microbatches: 1,
        one_at_a_time: false,
    });
    pack(number, &encode(&message, &Limits::default()).unwrap())
}

/// Sends messages some microseconds apart, and then waits until the deadline has passed.
fn run(faults: &Faults, pauses: &[u64]) -> Seen {
    let deadline = faults.deadline;
    let mut line = FaultyLink::new(Rank(0), Rank(1), Arc::new(faults.clone()));
    let mut sequencer = Sequencer::new(WINDOW);
    let mut seen = Seen::default();
    let mut now = Duration::ZERO;
    let mut newest = 0;
    let mut arrive = |line: &mut FaultyLink, sequencer: &mut Sequencer<Message>, now: Duration| {
        while let (None, Some(packet)) = (&seen.loss, line.take_due(now)) {
            let bytes = match packet {
                Packet::Frame(bytes) => bytes,
                Packet::Ended(loss) => {
                    seen.loss = Some(format!("{loss:?}"));
                    break;
                }
            };
            let (number, message) = match unpack(&bytes, &Limits::default()) {
                Ok(unpacked) => unpacked,
                Err(error) => {
                    seen.loss = Some(error.to_string());
                    break;
                }
            };
            seen.overtaken += u64::from(number < newest);
            newest = newest.max(number);
            for message in sequencer.accept(number, message, now).unwrap() {
                match message {
                    Message::StepBegin(begin) => seen.delivered.push(begin.step.0),
                    other => panic!("{other:?} was never sent"),
                }
            }
        }
    };
    for number in 0..COUNT {
        now += Duration::from_micros(pauses[number as usize]);
        arrive(&mut line, &mut sequencer, now);
        line.put(number, packed(number), now);
    }
    while let Some(due) = line.next_due() {
        now = now.max(due);
        arrive(&mut line, &mut sequencer, now);
    }
    if !line.is_cut() {
        sequencer.announce(COUNT, now);
    }
    let gap = sequencer.overdue(now + deadline, deadline);
    seen.loss = seen
        .loss
        .or(gap.map(|gap| format!("{:?}", gap.loss(deadline))));
    seen.duplicates = sequencer.duplicates();
    seen
}

fn pauses() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(prop_oneof![Just(0), 0..3000_u64], COUNT as usize)
}

fn all(count: u64) -> Vec<u64> {
    (0..count).collect()
}

proptest! {
    #[test]
    fn harmless_faults_are_put_right(seed in any::<u64>(), pauses in pauses()) {
        let seen = run(&Faults::harmless(seed), &pauses);
        prop_assert_eq!(seen.delivered, all(COUNT));
        prop_assert_eq!(seen.loss, None);
    }

    #[test]
    fn a_harmed_message_and_those_behind_it_never_come_out(
        seed in any::<u64>(),
        pauses in pauses(),
        after in 0..COUNT,
        harm in 0..4_usize,
    ) {
        let mut faults = Faults { after, ..Faults::harmless(seed) };
        let expected = match harm {
            0 => {
                faults.drop = 1.0;
                "did not arrive within 5 s"
            }
            1 => {
                faults.corrupt = 1.0;
                "it was damaged on its way"
            }
            2 => {
                faults.cut = Some(Cut::Noticed);
                "Died"
            }
            _ => {
                faults.cut = Some(Cut::Silent);
                ""
            }
        };
        let seen = run(&faults, &pauses);
        prop_assert!(seen.delivered.len() as u64 <= after);
        prop_assert_eq!(&seen.delivered, &all(seen.delivered.len() as u64));
        // A silent cut is found by the silence, which the line itself does not know.
        prop_assert_eq!(seen.loss.is_some(), harm < 3);
        prop_assert!(seen.loss.as_deref().unwrap_or_default().contains(expected), "{:?}", seen);
        if harm != 1 {
            prop_assert_eq!(seen.delivered.len() as u64, after);
        }
    }

    #[test]
    fn harm_now_and_then_never_makes_a_wrong_message(seed in any::<u64>(), pauses in pauses()) {
        let faults = Faults { drop: 0.02, corrupt: 0.02, ..Faults::harmless(seed) };
        let seen = run(&faults, &pauses);
        prop_assert_eq!(&seen.delivered, &all(seen.delivered.len() as u64));
        prop_assert_eq!(seen.loss.is_none(), seen.delivered.len() as u64 == COUNT);
    }
}

#[test]
fn the_same_seed_makes_the_same_faults_and_they_do_happen() {
    let pauses = vec![10; COUNT as usize];
    let first = run(&Faults::harmless(4), &pauses);
    assert_eq!(first, run(&Faults::harmless(4), &pauses));
    assert!(first.duplicates > 0 && first.overtaken > 0, "{first:?}");
}
