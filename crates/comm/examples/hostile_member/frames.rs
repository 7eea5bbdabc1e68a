//! Frames with which a member may do harm.

use std::fmt::Write as _;

use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::codec::{encode, encode_placed};
use shardwright_wire::{
    Abort, Body, Buffer, Delivery, ErrorReport, Fetch, ForwardCall, ForwardOver, Frame, HeldTensor,
    Limits, Message, ObjectMessage, Place, Request, Response, ResponseOutcome, SharedMemory,
    SharedPlace, StepBegin, StepEnd, TaskEvent, TaskOrder, TensorMeta, TensorPart, Value,
};

/// A tensor of so many bytes in an object, which lies at a place in shared memory where one is given.
pub(crate) fn object(bytes: u64, place: Option<SharedPlace>) -> Frame {
    let meta = TensorMeta {
        dtype: "uint8".to_owned(),
        shape: vec![bytes],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: false,
    };
    let data = Buffer::copy_of(&vec![0x5a; bytes as usize]);
    let body = Body {
        value: Value::Tensor(0),
        tensors: vec![TensorPart::new(meta, data)],
    };
    let channel = "hostile".to_owned();
    let message = Message::Object(Box::new(ObjectMessage { channel, body }));
    encode_placed(&message, &Limits::default(), &mut |_| place).expect("a small message")
}

/// Places that are none, in either memory.
pub(crate) fn places() -> Vec<(&'static str, SharedPlace)> {
    let (host, device) = (SharedMemory::Host, SharedMemory::Device);
    let place = |memory, slot, offset| SharedPlace {
        memory,
        slot,
        offset,
    };
    vec![
        ("a place in the buffer's head", place(host, 0, 0)),
        ("a place that is not lent", place(host, 9, 256 << 10)),
        (
            "a place that is not aligned",
            place(host, 9, (256 << 10) + 1),
        ),
        ("a place beyond the end", place(host, 9, 1 << 40)),
        ("a place that wraps around", place(host, 9, u64::MAX - 63)),
        ("a slot beyond the last", place(host, u32::MAX, 256 << 10)),
        ("a place in device memory", place(device, 9, 0)),
        ("a place beyond device memory", place(device, 9, u64::MAX)),
    ]
}

fn whole(frame: &Frame) -> Vec<u8> {
    let tensors = frame.tensors.iter().map(Buffer::as_bytes);
    std::iter::once(&frame.head[..])
        .chain(tensors)
        .collect::<Vec<_>>()
        .concat()
}

fn plain(message: &Message) -> Vec<u8> {
    whole(&encode(message, &Limits::default()).expect("a small message"))
}

const FAR: Rank = Rank(u32::MAX);
const REQUEST: RequestId = RequestId(u64::MAX);

fn body() -> Body {
    Body {
        value: Value::None,
        tensors: Vec::new(),
    }
}

fn report() -> ErrorReport {
    ErrorReport {
        rank: FAR,
        host: "nowhere".to_owned(),
        module: None,
        microbatch: None,
        phase: None,
        kind: "Hostile".to_owned(),
        message: "an error that nobody made".to_owned(),
        traceback: String::new(),
    }
}

/// Answers that name what nobody knows.
fn answers(step: StepEpoch) -> Vec<(&'static str, Message)> {
    let held = HeldTensor {
        holder: FAR,
        requester: FAR,
        request: REQUEST,
        index: u32::MAX,
    };
    vec![
        (
            "a response to nothing",
            Message::Response(Box::new(Response {
                id: REQUEST,
                step,
                responder: FAR,
                outcome: ResponseOutcome::Value(body().into()),
            })),
        ),
        (
            "a failure of nothing",
            Message::Response(Box::new(Response {
                id: REQUEST,
                step,
                responder: FAR,
                outcome: ResponseOutcome::Failed(report()),
            })),
        ),
        (
            "a fetch of what nobody holds",
            Message::Fetch(Fetch {
                step,
                tensor: held,
                to: FAR,
                requester: FAR,
                request: REQUEST,
                index: u32::MAX,
            }),
        ),
        (
            "a delivery of what nobody wants",
            Message::Delivery(Box::new(Delivery {
                step,
                requester: FAR,
                request: REQUEST,
                index: u32::MAX,
                body: body(),
            })),
        ),
    ]
}

/// The same of a step and its tasks.
fn orders(step: StepEpoch) -> Vec<(&'static str, Message)> {
    vec![
        (
            "a beginning",
            Message::StepBegin(StepBegin {
                step,
                function: "nothing".to_owned(),
                num_microbatches: u32::MAX,
                one_at_a_time: true,
            }),
        ),
        (
            "an end",
            Message::StepEnd(Box::new(StepEnd { step, body: body() })),
        ),
        (
            "an abort",
            Message::Abort(Box::new(Abort {
                step,
                error: report(),
            })),
        ),
        (
            "an order of tasks",
            Message::TaskOrder(Box::new(TaskOrder {
                step,
                number: u64::MAX,
                events: vec![TaskEvent::Enters("nothing".to_owned()); 1000],
            })),
        ),
        (
            "forwards that are over",
            Message::ForwardOver(ForwardOver {
                step,
                microbatch: MicrobatchId(u32::MAX),
            }),
        ),
        (
            "a request of a module that is none",
            Message::Request(Box::new(Request {
                id: REQUEST,
                step,
                model: ModelId(u32::MAX),
                work: ForwardCall::new(ModuleId(u32::MAX)).into(),
                microbatch: MicrobatchId(u32::MAX),
                requester: FAR,
                place: Place {
                    parent: Some(REQUEST),
                    call: CallId(u32::MAX),
                },
                path: CallPath::default(),
                hold: true,
                released: vec![REQUEST; 100],
                body: body(),
            })),
        ),
    ]
}

/// Both, of a step that nobody is in and of the first one.
fn unknown_ids() -> Vec<(String, Message)> {
    let steps = [
        ("of a step to come", StepEpoch(u64::MAX)),
        ("of the first step", StepEpoch(1)),
    ];
    let mut messages = Vec::new();
    for (when, step) in steps {
        let named = answers(step).into_iter().chain(orders(step));
        messages.extend(named.map(|(what, message)| (format!("{what} {when}"), message)));
    }
    messages
}

/// Prints what a member may put on a connection of TCP: a name, and the bytes in hexadecimal digits.
pub(crate) fn print_frames() -> std::fmt::Result {
    let good = whole(&object(8192, None));
    let damaged = |at: usize, bytes: &[u8]| {
        let mut copy = good.clone();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        copy
    };
    let mut frames: Vec<(String, Vec<u8>)> = vec![
        ("garbage".to_owned(), vec![0xa5; 500]),
        ("another version".to_owned(), damaged(4, &[0xff, 0xff])),
        ("another kind of frame".to_owned(), damaged(6, &[9, 0])),
        (
            "a control part without end".to_owned(),
            damaged(8, &u64::MAX.to_le_bytes()),
        ),
        (
            "a control part that never comes".to_owned(),
            damaged(8, &(200_u64 << 20).to_le_bytes()),
        ),
        (
            "tensors without end".to_owned(),
            damaged(16, &u64::MAX.to_le_bytes()),
        ),
        (
            "other bytes of tensors".to_owned(),
            damaged(16, &7_u64.to_le_bytes()),
        ),
        ("a message of no kind".to_owned(), damaged(24, &[250])),
    ];
    for at in (25..good.len().min(120)).step_by(9) {
        frames.push((
            format!("byte {at} changed"),
            damaged(at, &[0xff, 0xff, 0xff]),
        ));
    }
    for (name, place) in places() {
        frames.push((name.to_owned(), whole(&object(8192, Some(place)))));
    }
    for (name, message) in unknown_ids() {
        frames.push((name, plain(&message)));
    }
    for (name, bytes) in frames {
        let mut digits = String::new();
        for byte in bytes {
            write!(digits, "{byte:02x}")?;
        }
        println!("{name}\t{digits}");
    }
    Ok(())
}
