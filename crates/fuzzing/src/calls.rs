//! Calls and answers out of a fuzzer's bytes. They name tensors of a body of so many.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use shardwright_core::{CallId, ModuleId, Rank, RequestId};
use shardwright_wire::{
    AnswerKind, ArgumentNotes, BackwardCall, BackwardLink, Base, Checkpointing, CloseCall,
    Collecting, Composite, ForwardCall, ForwardLink, Gradients, Recipe, ResultNotes,
    SequentialRange, SettingValue, TorchContext, TorchSetting, View, Work,
};

use crate::messages::{few, plain_value, value};

pub(crate) fn work(choices: &mut Unstructured<'_>, tensors: u32) -> Result<Work> {
    Ok(match choices.int_in_range(0..=3)? {
        0 => Work::from(ForwardCall {
            module: ModuleId(choices.arbitrary()?),
            range: range(choices)?,
            seed: choices.arbitrary()?,
            notes: argument_notes(choices, tensors)?,
            context: context(choices)?,
            chain: few(choices, forward_link)?,
            stopped: choices.arbitrary()?,
        }),
        1 => Work::from(BackwardCall {
            module: ModuleId(choices.arbitrary()?),
            forward: RequestId(choices.arbitrary()?),
            gradients: gradients(choices, tensors)?,
            chain: few(choices, backward_link)?,
        }),
        2 => Work::from(CloseCall {
            module: ModuleId(choices.arbitrary()?),
            forward: RequestId(choices.arbitrary()?),
            chain: few(choices, backward_link)?,
        }),
        _ => Work::Control {
            name: choices.arbitrary()?,
        },
    })
}

pub(crate) fn answer_kind(choices: &mut Unstructured<'_>, tensors: u32) -> Result<AnswerKind> {
    Ok(match choices.int_in_range(0..=4)? {
        1 => AnswerKind::Result(Arc::new(result_notes(choices, tensors)?)),
        2 => AnswerKind::Passed(Arc::new(result_notes(choices, tensors)?)),
        3 => AnswerKind::Stopped,
        4 => AnswerKind::Gradients(gradients(choices, tensors)?),
        _ => AnswerKind::Value,
    })
}

fn argument_notes(choices: &mut Unstructured<'_>, tensors: u32) -> Result<ArgumentNotes> {
    Ok(ArgumentNotes {
        shared: few(choices, |choices| indices(choices, tensors))?,
        strides: placed(choices, tensors, sizes)?,
        overlapping: indices(choices, tensors)?,
        relaid: indices(choices, tensors)?,
        composites: composites(choices, tensors)?,
        hooked_views: indices(choices, tensors)?,
        private: choices.arbitrary()?,
        kept: indices(choices, tensors)?,
    })
}

fn result_notes(choices: &mut Unstructured<'_>, tensors: u32) -> Result<ResultNotes> {
    Ok(ResultNotes {
        recipes: placed(choices, tensors, |choices| recipe(choices, tensors))?,
        strides: placed(choices, tensors, sizes)?,
        watch: indices(choices, tensors)?,
        watch_arguments: few(choices, Unstructured::arbitrary)?,
        written: gradients(choices, tensors)?,
        dropped: indices(choices, tensors)?,
        composites: composites(choices, tensors)?,
        kept_arguments: few(choices, Unstructured::arbitrary)?,
        kept_results: indices(choices, tensors)?,
        collected: if choices.arbitrary()? {
            Some(value(choices, tensors, 0)?)
        } else {
            None
        },
        open: choices.arbitrary()?,
        hooked: choices.arbitrary()?,
        ordered: choices.arbitrary()?,
    })
}

fn indices(choices: &mut Unstructured<'_>, tensors: u32) -> Result<Vec<u32>> {
    let places = placed(choices, tensors, |_| Ok(()))?;
    Ok(places.into_iter().map(|(index, ())| index).collect())
}

fn placed<'a, T>(
    choices: &mut Unstructured<'a>,
    tensors: u32,
    mut each: impl FnMut(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Vec<(u32, T)>> {
    if tensors == 0 {
        return Ok(Vec::new());
    }
    few(choices, |choices| {
        Ok((choices.int_in_range(0..=tensors - 1)?, each(choices)?))
    })
}

fn gradients(choices: &mut Unstructured<'_>, tensors: u32) -> Result<Gradients> {
    let pairs = placed(choices, tensors, Unstructured::arbitrary)?;
    Ok(pairs.into_iter().map(|(tensor, of)| (of, tensor)).collect())
}

fn sizes(choices: &mut Unstructured<'_>) -> Result<Vec<u64>> {
    few(choices, Unstructured::arbitrary)
}

fn composites(choices: &mut Unstructured<'_>, tensors: u32) -> Result<Vec<(u32, Composite)>> {
    placed(choices, tensors, |choices| {
        let some =
            |choices: &mut Unstructured<'_>| choices.int_in_range(0..=tensors.saturating_sub(1));
        Ok(match choices.int_in_range(0..=2)? {
            0 => Composite::Argument(choices.arbitrary()?),
            1 => Composite::Sparse {
                indices: some(choices)?,
                values: some(choices)?,
                shape: sizes(choices)?,
                coalesced: choices.arbitrary()?,
            },
            _ => Composite::Nested {
                values: some(choices)?,
                offsets: some(choices)?,
                ragged_dimension: choices.arbitrary()?,
            },
        })
    })
}

fn recipe(choices: &mut Unstructured<'_>, tensors: u32) -> Result<Recipe> {
    let base = match choices.int_in_range(0..=2)? {
        0 => {
            return Ok(Recipe::Argument {
                argument: choices.arbitrary()?,
                requires_grad: choices.arbitrary()?,
            });
        }
        1 => Base::Argument(choices.arbitrary()?),
        _ => Base::Result(choices.int_in_range(0..=tensors.saturating_sub(1))?),
    };
    let view = View {
        shape: sizes(choices)?,
        strides: sizes(choices)?,
        offset: choices.arbitrary()?,
        conjugated: choices.arbitrary()?,
        negated: choices.arbitrary()?,
        grad_mode: choices.arbitrary()?,
    };
    Ok(Recipe::View {
        base,
        view,
        requires_grad: choices.arbitrary()?,
    })
}

fn context(choices: &mut Unstructured<'_>) -> Result<TorchContext> {
    Ok(TorchContext {
        grad_mode: choices.arbitrary()?,
        inference_mode: choices.arbitrary()?,
        autocast: few(choices, Unstructured::arbitrary)?,
        checkpointing: if choices.arbitrary()? {
            Some(Checkpointing {
                isolated: choices.arbitrary()?,
                preserves_rng_state: choices.arbitrary()?,
                group: choices.arbitrary()?,
            })
        } else {
            None
        },
        hooks: choices.arbitrary()?,
        device: choices.arbitrary()?,
        settings: few(choices, |choices| {
            let setting = *choices.choose(TorchSetting::ALL)?;
            let value = if setting.is_name() {
                SettingValue::Name(choices.arbitrary()?)
            } else {
                SettingValue::Flag(choices.arbitrary()?)
            };
            Ok((setting, value))
        })?,
        collector: if choices.arbitrary()? {
            Some(few(choices, |choices| {
                let name = choices.arbitrary()?;
                let collecting = if choices.arbitrary()? {
                    Collecting::Items(choices.arbitrary()?)
                } else {
                    Collecting::Other(plain_value(choices)?)
                };
                Ok((name, collecting))
            })?)
        } else {
            None
        },
    })
}

fn range(choices: &mut Unstructured<'_>) -> Result<Option<SequentialRange>> {
    let range = choices.arbitrary::<Option<(u32, u32)>>()?;
    Ok(range.map(|(start, end)| SequentialRange { start, end }))
}

fn forward_link(choices: &mut Unstructured<'_>) -> Result<ForwardLink> {
    Ok(ForwardLink {
        rank: Rank(choices.arbitrary()?),
        request: RequestId(choices.arbitrary()?),
        module: ModuleId(choices.arbitrary()?),
        range: range(choices)?,
        call: CallId(choices.arbitrary()?),
        seed: choices.arbitrary()?,
    })
}

fn backward_link(choices: &mut Unstructured<'_>) -> Result<BackwardLink> {
    Ok(BackwardLink {
        rank: Rank(choices.arbitrary()?),
        request: RequestId(choices.arbitrary()?),
        module: ModuleId(choices.arbitrary()?),
        forward: RequestId(choices.arbitrary()?),
        call: CallId(choices.arbitrary()?),
        results: if choices.arbitrary()? {
            Some(few(choices, Unstructured::arbitrary)?)
        } else {
            None
        },
    })
}
