//! The text form of requests and responses, field by field (the paper's appendix B).
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};
use shardwright_wire::{
    Body, Buffer, ErrorReport, NoMemory, Outcome, Phase, Place, Request, Response, SequentialRange,
    TaskContext, TensorMeta, TensorPart, Value, Work, text,
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
        context: TaskContext {
            grad_mode: true,
            inference_mode: false,
            autocast: vec![("cpu".to_owned(), "bfloat16".to_owned(), true)],
            checkpointing: true,
        },
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
    let work = Work::Forward {
        module: ModuleId(12),
        range: Some(SequentialRange { start: 2, end: 5 }),
    };
    insta::assert_snapshot!(text::request(&request(work, arguments())));
}

#[test]
fn a_backward_request_shows_its_gradients() {
    let work = Work::Backward {
        module: ModuleId(12),
        forward: RequestId(17),
    };
    let body = Body {
        value: Value::Tuple(vec![Value::Tensor(0), Value::None]),
        tensors: vec![stub([2, 8], false)],
    };
    let mut request = request(work, body);
    request.place.parent = None;
    request.context.autocast.clear();
    insta::assert_snapshot!(text::request(&request));
}

#[test]
fn close_and_control_requests_say_what_they_are_about() {
    let empty = || Body {
        value: Value::None,
        tensors: vec![],
    };
    let close = Work::Close {
        module: ModuleId(12),
        forward: RequestId(17),
    };
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
    let both = [Outcome::Value(result), Outcome::Failed(report)]
        .map(|outcome| text::response(&response(outcome)));
    insta::assert_snapshot!(both.join("\n"));
}
