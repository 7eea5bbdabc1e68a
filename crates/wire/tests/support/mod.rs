//! Arbitrary messages.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::{
    Abort, Answer, Asked, Body, Buffer, Delivery, ErrorReport, Fetch, ForwardOver, HeldTensor,
    Message, NoMemory, ObjectMessage, Phase, Place, Request, Response, ResponseOutcome, StepBegin,
    StepEnd, TaskEvent, TaskName, TaskOrder, TaskSource, TensorMeta, TensorPart, Value,
};

mod calls;

use calls::{answer_kinds, works};

fn values(tensors: u32) -> BoxedStrategy<Value> {
    let leaves = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        "-?[1-9a-f][0-9a-f]{20,40}".prop_map(Value::BigInt),
        any::<u64>().prop_map(|bits| Value::Float(f64::from_bits(bits))),
        any::<(f64, f64)>().prop_map(|(real, imaginary)| Value::Complex(real, imaginary)),
        ".{0,12}".prop_map(Value::Str),
        vec(any::<u8>(), 0..12).prop_map(Value::Bytes),
        Just(Value::Ellipsis),
        "[a-z0-9]{1,9}".prop_map(Value::Dtype),
        "[a-z0-9:]{1,9}".prop_map(Value::Device),
        vec(any::<i64>(), 0..5).prop_map(Value::Size),
        "[a-z_]{1,9}".prop_map(Value::TorchConstant),
        (0..tensors.max(1)).prop_map(move |index| if tensors == 0 {
            Value::None
        } else {
            Value::Tensor(index)
        }),
    ];
    leaves
        .prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..4).prop_map(Value::List),
                vec(inner.clone(), 0..4).prop_map(Value::Tuple),
                (vec(inner.clone(), 0..4), any::<bool>())
                    .prop_map(|(items, frozen)| Value::Set(items, frozen)),
                vec((inner.clone(), inner.clone()), 0..4).prop_map(Value::Dict),
                (inner.clone(), inner.clone(), inner.clone())
                    .prop_map(|(a, b, c)| Value::Slice(Box::new([a, b, c]))),
                (".{0,12}", inner)
                    .prop_map(|(name, fields)| Value::Registered(name, Box::new(fields))),
            ]
        })
        .boxed()
}

fn tensors() -> impl Strategy<Value = TensorPart> {
    let dtypes = prop_oneof![
        Just(("bool", 1)),
        Just(("bfloat16", 2)),
        Just(("float32", 4)),
        Just(("complex128", 16))
    ];
    let whole = (dtypes, vec(0_u64..4, 0..4), any::<bool>(), any::<u8>()).prop_map(
        |((dtype, size), shape, grad, byte)| {
            let strides: Vec<u64> = (0..shape.len())
                .map(|axis| shape[axis + 1..].iter().product())
                .collect();
            let bytes = shape.iter().product::<u64>() * size;
            let data = Buffer::filled_by(usize::try_from(bytes).unwrap(), |into| {
                into.fill(byte);
                Ok::<_, NoMemory>(())
            });
            let meta = TensorMeta {
                dtype: dtype.to_owned(),
                shape,
                strides,
                device: "cpu".to_owned(),
                requires_grad: grad,
            };
            TensorPart::new(meta, data.unwrap())
        },
    );
    (whole, option::of(helds()), any::<bool>()).prop_map(|(mut part, held, here)| {
        part.held = held;
        if held.is_some() && !here {
            part.data = Buffer::default();
        }
        part
    })
}

fn helds() -> impl Strategy<Value = HeldTensor> {
    any::<(u32, u32, u64, u32)>().prop_map(|(holder, requester, request, index)| HeldTensor {
        holder: Rank(holder),
        requester: Rank(requester),
        request: RequestId(request),
        index,
    })
}

fn bodies() -> impl Strategy<Value = Body> {
    vec(tensors(), 0..4).prop_flat_map(|tensors| {
        let count = u32::try_from(tensors.len()).unwrap();
        values(count).prop_map(move |value| Body {
            value,
            tensors: tensors.clone(),
        })
    })
}

fn reports() -> impl Strategy<Value = ErrorReport> {
    let phase = option::of(phases());
    (
        any::<u32>(),
        ".{0,9}",
        option::of(".{0,9}"),
        option::of(any::<u32>()),
        phase,
        ".{0,9}",
        ".{0,9}",
        ".{0,9}",
    )
        .prop_map(
            |(rank, host, module, microbatch, phase, kind, message, traceback)| ErrorReport {
                rank: Rank(rank),
                host,
                module,
                microbatch: microbatch.map(MicrobatchId),
                phase,
                kind,
                message,
                traceback,
            },
        )
}

fn tensors_of(body: &Body) -> u32 {
    u32::try_from(body.tensors.len()).unwrap()
}

fn answers() -> impl Strategy<Value = Answer> {
    bodies().prop_flat_map(|body| {
        let kinds = answer_kinds(tensors_of(&body));
        (kinds, Just(body)).prop_map(|(kind, body)| Answer { kind, body })
    })
}

fn requests() -> impl Strategy<Value = Request> {
    let ids = any::<(u64, u64, u32, u32, u32, u32)>();
    let held = (any::<bool>(), vec(any::<u64>(), 0..3));
    let path = vec(any::<u32>(), 0..4);
    let bodies = bodies().prop_flat_map(|body| {
        let works = works(tensors_of(&body));
        (works, Just(body))
    });
    (ids, option::of(any::<u64>()), held, path, bodies).prop_map(
        |(
            (id, step, model, microbatch, requester, call),
            parent,
            (hold, released),
            path,
            about,
        )| {
            let (work, body) = about;
            Request {
                id: RequestId(id),
                step: StepEpoch(step),
                model: ModelId(model),
                work,
                microbatch: MicrobatchId(microbatch),
                requester: Rank(requester),
                place: Place {
                    parent: parent.map(RequestId),
                    call: CallId(call),
                },
                path: CallPath(path),
                hold,
                released: released.into_iter().map(RequestId).collect(),
                body,
            }
        },
    )
}

/// Any message.
pub(crate) fn messages() -> impl Strategy<Value = Message> {
    let outcomes = prop_oneof![
        answers().prop_map(ResponseOutcome::Value),
        reports().prop_map(ResponseOutcome::Failed)
    ];
    prop_oneof![
        requests().prop_map(|request| Message::Request(Box::new(request))),
        (any::<(u64, u64, u32)>(), outcomes).prop_map(|((id, step, responder), outcome)| {
            Message::Response(Box::new(Response {
                id: RequestId(id),
                step: StepEpoch(step),
                responder: Rank(responder),
                outcome,
            }))
        }),
        (any::<(u64, u32, bool)>(), ".{0,9}").prop_map(
            |((step, num_microbatches, one_at_a_time), function)| {
                Message::StepBegin(StepBegin {
                    step: StepEpoch(step),
                    function,
                    num_microbatches,
                    one_at_a_time,
                })
            }
        ),
        any::<(u64, u32)>().prop_map(|(step, microbatch)| Message::ForwardOver(ForwardOver {
            step: StepEpoch(step),
            microbatch: MicrobatchId(microbatch),
        })),
        (any::<u64>(), bodies()).prop_map(|(step, body)| Message::StepEnd(Box::new(StepEnd {
            step: StepEpoch(step),
            body
        }))),
        (any::<u64>(), reports()).prop_map(|(step, error)| Message::Abort(Box::new(Abort {
            step: StepEpoch(step),
            error
        }))),
        (".{0,9}", bodies())
            .prop_map(|(channel, body)| Message::Object(Box::new(ObjectMessage { channel, body }))),
        option::of(reports()).prop_map(|report| Message::ShutdownNotice(report.map(Box::new))),
        (any::<(u64, u32, u32, u64, u32)>(), helds()).prop_map(
            |((step, to, requester, request, index), tensor)| Message::Fetch(Fetch {
                step: StepEpoch(step),
                tensor,
                to: Rank(to),
                requester: Rank(requester),
                request: RequestId(request),
                index,
            })
        ),
        (any::<(u64, u32, u64, u32)>(), bodies()).prop_map(
            |((step, requester, request, index), body)| {
                Message::Delivery(Box::new(Delivery {
                    step: StepEpoch(step),
                    requester: Rank(requester),
                    request: RequestId(request),
                    index,
                    body,
                }))
            }
        ),
        (any::<(u64, u64)>(), vec(task_events(), 0..4)).prop_map(|((step, number), events)| {
            Message::TaskOrder(Box::new(TaskOrder {
                step: StepEpoch(step),
                number,
                events,
            }))
        }),
    ]
}

fn phases() -> impl Strategy<Value = Phase> {
    prop_oneof![Just(Phase::Forward), Just(Phase::Backward)]
}

fn task_events() -> impl Strategy<Value = TaskEvent> {
    let asked = (
        any::<(u32, u32, u32)>(),
        option::of(phases()),
        option::of(any::<u32>()),
        any::<bool>(),
    );
    prop_oneof![
        task_names().prop_map(TaskEvent::Turn),
        task_names().prop_map(TaskEvent::Ends),
        task_names().prop_map(TaskEvent::Defers),
        ".{0,9}".prop_map(TaskEvent::Enters),
        asked.prop_map(
            |((place, microbatch, model), phase, module, is_predicted)| TaskEvent::Asks(Asked {
                place,
                phase,
                microbatch: MicrobatchId(microbatch),
                module: (ModelId(model), module.map(ModuleId)),
                is_predicted,
            })
        ),
    ]
}

fn task_names() -> impl Strategy<Value = TaskName> {
    let sources = prop_oneof![
        Just(TaskSource::Root),
        any::<(u32, u64)>().prop_map(|(place, id)| TaskSource::Request {
            place,
            id: RequestId(id)
        }),
        any::<u64>().prop_map(|token| TaskSource::WeightGradient { token }),
    ];
    let modules = option::of(any::<(u32, u32)>());
    (sources, phases(), any::<u32>(), modules).prop_map(|(source, phase, microbatch, module)| {
        TaskName {
            source,
            phase,
            microbatch: MicrobatchId(microbatch),
            module: module.map(|(model, module)| (ModelId(model), ModuleId(module))),
        }
    })
}
