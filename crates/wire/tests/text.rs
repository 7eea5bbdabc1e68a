//! The text form of requests and responses, field by field (the paper's appendix B).
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::{
    Answer, AnswerKind, ArgumentNotes, BackwardCall, BackwardLink, Base, Body, Buffer,
    Checkpointing, CloseCall, Collecting, Composite, ErrorReport, ForwardCall, ForwardLink,
    NoMemory, Phase, Place, Recipe, Request, Response, ResponseOutcome, ResultNotes,
    SequentialRange, SettingValue, TensorMeta, TensorPart, TorchContext, TorchSetting, Value, View,
    Work, text,
};

fn stub(shape: [u64; 2], requires_grad: bool) -> TensorPart {
    TensorPart::new(
        TensorMeta {
            dtype: "float32".to_owned(),
            shape: shape.to_vec(),
            strides: vec![shape[1], 1],
            device: "cpu".to_owned(),
            requires_grad,
        },
        Buffer::filled_by(
            (shape[0] * shape[1] * 4) as usize,
            |_| Ok::<_, NoMemory>(()),
        )
        .unwrap(),
    )
}

fn request(work: Work, body: Body) -> Request {
    Request {
        id: RequestId(17),
        step: StepEpoch(4),
        model: ModelId(0),
        work,
        microbatch: MicrobatchId(2),
        requester: Rank(0),
        place: Place {
            parent: Some(RequestId(9)),
            call: CallId(3),
        },
        path: CallPath(vec![0, 2, 3]),
        hold: false,
        released: vec![],
        body,
    }
}

fn arguments() -> Body {
    Body {
        value: Value::Tuple(vec![
            Value::Tuple(vec![Value::Tensor(0)]),
            Value::Dict(vec![
                (Value::Str("mask".to_owned()), Value::Tensor(1)),
                (Value::Str("cache".to_owned()), Value::None),
                (Value::Str("scale".to_owned()), Value::Float(0.5)),
            ]),
        ]),
        tensors: vec![stub([2, 8], true), stub([2, 2], false)],
    }
}

#[test]
fn a_forward_request_shows_every_field() {
    let call = ForwardCall {
        range: Some(SequentialRange { start: 2, end: 5 }),
        seed: 4711,
        context: TorchContext {
            autocast: vec![("cpu".to_owned(), "bfloat16".to_owned(), true)],
            checkpointing: Some(Checkpointing {
                isolated: true,
                preserves_rng_state: true,
                group: 2,
            }),
            ..TorchContext::default()
        },
        ..ForwardCall::new(ModuleId(12))
    };
    insta::assert_snapshot!(text::request(&request(call.into(), arguments())));
}

#[test]
fn a_forward_request_shows_what_is_out_of_the_ordinary() {
    let settings = vec![
        (
            TorchSetting::DefaultDtype,
            SettingValue::Name("float64".to_owned()),
        ),
        (TorchSetting::Deterministic, SettingValue::Flag(true)),
    ];
    let collector = vec![
        ("hidden_states".to_owned(), Collecting::Items(2)),
        ("key".to_owned(), Collecting::Other(Value::Int(3))),
    ];
    let call = ForwardCall {
        notes: ArgumentNotes {
            shared: vec![vec![0, 1]],
            strides: vec![(0, vec![16, 1])],
            overlapping: vec![1],
            relaid: vec![1],
            composites: vec![
                (
                    0,
                    Composite::Sparse {
                        indices: 0,
                        values: 1,
                        shape: vec![4, 4],
                        coalesced: true,
                    },
                ),
                (
                    1,
                    Composite::Nested {
                        values: 0,
                        offsets: 1,
                        ragged_dimension: 1,
                    },
                ),
            ],
            hooked_views: vec![0],
            private: true,
            kept: vec![0, 1],
        },
        context: TorchContext {
            hooks: false,
            device: Some("cuda:1".to_owned()),
            settings,
            collector: Some(collector),
            ..TorchContext::default()
        },
        chain: vec![ForwardLink {
            rank: Rank(2),
            request: RequestId(18),
            module: ModuleId(13),
            range: None,
            call: CallId(4),
            seed: 4712,
        }],
        stopped: true,
        ..ForwardCall::new(ModuleId(12))
    };
    insta::assert_snapshot!(text::request(&request(call.into(), arguments())));
}

#[test]
fn a_backward_request_shows_its_gradients() {
    let call = BackwardCall {
        gradients: vec![(0, 0), (2, 0)],
        chain: vec![BackwardLink {
            rank: Rank(2),
            request: RequestId(18),
            module: ModuleId(11),
            forward: RequestId(16),
            call: CallId(2),
            results: Some(vec![(0, 1)]),
        }],
        ..BackwardCall::new(ModuleId(12), RequestId(17))
    };
    let body = Body {
        value: Value::None,
        tensors: vec![stub([2, 8], false)],
    };
    let mut request = request(call.into(), body);
    request.place.parent = None;
    insta::assert_snapshot!(text::request(&request));
}

#[test]
fn close_and_control_requests_say_what_they_are_about() {
    let empty = || Body {
        value: Value::None,
        tensors: vec![],
    };
    let close = CloseCall::new(ModuleId(12), RequestId(17)).into();
    let control = Work::Control {
        name: "partition".to_owned(),
    };
    let both = [close, control].map(|work| text::request(&request(work, empty())));
    insta::assert_snapshot!(both.join("\n"));
}

#[test]
fn responses_show_results_or_the_error() {
    let response = |outcome| Response {
        id: RequestId(17),
        step: StepEpoch(4),
        responder: Rank(1),
        outcome,
    };
    let result = Body {
        value: Value::Tensor(0),
        tensors: vec![stub([2, 8], true)],
    };
    let report = ErrorReport {
        rank: Rank(1),
        host: "node-b".to_owned(),
        module: Some("transformer.h.3".to_owned()),
        microbatch: Some(MicrobatchId(2)),
        phase: Some(Phase::Forward),
        kind: "ValueError".to_owned(),
        message: "sizes differ".to_owned(),
        traceback: "Traceback (most recent call last):\n  File \"train.py\", line 3\nValueError: sizes differ\n".to_owned(),
    };
    let outcomes = [
        ResponseOutcome::Value(answer(ResultNotes::default(), result)),
        ResponseOutcome::Failed(report),
    ];
    let both = outcomes.map(|outcome| text::response(&response(outcome)));
    insta::assert_snapshot!(both.join("\n"));
}

fn answer(notes: ResultNotes, body: Body) -> Answer {
    Answer {
        kind: AnswerKind::Result(Arc::new(notes)),
        body,
    }
}

#[test]
fn responses_show_what_is_noted_of_results() {
    let view = |base, plain: bool| {
        let view = View {
            shape: vec![2],
            strides: vec![3],
            offset: -1,
            conjugated: !plain,
            negated: !plain,
            grad_mode: plain,
        };
        Recipe::View {
            base,
            view,
            requires_grad: plain,
        }
    };
    let notes = ResultNotes {
        recipes: vec![
            (
                0,
                Recipe::Argument {
                    argument: 3,
                    requires_grad: true,
                },
            ),
            (1, view(Base::Argument(2), true)),
            (2, view(Base::Result(0), false)),
        ],
        strides: vec![(0, vec![3, 1])],
        watch: vec![0, 1],
        watch_arguments: vec![2],
        written: vec![(1, 2)],
        dropped: vec![0],
        composites: vec![(0, Composite::Argument(4))],
        kept_arguments: vec![0],
        kept_results: vec![1],
        collected: Some(Value::Dict(vec![(
            Value::Str("hidden_states".to_owned()),
            Value::List(vec![Value::Tensor(1)]),
        )])),
        open: true,
        hooked: true,
        ordered: true,
    };
    let result = Body {
        value: Value::Tensor(0),
        tensors: vec![stub([2, 8], true)],
    };
    let kinds = [
        AnswerKind::Value,
        AnswerKind::Passed(Arc::new(ResultNotes::default())),
        AnswerKind::Stopped,
        AnswerKind::Gradients(vec![(2, 0)]),
    ];
    let others = kinds.map(|kind| Answer {
        kind,
        body: Body {
            value: Value::None,
            tensors: vec![],
        },
    });
    let all: Vec<String> = std::iter::once(answer(notes, result))
        .chain(others)
        .map(|answer| {
            text::response(&Response {
                id: RequestId(17),
                step: StepEpoch(4),
                responder: Rank(1),
                outcome: ResponseOutcome::Value(answer),
            })
        })
        .collect();
    insta::assert_snapshot!(all.join("\n"));
}
