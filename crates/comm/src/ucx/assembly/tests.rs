use proptest::prelude::*;
use shardwright_wire::codec::encode;

use super::*;
use crate::conformance::{heavy, number_of, numbered};

fn nowhere(placed: &Placed) -> Result<Option<Buffer>, ImportError> {
    placed.shared.map_or(Ok(None), |place| {
        Err(ImportError::NoSuchPlace {
            bytes: placed.bytes,
            offset: place.offset,
            slot: place.slot,
        })
    })
}

/// The parts of messages, as they arrive.
fn arriving(messages: &[Message]) -> Vec<(Name, Buffer)> {
    let mut arriving = Vec::new();
    for (message, content) in (0..).zip(messages) {
        let frame = encode(content, &Limits::default()).unwrap();
        for (part, pieces) in (0..).zip(parts_of(frame)) {
            let bytes: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| piece.as_bytes().to_vec())
                .collect();
            arriving.push((Name { message, part }, Buffer::copy_of(&bytes)));
        }
    }
    arriving
}

fn take(assembly: &mut Assembly, name: Name, payload: Buffer) -> Result<Vec<Message>, String> {
    assembly
        .take(name, payload, &Limits::default(), &nowhere)
        .map_err(|error| error.to_string())
}

proptest! {
    #[test]
    fn whatever_overtakes_what_messages_come_whole_and_in_order(
        sizes in proptest::collection::vec(0..3 * SHARED_BYTES, 1..12),
        keys in proptest::collection::vec(any::<u32>(), 40),
    ) {
        let messages: Vec<Message> = sizes.iter().map(|size| heavy(*size, 7)).collect();
        let mut parts: Vec<_> = arriving(&messages).into_iter().zip(keys).collect();
        parts.sort_by_key(|(_, key)| *key);
        let mut assembly = Assembly::default();
        let mut came = Vec::new();
        for ((name, payload), _) in parts {
            came.extend(take(&mut assembly, name, payload).unwrap());
        }
        prop_assert_eq!(came, messages);
        prop_assert_eq!(assembly.completed(), sizes.len() as u64);
        prop_assert!(assembly.begun.is_empty());
    }
}

#[test]
fn a_part_that_comes_twice_or_late_or_in_another_size_is_an_error() {
    let parts = arriving(&[heavy(SHARED_BYTES, 1), numbered(2)]);
    let (first, second, last) = (&parts[0], &parts[1], &parts[2]);
    let mut assembly = Assembly::default();
    assert_eq!(take(&mut assembly, first.0, first.1.clone()), Ok(vec![]));
    let twice = take(&mut assembly, first.0, first.1.clone()).unwrap_err();
    assert_eq!(twice, "part 0 of message 0 while message 0 is due");
    let short = take(&mut assembly, second.0, Buffer::copy_of(&[0; 10])).unwrap_err();
    let due = format!("part 1 of message 0 has 10 bytes; {SHARED_BYTES} are due");
    assert_eq!(short, due);
    assert_eq!(take(&mut assembly, last.0, last.1.clone()), Ok(vec![]));
    let came = take(&mut assembly, second.0, second.1.clone()).unwrap();
    assert_eq!(came.len(), 2);
    assert_eq!(number_of(&came[1]), 2);
    let late = take(&mut assembly, last.0, last.1.clone()).unwrap_err();
    assert_eq!(late, "part 0 of message 1 while message 2 is due");
    let far = Name {
        message: WINDOW + 2,
        part: 0,
    };
    assert!(take(&mut assembly, far, last.1.clone()).is_err());
    let unknown = Name {
        message: 2,
        part: 9,
    };
    let small = take(&mut assembly, unknown, Buffer::copy_of(&[0; 10])).unwrap_err();
    assert_eq!(small, "part 9 of message 2 while message 2 is due");
    let large = Buffer::copy_of(&[0; SHARED_BYTES]);
    assert_eq!(take(&mut assembly, unknown, large), Ok(vec![]));
    let whole = arriving(&[numbered(1), numbered(2), numbered(3)]);
    let error = take(&mut assembly, whole[2].0, whole[2].1.clone()).unwrap_err();
    assert_eq!(error, "part 9 of message 2 while message 2 is due");
}

#[test]
fn what_is_kept_behind_a_message_that_is_missing_is_bounded() {
    let piece = Buffer::copy_of(&vec![0; 64 << 20]);
    let most = HELD_BYTES / piece.len() as u64;
    for first in [0, 1] {
        // Parts of one message before its frame, and parts of many messages before the first.
        let mut assembly = Assembly::default();
        let name = |count: u64| Name {
            message: first * (count + 1),
            part: if first == 0 { count as u32 + 1 } else { 1 },
        };
        for count in 0..most {
            assert_eq!(take(&mut assembly, name(count), piece.clone()), Ok(vec![]));
        }
        let error = take(&mut assembly, name(most), piece.clone()).unwrap_err();
        let held = HELD_BYTES + piece.len() as u64;
        let expected = format!("{held} bytes behind message 0; at most {HELD_BYTES} are kept");
        assert_eq!(error, expected);
    }
}

#[test]
fn bytes_that_are_no_frame_are_refused() {
    let name = Name {
        message: 0,
        part: 0,
    };
    for bytes in [vec![], vec![1; 10], vec![1; 100]] {
        assert!(take(&mut Assembly::default(), name, Buffer::copy_of(&bytes)).is_err());
    }
    let (_, frame) = &arriving(&[heavy(100, 1)])[0];
    for cut in [1, 50, 101] {
        let bytes = &frame.as_bytes()[..frame.len() - cut];
        assert!(take(&mut Assembly::default(), name, Buffer::copy_of(bytes)).is_err());
    }
    let longer = [frame.as_bytes(), &[0]].concat();
    assert!(take(&mut Assembly::default(), name, Buffer::copy_of(&longer)).is_err());
    assert!(Name::from_bytes(&[1; 11]).is_err());
    assert_eq!(Name::from_bytes(&name.to_bytes()).unwrap(), name);
}
