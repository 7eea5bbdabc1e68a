//! Targets of what a connection carries below its messages: parts over UCX, and sealed records.

use arbitrary::Unstructured;
use shardwright_comm::tcp::fuzzing::opened;
use shardwright_comm::ucx::fuzzing::{KEY, PartReceiver, WORLD, parts};
use shardwright_wire::codec::encode;

use crate::messages;
use crate::targets::{CONSTANT, LIMITS, damage, understood_again, within};

/// What a part's name adds, and a list of one message that is complete.
const PART_MEMORY: usize = 16 << 10;

/// Parts of a genuine message, damaged, in any order, from anybody (FZ-5).
pub fn received_parts(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let Ok(message) = messages::message(&mut choices) else {
        return;
    };
    let frame = encode(&message, &LIMITS).expect("a small message can be sent");
    let genuine = parts(0, frame);
    let mut receiver = PartReceiver::default();
    let (mut arrived, mut came, mut unknown_peers) = (0, 0, 0);
    while let Ok((from, header, payload)) = one_part(&genuine, &mut choices) {
        arrived += header.len() + payload.len();
        let is_rank = from < WORLD && header.starts_with(&KEY);
        let outcome = within(arrived, CONSTANT + PART_MEMORY, || {
            receiver.receive(from, &header, &payload, &LIMITS)
        });
        assert_eq!(outcome.is_some(), is_rank, "an unknown peer was believed");
        unknown_peers += u64::from(!is_rank);
        assert_eq!(receiver.unknown_peers(), unknown_peers);
        match outcome {
            None => {}
            Some(Ok(messages)) => {
                came += messages.len() as u64;
                assert_eq!(receiver.completed(), came);
                for message in messages {
                    understood_again(&message, &LIMITS);
                }
            }
            // Its sender is given up.
            Some(Err(_)) => return,
        }
    }
}

type Part = (u32, Vec<u8>, Vec<u8>);

fn one_part(
    genuine: &[(Vec<u8>, Vec<u8>)],
    choices: &mut Unstructured<'_>,
) -> arbitrary::Result<Part> {
    if choices.is_empty() {
        return Err(arbitrary::Error::NotEnoughData);
    }
    let (mut header, mut payload) = choices.choose(genuine)?.clone();
    let from = if choices.ratio(1, 8)? {
        choices.arbitrary()?
    } else {
        1
    };
    if choices.ratio(1, 3)? {
        damage(&mut header, choices)?;
    }
    if choices.ratio(1, 4)? {
        damage(&mut payload, choices)?;
    }
    Ok((from, header, payload))
}

/// Sealed records with damage on their way: what is opened is what was sealed, from its beginning on (FZ-6).
pub fn records(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let contents = (0..3).map(|_| choices.arbitrary::<Vec<u8>>());
    let Ok(mut contents) = contents.collect::<arbitrary::Result<Vec<_>>>() else {
        return;
    };
    contents.retain(|content| !content.is_empty());
    let mut harmed = false;
    let (sealed, got) = opened(&contents, |wire| {
        let before = wire.clone();
        while let Ok(true) = damage(wire, &mut choices) {}
        harmed = *wire != before;
    });
    assert!(sealed.starts_with(&got), "bytes that nobody sealed");
    assert!(harmed || got == sealed, "genuine records were not opened");
}
