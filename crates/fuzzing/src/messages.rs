//! Messages out of a fuzzer's bytes.

use arbitrary::{Result, Unstructured};
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::{
    Abort, Answer, Asked, Body, Buffer, Delivery, ErrorReport, Fetch, ForwardOver, HeldTensor,
    Message, ObjectMessage, Phase, Place, Request, Response, ResponseOutcome, StepBegin, StepEnd,
    TaskEvent, TaskName, TaskOrder, TaskSource, TensorMeta, TensorPart, Value,
};

use crate::calls::{answer_kind, work};

const DTYPES: [(&str, u64); 5] = [
    ("bool", 1),
    ("bfloat16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex128", 16),
];
const MOST_TENSORS: usize = 3;
const MOST_ITEMS: usize = 4;
const MOST_DEPTH: usize = 5;

/// Any message; the input's bytes are the choices.
pub fn message(choices: &mut Unstructured<'_>) -> Result<Message> {
    Ok(match choices.int_in_range(0..=10)? {
        0 => Message::Request(Box::new(request(choices)?)),
        1 => Message::Response(Box::new(Response {
            id: RequestId(choices.arbitrary()?),
            step: StepEpoch(choices.arbitrary()?),
            responder: Rank(choices.arbitrary()?),
            outcome: if choices.arbitrary()? {
                ResponseOutcome::Value(answer(choices)?)
            } else {
                ResponseOutcome::Failed(report(choices)?)
            },
        })),
        2 => Message::StepBegin(StepBegin {
            step: StepEpoch(choices.arbitrary()?),
            function: choices.arbitrary()?,
            num_microbatches: choices.arbitrary()?,
            one_at_a_time: choices.arbitrary()?,
        }),
        3 => Message::StepEnd(Box::new(StepEnd {
            step: StepEpoch(choices.arbitrary()?),
            body: body(choices)?,
        })),
        4 => Message::Abort(Box::new(Abort {
            step: StepEpoch(choices.arbitrary()?),
            error: report(choices)?,
        })),
        5 => Message::Object(Box::new(ObjectMessage {
            channel: choices.arbitrary()?,
            body: body(choices)?,
        })),
        6 => Message::Fetch(Fetch {
            step: StepEpoch(choices.arbitrary()?),
            tensor: held(choices)?,
            to: Rank(choices.arbitrary()?),
            requester: Rank(choices.arbitrary()?),
            request: RequestId(choices.arbitrary()?),
            index: choices.arbitrary()?,
        }),
        7 => Message::Delivery(Box::new(Delivery {
            step: StepEpoch(choices.arbitrary()?),
            requester: Rank(choices.arbitrary()?),
            request: RequestId(choices.arbitrary()?),
            index: choices.arbitrary()?,
            body: body(choices)?,
        })),
        8 => Message::TaskOrder(Box::new(TaskOrder {
            step: StepEpoch(choices.arbitrary()?),
            number: choices.arbitrary()?,
            events: few(choices, task_event)?,
        })),
        9 => Message::ForwardOver(ForwardOver {
            step: StepEpoch(choices.arbitrary()?),
            microbatch: MicrobatchId(choices.arbitrary()?),
        }),
        _ => Message::ShutdownNotice(if choices.arbitrary()? {
            Some(Box::new(report(choices)?))
        } else {
            None
        }),
    })
}

/// A value that names no tensor.
pub(crate) fn plain_value(choices: &mut Unstructured<'_>) -> Result<Value> {
    value(choices, 0, 0)
}

fn request(choices: &mut Unstructured<'_>) -> Result<Request> {
    let body = body(choices)?;
    Ok(Request {
        id: RequestId(choices.arbitrary()?),
        step: StepEpoch(choices.arbitrary()?),
        model: ModelId(choices.arbitrary()?),
        work: work(choices, body.tensors.len() as u32)?,
        microbatch: MicrobatchId(choices.arbitrary()?),
        requester: Rank(choices.arbitrary()?),
        place: Place {
            parent: choices.arbitrary::<Option<u64>>()?.map(RequestId),
            call: CallId(choices.arbitrary()?),
        },
        path: CallPath(choices.arbitrary()?),
        hold: choices.arbitrary()?,
        released: few(choices, |choices| choices.arbitrary().map(RequestId))?,
        body,
    })
}

fn answer(choices: &mut Unstructured<'_>) -> Result<Answer> {
    let body = body(choices)?;
    Ok(Answer {
        kind: answer_kind(choices, body.tensors.len() as u32)?,
        body,
    })
}

fn task_event(choices: &mut Unstructured<'_>) -> Result<TaskEvent> {
    Ok(match choices.int_in_range(0..=4)? {
        0 => TaskEvent::Turn(task_name(choices)?),
        2 => TaskEvent::Enters(choices.arbitrary()?),
        1 => TaskEvent::Asks(Asked {
            place: choices.arbitrary()?,
            phase: if choices.arbitrary()? {
                Some(phase(choices)?)
            } else {
                None
            },
            microbatch: MicrobatchId(choices.arbitrary()?),
            module: (
                ModelId(choices.arbitrary()?),
                choices.arbitrary::<Option<u32>>()?.map(ModuleId),
            ),
            is_predicted: choices.arbitrary()?,
        }),
        3 => TaskEvent::Defers(task_name(choices)?),
        _ => TaskEvent::Ends(task_name(choices)?),
    })
}

fn task_name(choices: &mut Unstructured<'_>) -> Result<TaskName> {
    Ok(TaskName {
        source: match choices.int_in_range(0..=2)? {
            0 => TaskSource::Root,
            1 => TaskSource::Request {
                place: choices.arbitrary()?,
                id: RequestId(choices.arbitrary()?),
            },
            _ => TaskSource::WeightGradient {
                token: choices.arbitrary()?,
            },
        },
        phase: phase(choices)?,
        microbatch: MicrobatchId(choices.arbitrary()?),
        module: choices
            .arbitrary::<Option<(u32, u32)>>()?
            .map(|(model, module)| (ModelId(model), ModuleId(module))),
    })
}

fn phase(choices: &mut Unstructured<'_>) -> Result<Phase> {
    Ok(if choices.arbitrary()? {
        Phase::Backward
    } else {
        Phase::Forward
    })
}

fn held(choices: &mut Unstructured<'_>) -> Result<HeldTensor> {
    Ok(HeldTensor {
        holder: Rank(choices.arbitrary()?),
        requester: Rank(choices.arbitrary()?),
        request: RequestId(choices.arbitrary()?),
        index: choices.arbitrary()?,
    })
}

fn report(choices: &mut Unstructured<'_>) -> Result<ErrorReport> {
    Ok(ErrorReport {
        rank: Rank(choices.arbitrary()?),
        host: choices.arbitrary()?,
        module: choices.arbitrary()?,
        microbatch: choices.arbitrary::<Option<u32>>()?.map(MicrobatchId),
        phase: choices.arbitrary::<Option<bool>>()?.map(|backward| {
            if backward {
                Phase::Backward
            } else {
                Phase::Forward
            }
        }),
        kind: choices.arbitrary()?,
        message: choices.arbitrary()?,
        traceback: choices.arbitrary()?,
    })
}

fn body(choices: &mut Unstructured<'_>) -> Result<Body> {
    let count = choices.int_in_range(0..=MOST_TENSORS)?;
    let tensors = (0..count)
        .map(|_| tensor(choices))
        .collect::<Result<Vec<_>>>()?;
    Ok(Body {
        value: value(choices, count as u32, 0)?,
        tensors,
    })
}

fn tensor(choices: &mut Unstructured<'_>) -> Result<TensorPart> {
    let (dtype, element) = *choices.choose(&DTYPES)?;
    let dimensions = choices.int_in_range(0..=3)?;
    let shape = (0..dimensions)
        .map(|_| choices.int_in_range(0..=5_u64))
        .collect::<Result<Vec<_>>>()?;
    let contiguous = |axis: usize| shape[axis + 1..].iter().product();
    let strides = (0..dimensions).map(contiguous).collect();
    let bytes = shape.iter().product::<u64>() * element;
    let fill = choices.arbitrary()?;
    let meta = TensorMeta {
        dtype: dtype.to_owned(),
        strides,
        shape,
        device: choices.arbitrary()?,
        requires_grad: choices.arbitrary()?,
    };
    let absent = choices.arbitrary()?;
    let data = vec![fill; if absent { 0 } else { bytes as usize }];
    Ok(TensorPart {
        meta,
        data: Buffer::copy_of(&data),
        held: if absent { Some(held(choices)?) } else { None },
    })
}

pub(crate) fn value(choices: &mut Unstructured<'_>, tensors: u32, depth: usize) -> Result<Value> {
    let kinds = if depth < MOST_DEPTH { 21 } else { 14 };
    let inner = |choices: &mut Unstructured<'_>| value(choices, tensors, depth + 1);
    Ok(match choices.int_in_range(0..=kinds)? {
        1 => Value::Bool(choices.arbitrary()?),
        2 | 3 => Value::Int(choices.arbitrary()?),
        4 => Value::BigInt(choices.arbitrary()?),
        5 => Value::Float(f64::from_bits(choices.arbitrary()?)),
        6 => Value::Complex(choices.arbitrary()?, choices.arbitrary()?),
        7 => Value::Str(choices.arbitrary()?),
        8 => Value::Bytes(choices.arbitrary()?),
        9 => Value::Ellipsis,
        10 => Value::Dtype(choices.arbitrary()?),
        11 => Value::Device(choices.arbitrary()?),
        12 => Value::Size(few(choices, Unstructured::arbitrary)?),
        13 => Value::TorchConstant(choices.arbitrary()?),
        14 if tensors > 0 => Value::Tensor(choices.int_in_range(0..=tensors - 1)?),
        0 | 14 => Value::None,
        15 => Value::List(few(choices, inner)?),
        16 => Value::Tuple(few(choices, inner)?),
        17 | 18 => Value::Set(few(choices, inner)?, choices.arbitrary()?),
        19 => Value::Dict(few(choices, |choices| {
            Ok((inner(choices)?, inner(choices)?))
        })?),
        20 => Value::Slice(Box::new([
            inner(choices)?,
            inner(choices)?,
            inner(choices)?,
        ])),
        _ => Value::Registered(choices.arbitrary()?, Box::new(inner(choices)?)),
    })
}

pub(crate) fn few<'a, T>(
    choices: &mut Unstructured<'a>,
    mut each: impl FnMut(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Vec<T>> {
    let count = choices.int_in_range(0..=MOST_ITEMS)?;
    (0..count).map(|_| each(choices)).collect()
}
