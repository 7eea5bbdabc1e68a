//! Writes the first inputs of every target into the folder of kept inputs: golden messages, values, handshakes, tables.
#![expect(clippy::unwrap_used, reason = "a tool may panic")]

mod calls;
mod manifests;

use std::fs;
use std::path::{Path, PathBuf};

use shardwright_comm::tcp::fuzzing;
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::codec::{encode, heartbeat_frame};
use shardwright_wire::{
    Abort, Answer, Asked, Body, Buffer, Delivery, ErrorReport, Fetch, ForwardOver, HEADER_BYTES,
    Heartbeat, HeldTensor, Limits, Message, ObjectMessage, Phase, Place, Request, Response,
    ResponseOutcome, StepBegin, StepEnd, TaskEvent, TaskName, TaskOrder, TaskSource, TensorMeta,
    TensorPart, Value,
};

use calls::{answer_kinds, works};

fn text(text: &str) -> Value {
    Value::Str(text.to_owned())
}

fn tensor(dtype: &str, shape: &[u64], strides: &[u64], bytes: usize) -> TensorPart {
    let meta = TensorMeta {
        dtype: dtype.to_owned(),
        shape: shape.to_vec(),
        strides: strides.to_vec(),
        device: "cpu".to_owned(),
        requires_grad: true,
    };
    let data = Buffer::copy_of(&vec![0x3f; bytes]);
    TensorPart::new(meta, data)
}

const HELD: HeldTensor = HeldTensor {
    holder: Rank(1),
    requester: Rank(0),
    request: RequestId(12),
    index: 1,
};

fn body() -> Body {
    Body {
        value: Value::Tuple(vec![
            Value::Tensor(0),
            Value::Dict(vec![(text("mask"), Value::Tensor(1))]),
        ]),
        tensors: vec![
            tensor("float32", &[2, 3], &[1, 2], 24),
            tensor("bool", &[4], &[1], 4),
            TensorPart {
                held: Some(HELD),
                ..tensor("float32", &[2], &[1], 0)
            },
        ],
    }
}

fn values() -> Vec<Value> {
    let all = vec![
        Value::None,
        Value::Bool(true),
        Value::Bool(false),
        Value::Int(-3),
        Value::BigInt("-1f00000000000000000000".to_owned()),
        Value::Float(f64::NAN),
        Value::Complex(1.0, -2.0),
        text("text"),
        Value::Bytes(vec![0, 1, 255]),
        Value::Ellipsis,
        Value::Dtype("bfloat16".to_owned()),
        Value::Device("cuda:1".to_owned()),
        Value::Size(vec![2, 3]),
        Value::TorchConstant("channels_last".to_owned()),
        Value::Slice(Box::new([Value::None, Value::Int(4), Value::None])),
        Value::Set(vec![Value::Int(1)], false),
        Value::Set(vec![Value::Int(2)], true),
        Value::Registered("a.Type".to_owned(), Box::new(Value::Tuple(Vec::new()))),
    ];
    let deep = (0..40).fold(Value::None, |inner, _| Value::List(vec![inner]));
    let entries = all.iter().map(|value| (text("key"), value.clone()));
    vec![
        Value::Dict(entries.collect()),
        Value::List(all),
        Value::List(vec![Value::None; 600]),
        deep,
    ]
}

fn task_order(step: StepEpoch) -> Message {
    let task = TaskName {
        source: TaskSource::Request {
            place: 0,
            id: RequestId(12),
        },
        phase: Phase::Forward,
        microbatch: MicrobatchId(3),
        module: Some((ModelId(0), ModuleId(7))),
    };
    let asked = Asked {
        place: 1,
        phase: Some(Phase::Forward),
        microbatch: MicrobatchId(3),
        module: (ModelId(0), Some(ModuleId(7))),
        is_predicted: true,
    };
    Message::TaskOrder(Box::new(TaskOrder {
        step,
        number: 0,
        events: vec![
            TaskEvent::Turn(task),
            TaskEvent::Asks(asked),
            TaskEvent::Enters("DistributedLinear".to_owned()),
            TaskEvent::Defers(task),
            TaskEvent::Ends(task),
        ],
    }))
}

fn forward_over(step: StepEpoch) -> Message {
    Message::ForwardOver(ForwardOver {
        step,
        microbatch: MicrobatchId(2),
    })
}

fn report() -> ErrorReport {
    ErrorReport {
        rank: Rank(3),
        host: "node-a".to_owned(),
        module: Some("layers.3".to_owned()),
        microbatch: Some(MicrobatchId(2)),
        phase: Some(Phase::Backward),
        kind: "ValueError".to_owned(),
        message: "no luck".to_owned(),
        traceback: "Traceback (most recent call last): ...".to_owned(),
    }
}

fn messages() -> Vec<Message> {
    let report = report();
    let requests = works().into_iter().map(|work| {
        Message::Request(Box::new(Request {
            id: RequestId(12),
            step: StepEpoch(5),
            model: ModelId(0),
            work,
            microbatch: MicrobatchId(1),
            requester: Rank(0),
            place: Place {
                parent: Some(RequestId(4)),
                call: CallId(2),
            },
            path: CallPath(vec![0, 3, 1]),
            hold: true,
            released: vec![RequestId(3)],
            body: body(),
        }))
    });
    let response = |outcome| {
        Message::Response(Box::new(Response {
            id: RequestId(12),
            step: StepEpoch(5),
            responder: Rank(1),
            outcome,
        }))
    };
    let step = StepEpoch(5);
    let mut all: Vec<Message> = requests.collect();
    all.extend([
        response(ResponseOutcome::Value(body().into())),
        response(ResponseOutcome::Failed(report.clone())),
        Message::StepBegin(StepBegin {
            step,
            function: "train".to_owned(),
            num_microbatches: 4,
            one_at_a_time: false,
        }),
        forward_over(step),
        Message::StepEnd(Box::new(StepEnd { step, body: body() })),
        Message::Abort(Box::new(Abort {
            step,
            error: report.clone(),
        })),
        Message::Object(Box::new(ObjectMessage {
            channel: "c".to_owned(),
            body: body(),
        })),
        Message::Fetch(Fetch {
            step,
            tensor: HELD,
            to: Rank(2),
            requester: Rank(0),
            request: RequestId(14),
            index: 0,
        }),
        Message::Delivery(Box::new(Delivery {
            step,
            requester: Rank(0),
            request: RequestId(14),
            index: 0,
            body: body(),
        })),
        task_order(step),
        Message::ShutdownNotice(None),
        Message::ShutdownNotice(Some(Box::new(report))),
    ]);
    all.extend(answer_kinds().map(|kind| {
        let body = body();
        response(ResponseOutcome::Value(Answer { kind, body }))
    }));
    all
}

/// The bytes of a value within an object without tensors.
fn value_bytes(value: Value) -> Vec<u8> {
    let object = |value| {
        let body = Body {
            value,
            tensors: Vec::new(),
        };
        let object = ObjectMessage {
            channel: "c".to_owned(),
            body,
        };
        let message = Message::Object(Box::new(object));
        encode(&message, &Limits::default()).unwrap().head
    };
    let before = object(Value::None).len() - 1;
    object(value).split_off(before)
}

fn row(rank: i64) -> Value {
    Value::Tuple(vec![
        Value::Int(rank),
        text("node-a"),
        Value::Int(4711),
        text("127.0.0.1"),
        Value::Int(45_000),
    ])
}

fn main() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let keep = |target: &str, name: String, bytes: &[u8]| {
        let folder: &Path = &root.join(target);
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(format!("golden-{name}")), bytes).unwrap();
    };
    let mut job = Vec::new();
    for (index, message) in messages().iter().enumerate() {
        let frame = encode(message, &Limits::default()).unwrap();
        keep("frame", format!("message-{index}"), &frame.head);
        job.extend(frame.head);
        for tensor in &frame.tensors {
            job.extend_from_slice(tensor.as_bytes());
        }
        let choices: Vec<u8> = (0..=255).map(|byte: u8| byte.wrapping_mul(31)).collect();
        keep("message", format!("choices-{index}"), &choices[index * 4..]);
        keep("parts", format!("choices-{index}"), &choices[index * 4..]);
        keep("records", format!("choices-{index}"), &choices[index * 4..]);
    }
    let heartbeat = heartbeat_frame(Heartbeat {
        step: 5,
        executing: true,
        sending: false,
        progress: 77,
    });
    keep("frame", "heartbeat".to_owned(), &heartbeat.head);
    assert!(heartbeat.head.len() > HEADER_BYTES);
    job.extend(heartbeat.head);
    keep("stream", "job".to_owned(), &job);
    for (index, value) in values().into_iter().enumerate() {
        keep("value", format!("tree-{index}"), &value_bytes(value));
    }
    for register in [true, false] {
        let (caller, answerer) = fuzzing::genuine(register);
        for (name, bit, bytes) in [("caller", 0, caller), ("answerer", 4, answerer)] {
            let mode = u8::from(register) | bit;
            keep(
                "handshake",
                format!("{name}-{register}"),
                &[&[mode], bytes.as_slice()].concat(),
            );
            keep(
                "handshake",
                format!("{name}-{register}-damaged"),
                &[mode | 8, 9, 1, 1],
            );
        }
    }
    let registration = Value::Tuple(vec![text("0.1.0"), text("seed=1"), row(1)]);
    let table = Value::List(vec![row(0), row(1)]);
    for (name, value) in [("registration", registration), ("table", table)] {
        let mut bytes = vec![2];
        bytes.extend(value_bytes(value));
        keep("table", name.to_owned(), &bytes);
        bytes.push(0);
        keep("table", format!("{name}-longer"), &bytes);
    }
    keep(
        "manifest",
        "parts".to_owned(),
        manifests::unsealed().as_bytes(),
    );
}
