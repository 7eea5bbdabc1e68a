//! Golden calls and answers, over bodies of three tensors.

use std::sync::Arc;

use shardwright_core::{CallId, ModuleId, Rank, RequestId};
use shardwright_wire::{
    AnswerKind, ArgumentNotes, BackwardCall, BackwardLink, Base, CloseCall, Collecting, Composite,
    ForwardCall, ForwardLink, Recipe, ResultNotes, SequentialRange, SettingValue, TorchContext,
    TorchSetting, Value, View, Work,
};

fn context() -> TorchContext {
    TorchContext {
        autocast: vec![("cpu".to_owned(), "bfloat16".to_owned(), true)],
        device: Some("cpu".to_owned()),
        settings: vec![
            (
                TorchSetting::DefaultDtype,
                SettingValue::Name("float64".to_owned()),
            ),
            (TorchSetting::Deterministic, SettingValue::Flag(true)),
        ],
        collector: Some(vec![
            ("hidden_states".to_owned(), Collecting::Items(2)),
            (
                "output_attentions".to_owned(),
                Collecting::Other(Value::Bool(true)),
            ),
        ]),
        ..TorchContext::default()
    }
}

fn sparse() -> (u32, Composite) {
    let parts = Composite::Sparse {
        indices: 1,
        values: 2,
        shape: vec![4, 4],
        coalesced: true,
    };
    (0, parts)
}

/// Work of every kind.
pub(crate) fn works() -> [Work; 4] {
    let (module, forward) = (ModuleId(7), RequestId(11));
    let range = Some(SequentialRange { start: 1, end: 4 });
    let chain = vec![BackwardLink {
        rank: Rank(2),
        request: RequestId(13),
        module,
        forward,
        call: CallId(1),
        results: Some(vec![(0, 1)]),
    }];
    let forward_call = ForwardCall {
        range,
        seed: 77,
        notes: ArgumentNotes {
            shared: vec![vec![0, 1]],
            strides: vec![(0, vec![6, 1])],
            overlapping: vec![1],
            composites: vec![sparse()],
            ..ArgumentNotes::default()
        },
        context: context(),
        chain: vec![ForwardLink {
            rank: Rank(2),
            request: RequestId(13),
            module,
            range,
            call: CallId(3),
            seed: 78,
        }],
        ..ForwardCall::new(module)
    };
    let backward = BackwardCall {
        gradients: vec![(0, 0), (2, 1)],
        chain: chain.clone(),
        ..BackwardCall::new(module, forward)
    };
    let close = CloseCall {
        chain,
        ..CloseCall::new(module, forward)
    };
    let control = Work::Control {
        name: "partition".to_owned(),
    };
    [forward_call.into(), backward.into(), close.into(), control]
}

/// Kinds of answers that say something.
pub(crate) fn answer_kinds() -> [AnswerKind; 4] {
    let view = View {
        shape: vec![2],
        strides: vec![3],
        offset: 1,
        conjugated: false,
        negated: false,
        grad_mode: true,
    };
    let recipe = Recipe::View {
        base: Base::Result(0),
        view,
        requires_grad: true,
    };
    let notes = ResultNotes {
        recipes: vec![(1, recipe)],
        written: vec![(0, 2)],
        composites: vec![sparse()],
        collected: Some(Value::Tensor(2)),
        open: true,
        ..ResultNotes::default()
    };
    let passed = ResultNotes {
        kept_arguments: vec![3],
        open: true,
        ..ResultNotes::default()
    };
    [
        AnswerKind::Result(Arc::new(notes)),
        AnswerKind::Passed(Arc::new(passed)),
        AnswerKind::Stopped,
        AnswerKind::Gradients(vec![(0, 0)]),
    ]
}
