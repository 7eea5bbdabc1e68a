//! Laws of the binary form (WI-1 to WI-3).
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::sync::Arc;

use proptest::prelude::*;
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::codec::{
    decode_control, decode_heartbeat, encode, encode_placed, heartbeat_frame,
};
use shardwright_wire::{
    Answer, AnswerKind, ArgumentNotes, Body, Buffer, CodecError, Composite, FORMAT_VERSION,
    ForwardCall, Frame, FrameKind, HEADER_BYTES, Header, Heartbeat, Limits, Message, NoMemory,
    ObjectMessage, Place, Placed, Request, Response, ResponseOutcome, ResultNotes, SettingValue,
    SharedMemory, SharedPlace, TensorMeta, TensorPart, TorchContext, TorchSetting, Value,
};
use support::messages;

fn decode(frame: &Frame, limits: &Limits) -> Result<Message, CodecError> {
    let (header, control) = frame.head.split_at(HEADER_BYTES);
    let header = Header::parse(header.try_into().unwrap(), limits)?;
    assert_eq!(header.control_bytes, control.len() as u64);
    let incoming = decode_control(control, header.tensor_bytes, limits)?;
    Ok(incoming.complete(frame.tensors.clone()))
}

fn object(value: Value, tensors: Vec<TensorPart>) -> Message {
    Message::Object(Box::new(ObjectMessage {
        channel: "c".to_owned(),
        body: Body { value, tensors },
    }))
}

fn tensor(dtype: &str, shape: &[u64], strides: &[u64], bytes: usize) -> TensorPart {
    TensorPart::new(
        TensorMeta {
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            device: "cpu".to_owned(),
            requires_grad: false,
        },
        Buffer::filled_by(bytes, |_| Ok::<_, NoMemory>(())).unwrap(),
    )
}

fn any_place() -> impl Strategy<Value = Option<SharedPlace>> {
    let memory = prop::sample::select(vec![SharedMemory::Host, SharedMemory::Device]);
    let place = (memory, any::<u32>(), any::<u64>());
    prop::option::of(place.prop_map(|(memory, slot, offset)| SharedPlace {
        memory,
        slot,
        offset,
    }))
}

proptest! {
    #[test]
    fn every_message_comes_back_equal(message in messages()) {
        let limits = Limits::default();
        let frame = encode(&message, &limits).unwrap();
        let back = decode(&frame, &limits).unwrap();
        // NaN is not equal to itself, but its bits are.
        prop_assert_eq!(encode(&back, &limits).unwrap(), frame);
        prop_assert_eq!(format!("{back:?}"), format!("{message:?}"));
    }

    #[test]
    fn every_place_comes_back_equal(message in messages(), places in proptest::collection::vec(any_place(), 1..9)) {
        let limits = Limits::default();
        let mut given = Vec::new();
        let mut place = |buffer: &Buffer| {
            let shared = places[given.len() % places.len()];
            given.push(Placed { bytes: buffer.len(), shared });
            shared
        };
        let frame = encode_placed(&message, &limits, &mut place).unwrap();
        let tensor_bytes = frame.num_bytes() - frame.head.len() as u64;
        let incoming = decode_control(&frame.head[HEADER_BYTES..], tensor_bytes, &limits).unwrap();
        prop_assert_eq!(incoming.placed(), given);
    }

    #[test]
    fn no_bytes_make_decoding_panic(control in proptest::collection::vec(any::<u8>(), 0..512), tensors in any::<u64>()) {
        if let Ok(incoming) = decode_control(&control, tensors, &Limits::default()) {
            prop_assert_eq!(incoming.placed().iter().filter(|one| one.shared.is_none()).map(|one| one.bytes as u64).sum::<u64>(), tensors);
        }
        prop_assert!(decode_heartbeat(&control).is_ok() == (control.len() == 18 && control[8] < 2 && control[9] < 2));
    }

    #[test]
    fn no_damaged_byte_makes_decoding_panic(message in messages(), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let limits = Limits::default();
        let frame = encode(&message, &limits).unwrap();
        let mut control = frame.head[HEADER_BYTES..].to_vec();
        let tensor_bytes = frame.num_bytes() - frame.head.len() as u64;
        let place = place.index(control.len());
        control[place] = byte;
        if let Ok(incoming) = decode_control(&control, tensor_bytes, &limits) {
            prop_assert_eq!(incoming.placed().iter().filter(|one| one.shared.is_none()).map(|one| one.bytes as u64).sum::<u64>(), tensor_bytes);
        }
    }

    #[test]
    fn every_cut_is_noticed(message in messages(), place in any::<prop::sample::Index>()) {
        let limits = Limits::default();
        let frame = encode(&message, &limits).unwrap();
        let control = &frame.head[HEADER_BYTES..];
        let tensor_bytes = frame.num_bytes() - frame.head.len() as u64;
        let cut = &control[..place.index(control.len())];
        prop_assert!(decode_control(cut, tensor_bytes, &limits).is_err());
    }

    #[test]
    fn heartbeats_come_back_equal(step in any::<u64>(), executing in any::<bool>(), sending in any::<bool>(), progress in any::<u64>()) {
        let heartbeat = Heartbeat { step, executing, sending, progress };
        let frame = heartbeat_frame(heartbeat);
        let (header, control) = frame.head.split_at(HEADER_BYTES);
        let header = Header::parse(header.try_into().unwrap(), &Limits::default()).unwrap();
        prop_assert_eq!(header.kind, FrameKind::Heartbeat);
        prop_assert_eq!(decode_heartbeat(control).unwrap(), heartbeat);
    }
}

#[test]
fn a_newer_format_is_refused_by_its_number() {
    let mut head = heartbeat_frame(Heartbeat::default()).head;
    let newer = FORMAT_VERSION + 1;
    head[4..6].copy_from_slice(&newer.to_le_bytes());
    let found =
        Header::parse(head[..HEADER_BYTES].try_into().unwrap(), &Limits::default()).unwrap_err();
    let expected =
        format!("format version {newer} where this library reads version {FORMAT_VERSION}");
    assert_eq!(found.to_string(), expected);
}

#[test]
fn another_protocol_is_refused_with_its_first_bytes() {
    let found = Header::parse(
        b"GET / HTTP/1.1\r\nHost: x\r\n"[..HEADER_BYTES]
            .try_into()
            .unwrap(),
        &Limits::default(),
    );
    assert_eq!(found.unwrap_err(), CodecError::Magic { found: *b"GET " });
}

#[test]
fn a_header_beyond_the_limits_is_refused() {
    let mut head = heartbeat_frame(Heartbeat::default()).head;
    head[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let found =
        Header::parse(head[..HEADER_BYTES].try_into().unwrap(), &Limits::default()).unwrap_err();
    assert!(
        matches!(
            found,
            CodecError::TooMany {
                what: "bytes of control",
                ..
            }
        ),
        "{found}"
    );
}

#[test]
fn nesting_deeper_than_allowed_is_refused_at_both_ends() {
    let deep = |levels| (0..levels).fold(Value::None, |inner, _| Value::List(vec![inner]));
    let wide = Limits {
        depth: 5000,
        ..Limits::default()
    };
    let message = object(deep(4000), vec![]);
    assert!(matches!(
        encode(&message, &Limits::default()),
        Err(CodecError::TooMany {
            what: "levels of nesting",
            ..
        })
    ));
    let frame = encode(&message, &wide).unwrap();
    let found = decode_control(&frame.head[HEADER_BYTES..], 0, &Limits::default()).unwrap_err();
    assert!(
        matches!(
            found,
            CodecError::TooMany {
                what: "levels of nesting",
                ..
            }
        ),
        "{found}"
    );
}

#[test]
fn a_tensor_whose_bytes_do_not_fit_is_refused() {
    let limits = Limits::default();
    for wrong in [
        tensor("float32", &[2, 3], &[3, 1], 20),
        tensor("float32", &[2, 3], &[30, 1], 24),
        tensor("float32", &[2, 3], &[1], 24),
        tensor("qint8", &[4], &[1], 4),
        tensor("int8", &[u64::MAX, 3], &[1, 1], 4),
    ] {
        let found = encode(&object(Value::Tensor(0), vec![wrong]), &limits).unwrap_err();
        assert!(matches!(found, CodecError::TensorSize { .. }), "{found}");
    }
    for right in [
        tensor("float32", &[2, 3], &[1, 2], 24),
        tensor("bool", &[], &[], 1),
        tensor("float64", &[0, 7], &[7, 1], 0),
        tensor("complex128", &[1], &[99], 16),
    ] {
        encode(&object(Value::Tensor(0), vec![right]), &limits).unwrap();
    }
}

#[test]
fn a_tree_that_names_a_missing_tensor_is_refused() {
    let found = encode(
        &object(Value::Tensor(1), vec![tensor("int8", &[1], &[1], 1)]),
        &Limits::default(),
    );
    assert_eq!(
        found.unwrap_err(),
        CodecError::TensorIndex {
            index: 1,
            tensors: 1
        }
    );
}

/// A response with this kind of answer and one tensor.
fn response(kind: AnswerKind) -> Message {
    Message::Response(Box::new(Response {
        id: RequestId(1),
        step: StepEpoch(1),
        responder: Rank(1),
        outcome: ResponseOutcome::Value(Answer {
            kind,
            body: Body {
                value: Value::None,
                tensors: vec![tensor("int8", &[1], &[1], 1)],
            },
        }),
    }))
}

/// A forward request with one tensor.
fn request(call: ForwardCall) -> Message {
    Message::Request(Box::new(Request {
        id: RequestId(1),
        step: StepEpoch(1),
        model: ModelId(0),
        work: call.into(),
        microbatch: MicrobatchId(0),
        requester: Rank(0),
        place: Place {
            parent: None,
            call: CallId(0),
        },
        path: CallPath::default(),
        hold: false,
        released: vec![],
        body: Body {
            value: Value::None,
            tensors: vec![tensor("int8", &[1], &[1], 1)],
        },
    }))
}

#[test]
fn notes_and_gradients_that_name_a_missing_tensor_are_refused_at_both_ends() {
    let results = |notes| response(AnswerKind::Result(Arc::new(notes)));
    let arguments = |notes| {
        request(ForwardCall {
            notes,
            ..ForwardCall::new(ModuleId(0))
        })
    };
    let laid = |index| {
        results(ResultNotes {
            strides: vec![(index, vec![1])],
            ..ResultNotes::default()
        })
    };
    let sparse = |values| {
        results(ResultNotes {
            composites: vec![(
                0,
                Composite::Sparse {
                    indices: 0,
                    values,
                    shape: vec![1],
                    coalesced: true,
                },
            )],
            ..ResultNotes::default()
        })
    };
    let shared = |index| {
        arguments(ArgumentNotes {
            shared: vec![vec![0, index]],
            ..ArgumentNotes::default()
        })
    };
    let kept = |index| {
        arguments(ArgumentNotes {
            kept: vec![index],
            ..ArgumentNotes::default()
        })
    };
    let gradients = |index| response(AnswerKind::Gradients(vec![(7, index)]));
    let limits = Limits::default();
    let missing = CodecError::TensorIndex {
        index: 1,
        tensors: 1,
    };
    let makers: [&dyn Fn(u32) -> Message; 5] = [&laid, &sparse, &shared, &kept, &gradients];
    for make in makers {
        assert_eq!(encode(&make(1), &limits), Err(missing.clone()));
        // The same message, but for the one index that is now too large.
        let frame = encode(&make(0), &limits).unwrap();
        let control = &frame.head[HEADER_BYTES..];
        let refused = (0..control.len()).any(|place| {
            let mut damaged = control.to_vec();
            damaged[place] = damaged[place].wrapping_add(1);
            decode_control(&damaged, 1, &limits) == Err(missing.clone())
        });
        assert!(refused);
    }
}

#[test]
fn a_setting_takes_values_of_its_kind_only() {
    let with = |setting, value| {
        let context = TorchContext {
            settings: vec![(setting, value)],
            ..TorchContext::default()
        };
        let call = ForwardCall {
            context,
            ..ForwardCall::new(ModuleId(0))
        };
        encode(&request(call), &Limits::default()).map(drop)
    };
    let name = SettingValue::Name("float64".to_owned());
    let flag = SettingValue::Flag(true);
    for setting in TorchSetting::ALL {
        let (right, wrong) = if setting.is_name() {
            (&name, &flag)
        } else {
            (&flag, &name)
        };
        assert_eq!(with(*setting, right.clone()), Ok(()));
        assert!(matches!(
            with(*setting, wrong.clone()),
            Err(CodecError::Setting { .. })
        ));
    }
}
