//! The targets.

use arbitrary::Unstructured;
use shardwright_comm::tcp::fuzzing;
use shardwright_wire::codec::{decode_control, decode_heartbeat, encode, heartbeat_frame};
use shardwright_wire::{
    Body, Buffer, Frame, FrameKind, HEADER_BYTES, Header, Limits, Message, ObjectMessage, Value,
};

use crate::messages;
use crate::raw::most_held;

/// Memory held at most for each byte that has arrived (FZ-2). A list of small values is the worst: a byte each as it
/// arrives, forty in memory, three times that while the list grows.
pub const PER_BYTE: usize = 128;

/// Memory held at most besides, while a control part is decoded.
pub const CONSTANT: usize = 4 << 10;

/// A control part is read in pieces, of which the first is set aside before it arrives.
const PIECE: usize = 1 << 20;

/// What a handshake may hold, and write before it accepts: a challenge and a verdict.
const HANDSHAKE_MEMORY: usize = 4 << 10;
const CHALLENGE_AND_VERDICT: usize = 48 + 33;
const HELLO_AND_ANSWER: usize = 52 + 32;
/// What comes with the answer of a caller that says it encrypts.
const OFFER: usize = 48;

/// Ordinary limits, but for tensors small enough to hold many inputs a second.
pub(crate) const LIMITS: Limits = Limits {
    control_bytes: 256 << 20,
    tensor_bytes: 1 << 16,
    tensors: 1 << 16,
    depth: 96,
    nodes: 1 << 24,
    dimensions: 64,
};

pub(crate) fn within<T>(arrived: usize, constant: usize, work: impl FnOnce() -> T) -> T {
    let (result, held) = most_held(work);
    let allowed = arrived * PER_BYTE + constant;
    assert!(
        held <= allowed,
        "{held} bytes of memory for {arrived} bytes that arrived; at most {allowed} are allowed"
    );
    result
}

/// The bytes of a frame as they cross.
pub(crate) fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = frame.head.clone();
    for tensor in &frame.tensors {
        bytes.extend_from_slice(tensor.as_bytes());
    }
    bytes
}

/// A header and a control part, decoded by hand.
pub fn frame(input: &[u8]) {
    let Some((header, control)) = input.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = within(HEADER_BYTES, CONSTANT, || {
        Header::parse(header, &Limits::default())
    }) else {
        return;
    };
    let control = &control[..control.len().min(header.control_bytes as usize)];
    if header.kind == FrameKind::Heartbeat {
        if let Ok(heartbeat) = within(control.len(), CONSTANT, || decode_heartbeat(control)) {
            assert_eq!(&heartbeat_frame(heartbeat).head[HEADER_BYTES..], control);
        }
        return;
    }
    let Ok(incoming) = within(control.len(), CONSTANT, || {
        decode_control(control, header.tensor_bytes, &Limits::default())
    }) else {
        return;
    };
    let placed = incoming.placed();
    let following = placed.iter().filter(|one| one.shared.is_none());
    let following: u64 = following.map(|one| one.bytes as u64).sum();
    assert_eq!(following, header.tensor_bytes);
    let all: u64 = placed.iter().map(|one| one.bytes as u64).sum();
    if all <= LIMITS.tensor_bytes {
        let buffers = placed
            .iter()
            .map(|one| Buffer::copy_of(&vec![7; one.bytes]));
        let buffers = buffers.collect();
        understood_again(&incoming.complete(buffers), &Limits::default());
    }
}

/// A message that was understood can be sent on, and is understood as the same (FZ-3).
pub(crate) fn understood_again(message: &Message, limits: &Limits) {
    let sent = encode(message, limits).expect("a message that was understood can be sent on");
    let bytes = bytes_of(&sent);
    let mut count = 0;
    fuzzing::read_frames(&mut bytes.as_slice(), limits, |back| {
        let back = back.expect("a message does not come back as a heartbeat");
        // NaN is not equal to itself; its bits are.
        assert_eq!(format!("{back:?}"), format!("{message:?}"));
        assert_eq!(encode(&back, limits).as_ref(), Ok(&sent));
        count += 1;
    });
    assert_eq!(count, 1);
}

/// The control part of an object whose value is these bytes.
pub(crate) fn object_control(value: &[u8]) -> Vec<u8> {
    let empty = Message::Object(Box::new(ObjectMessage {
        channel: "c".to_owned(),
        body: Body {
            value: Value::None,
            tensors: Vec::new(),
        },
    }));
    let frame = encode(&empty, &LIMITS).expect("a small object can be sent");
    let mut control = frame.head[HEADER_BYTES..].to_vec();
    control.pop(); // the value comes last, and `None` is one byte
    control.extend_from_slice(value);
    control
}

fn decoded_value(input: &[u8]) -> Option<Value> {
    let control = object_control(input);
    let incoming = within(control.len(), CONSTANT, || {
        decode_control(&control, 0, &LIMITS)
    });
    match incoming.ok()?.complete(Vec::new()) {
        Message::Object(object) => Some(object.body.value),
        other => panic!("an object came back as {other:?}"),
    }
}

/// A tree of values.
pub fn value(input: &[u8]) {
    let control = object_control(input);
    let incoming = within(control.len(), CONSTANT, || {
        decode_control(&control, 0, &LIMITS)
    });
    if let Ok(incoming) = incoming {
        understood_again(&incoming.complete(Vec::new()), &LIMITS);
    }
}

/// An arbitrary message, whole and then damaged.
pub fn message_damaged(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let Ok(message) = messages::message(&mut choices) else {
        return;
    };
    let frame = encode(&message, &LIMITS).expect("a small message can be sent");
    understood_again(&message, &LIMITS);
    let mut bytes = bytes_of(&frame);
    while let Ok(true) = damage(&mut bytes, &mut choices) {}
    stream(&bytes);
}

/// Changes bytes at a place that the input chooses; false when it has no more choices.
pub(crate) fn damage(
    bytes: &mut Vec<u8>,
    choices: &mut Unstructured<'_>,
) -> arbitrary::Result<bool> {
    if choices.is_empty() || bytes.is_empty() {
        return Ok(false);
    }
    let place = choices.choose_index(bytes.len())?;
    match choices.int_in_range(0..=5)? {
        0 => bytes[place] = choices.arbitrary()?,
        1 => bytes[place] ^= 1 << choices.int_in_range(0..=7)?,
        2 => bytes.insert(place, choices.arbitrary()?),
        3 => drop(bytes.remove(place)),
        4 => bytes.truncate(place),
        _ => {
            let sizes = [0, 1, 1 << 16, 1 << 24, 1 << 36, 1 << 63, u64::MAX];
            let size = choices.choose(&sizes)?.to_le_bytes();
            for (byte, new) in bytes[place..].iter_mut().zip(size) {
                *byte = new;
            }
        }
    }
    Ok(true)
}

/// What a rank's thread reads from a peer, until the peer is lost.
pub fn stream(input: &[u8]) {
    let constant = CONSTANT + PIECE + LIMITS.tensor_bytes as usize;
    let mut from = input;
    within(input.len(), constant, || {
        fuzzing::read_frames(&mut from, &LIMITS, drop)
    });
    fuzzing::read_frames(&mut &*input, &LIMITS, |message| {
        if let Some(message) = message {
            understood_again(&message, &LIMITS);
        }
    });
}

/// Either side of a handshake, with an unknown peer or with a rank whose bytes are damaged (FZ-4).
pub fn handshake(input: &[u8]) {
    let Some((mode, rest)) = input.split_first() else {
        return;
    };
    let [register, started, calls, damaged] = [1, 2, 4, 8].map(|bit| mode & bit != 0);
    let (caller, answerer) = fuzzing::genuine(register);
    let mut bytes = rest.to_vec();
    if damaged {
        bytes = if calls { answerer.clone() } else { caller };
        let mut choices = Unstructured::new(rest);
        while let Ok(true) = damage(&mut bytes, &mut choices) {}
    }
    let (side, held) = most_held(|| {
        if calls {
            fuzzing::call(&bytes, register)
        } else {
            fuzzing::answer(&bytes, started, usize::from(mode >> 4) + 1)
        }
    });
    assert!(
        held <= HANDSHAKE_MEMORY,
        "{held} bytes of memory for an unknown peer"
    );
    if calls {
        assert_eq!(side.accepted, bytes.starts_with(&answerer));
        assert!(side.read <= CHALLENGE_AND_VERDICT);
        assert!(side.written.len() <= HELLO_AND_ANSWER);
    } else {
        let knows = [true, false].map(|register| fuzzing::genuine(register).0);
        let knows = knows.iter().any(|genuine| bytes.starts_with(genuine));
        assert_eq!(side.accepted, knows && !started);
        let offer = if bytes.get(11).is_some_and(|encrypts| *encrypts != 0) {
            OFFER
        } else {
            0
        };
        assert!(side.read <= HELLO_AND_ANSWER + offer);
        assert!(side.written.len() <= CHALLENGE_AND_VERDICT);
        let speaks = bytes.len() >= 52 && bytes.starts_with(b"SHARDWRT");
        assert!(
            speaks || side.written.is_empty(),
            "an unknown peer got an answer"
        );
    }
}

/// What rank 0 reads of a registration, and the others of its table.
pub fn table(input: &[u8]) {
    let Some((world, rest)) = input.split_first() else {
        return;
    };
    let world = u32::from(world % 4);
    let found = if input.len().is_multiple_of(2) {
        decoded_value(rest)
    } else {
        near_table(&mut Unstructured::new(rest)).ok()
    };
    let Some(found) = found else { return };
    if let Some(understood) = fuzzing::registration(&found) {
        assert_eq!(
            fuzzing::registration(&understood).as_ref(),
            Some(&understood)
        );
    }
    if let Some(understood) = fuzzing::table(&found, world) {
        assert_eq!(
            fuzzing::table(&understood, world).as_ref(),
            Some(&understood)
        );
        assert!(matches!(understood, Value::List(rows) if rows.len() == world as usize));
    }
}

/// A registration or a table, right but for a field here and there.
fn near_table(choices: &mut Unstructured<'_>) -> arbitrary::Result<Value> {
    if choices.arbitrary()? {
        return Ok(Value::Tuple(vec![
            Value::Str(choices.arbitrary()?),
            Value::Str(choices.arbitrary()?),
            near_row(choices, 1)?,
        ]));
    }
    let count = choices.int_in_range(0..=4)?;
    let rows = (0..count).map(|rank| near_row(choices, rank));
    Ok(Value::List(rows.collect::<Result<_, _>>()?))
}

fn near_row(choices: &mut Unstructured<'_>, rank: i64) -> arbitrary::Result<Value> {
    let addresses = [
        "127.0.0.1",
        "::1",
        "fe80::1%eth0",
        "::ffff:1.2.3.4",
        "",
        "1.2.3",
    ];
    let mut fields = vec![
        Value::Int(rank),
        Value::Str(choices.arbitrary()?),
        Value::Int(choices.arbitrary::<u32>()?.into()),
        Value::Str((*choices.choose(&addresses)?).to_owned()),
        Value::Int(choices.arbitrary::<u16>()?.into()),
    ];
    if choices.ratio(1, 4)? {
        let field = choices.choose_index(fields.len())?;
        fields[field] = messages::plain_value(choices)?;
    }
    Ok(Value::Tuple(fields))
}
