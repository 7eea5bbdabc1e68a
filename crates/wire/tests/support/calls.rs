//! Arbitrary calls and answers, which name tensors of a body of so many.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use shardwright_core::{CallId, ModuleId, Rank, RequestId};
use shardwright_wire::{
    AnswerKind, ArgumentNotes, BackwardCall, BackwardLink, Base, Checkpointing, CloseCall,
    Collecting, Composite, ForwardCall, ForwardLink, Gradients, Recipe, ResultNotes,
    SequentialRange, SettingValue, TorchContext, TorchSetting, View, Work,
};

use super::values;

fn indices(tensors: u32) -> BoxedStrategy<Vec<u32>> {
    if tensors == 0 {
        return Just(Vec::new()).boxed();
    }
    vec(0..tensors, 0..3).boxed()
}

/// A list of what stands at a place among the tensors.
fn placed<T: std::fmt::Debug + Clone + 'static>(
    tensors: u32,
    each: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Vec<(u32, T)>> {
    if tensors == 0 {
        return Just(Vec::new()).boxed();
    }
    vec((0..tensors, each), 0..3).boxed()
}

fn gradients(tensors: u32) -> impl Strategy<Value = Gradients> {
    placed(tensors, any::<u32>())
        .prop_map(|pairs| pairs.into_iter().map(|(tensor, of)| (of, tensor)).collect())
}

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    vec(any::<u64>(), 0..4)
}

fn composites(tensors: u32) -> impl Strategy<Value = Vec<(u32, Composite)>> {
    let some = 0..tensors.max(1);
    placed(
        tensors,
        prop_oneof![
            any::<u32>().prop_map(Composite::Argument),
            (some.clone(), some.clone(), sizes(), any::<bool>()).prop_map(
                |(indices, values, shape, coalesced)| Composite::Sparse {
                    indices,
                    values,
                    shape,
                    coalesced
                }
            ),
            (some.clone(), some, any::<u32>()).prop_map(|(values, offsets, ragged_dimension)| {
                Composite::Nested {
                    values,
                    offsets,
                    ragged_dimension,
                }
            }),
        ],
    )
}

fn recipes(tensors: u32) -> impl Strategy<Value = Vec<(u32, Recipe)>> {
    let bases = prop_oneof![
        any::<u32>().prop_map(Base::Argument),
        (0..tensors.max(1)).prop_map(Base::Result),
    ];
    let flags = any::<(bool, bool, bool, bool)>();
    let views = (bases, sizes(), sizes(), any::<i64>(), flags);
    placed(
        tensors,
        prop_oneof![
            any::<(u32, bool)>().prop_map(|(argument, requires_grad)| Recipe::Argument {
                argument,
                requires_grad
            }),
            views.prop_map(|(base, shape, strides, offset, flags)| {
                let (conjugated, negated, grad_mode, requires_grad) = flags;
                let view = View {
                    shape,
                    strides,
                    offset,
                    conjugated,
                    negated,
                    grad_mode,
                };
                Recipe::View {
                    base,
                    view,
                    requires_grad,
                }
            }),
        ],
    )
}

fn argument_notes(tensors: u32) -> impl Strategy<Value = ArgumentNotes> {
    let groups = vec(indices(tensors), 0..3);
    let lists = (
        indices(tensors),
        indices(tensors),
        indices(tensors),
        indices(tensors),
    );
    let laid = placed(tensors, sizes());
    (groups, laid, lists, composites(tensors), any::<bool>()).prop_map(
        |(shared, strides, lists, composites, private)| {
            let (overlapping, relaid, hooked_views, kept) = lists;
            ArgumentNotes {
                shared,
                strides,
                overlapping,
                relaid,
                composites,
                hooked_views,
                private,
                kept,
            }
        },
    )
}

fn result_notes(tensors: u32) -> impl Strategy<Value = ResultNotes> {
    let lists = (indices(tensors), indices(tensors), indices(tensors));
    let arguments = (vec(any::<u32>(), 0..3), vec(any::<u32>(), 0..3));
    let made = (
        recipes(tensors),
        placed(tensors, sizes()),
        composites(tensors),
    );
    let flags = any::<(bool, bool, bool)>();
    let collected = option::of(values(tensors));
    (made, lists, arguments, gradients(tensors), collected, flags).prop_map(
        |(made, lists, arguments, written, collected, flags)| {
            let (recipes, strides, composites) = made;
            let (watch, dropped, kept_results) = lists;
            let (watch_arguments, kept_arguments) = arguments;
            let (open, hooked, ordered) = flags;
            ResultNotes {
                recipes,
                strides,
                watch,
                watch_arguments,
                written,
                dropped,
                composites,
                kept_arguments,
                kept_results,
                collected,
                open,
                hooked,
                ordered,
            }
        },
    )
}

fn settings() -> impl Strategy<Value = (TorchSetting, SettingValue)> {
    let setting = prop::sample::select(TorchSetting::ALL);
    (setting, any::<bool>(), ".{0,9}").prop_map(|(setting, flag, name)| {
        let value = if setting.is_name() {
            SettingValue::Name(name)
        } else {
            SettingValue::Flag(flag)
        };
        (setting, value)
    })
}

fn contexts() -> impl Strategy<Value = TorchContext> {
    let collecting = prop_oneof![
        any::<u32>().prop_map(Collecting::Items),
        values(0).prop_map(Collecting::Other),
    ];
    (
        any::<(bool, bool, Option<(bool, bool, u32)>, bool)>(),
        vec((".{0,9}", ".{0,9}", any::<bool>()), 0..3),
        option::of(".{0,9}"),
        vec(settings(), 0..3),
        option::of(vec((".{0,9}", collecting), 0..3)),
    )
        .prop_map(|(flags, autocast, device, settings, collector)| {
            let (grad_mode, inference_mode, checkpointing, hooks) = flags;
            TorchContext {
                grad_mode,
                inference_mode,
                autocast,
                checkpointing: checkpointing.map(|(isolated, preserves_rng_state, group)| {
                    Checkpointing {
                        isolated,
                        preserves_rng_state,
                        group,
                    }
                }),
                hooks,
                device,
                settings,
                collector,
            }
        })
}

fn ranges() -> impl Strategy<Value = Option<SequentialRange>> {
    let ranges = any::<(u32, u32)>();
    option::of(ranges.prop_map(|(start, end)| SequentialRange { start, end }))
}

fn forward_links() -> impl Strategy<Value = ForwardLink> {
    (any::<(u32, u64, u32, u32, u64)>(), ranges()).prop_map(
        |((rank, request, module, call, seed), range)| ForwardLink {
            rank: Rank(rank),
            request: RequestId(request),
            module: ModuleId(module),
            range,
            call: CallId(call),
            seed,
        },
    )
}

fn backward_links() -> impl Strategy<Value = BackwardLink> {
    let results = option::of(vec(any::<(u32, u32)>(), 0..3));
    (any::<(u32, u64, u32, u64, u32)>(), results).prop_map(
        |((rank, request, module, forward, call), results)| BackwardLink {
            rank: Rank(rank),
            request: RequestId(request),
            module: ModuleId(module),
            forward: RequestId(forward),
            call: CallId(call),
            results,
        },
    )
}

/// Any work.
pub(super) fn works(tensors: u32) -> impl Strategy<Value = Work> {
    let forward = (
        any::<(u32, u64, bool)>(),
        ranges(),
        argument_notes(tensors),
        contexts(),
        vec(forward_links(), 0..3),
    );
    let backward_chain = || vec(backward_links(), 0..3);
    prop_oneof![
        forward.prop_map(|((module, seed, stopped), range, notes, context, chain)| {
            Work::from(ForwardCall {
                module: ModuleId(module),
                range,
                seed,
                notes,
                context,
                chain,
                stopped,
            })
        }),
        (any::<(u32, u64)>(), gradients(tensors), backward_chain()).prop_map(
            |((module, forward), gradients, chain)| Work::from(BackwardCall {
                module: ModuleId(module),
                forward: RequestId(forward),
                gradients,
                chain,
            })
        ),
        (any::<(u32, u64)>(), backward_chain()).prop_map(|((module, forward), chain)| {
            Work::from(CloseCall {
                module: ModuleId(module),
                forward: RequestId(forward),
                chain,
            })
        }),
        ".{0,9}".prop_map(|name| Work::Control { name }),
    ]
}

/// Any kind of answer.
pub(super) fn answer_kinds(tensors: u32) -> impl Strategy<Value = AnswerKind> {
    prop_oneof![
        Just(AnswerKind::Value),
        result_notes(tensors).prop_map(|notes| AnswerKind::Result(Arc::new(notes))),
        result_notes(tensors).prop_map(|notes| AnswerKind::Passed(Arc::new(notes))),
        Just(AnswerKind::Stopped),
        gradients(tensors).prop_map(AnswerKind::Gradients),
    ]
}
