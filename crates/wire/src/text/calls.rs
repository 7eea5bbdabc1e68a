//! What a request asks for, and what an answer is.

use std::fmt::Debug;

use super::{Lines, on_off, value};
use crate::call::{AnswerKind, BackwardLink, ForwardCall, ForwardLink, SequentialRange, Work};
use crate::notes::{ArgumentNotes, Base, Composite, Recipe, ResultNotes};
use crate::torch::{Checkpointing, Collecting, SettingValue, TorchContext};

impl Lines {
    pub(super) fn work(&mut self, work: &Work) {
        match work {
            Work::Forward(call) => self.forward(call),
            Work::Backward(call) => {
                self.field("module", &call.module.to_string());
                self.field("of request", &call.forward.to_string());
                self.gradients(&call.gradients);
                self.backward_chain(&call.chain);
            }
            Work::Close(call) => {
                self.field("module", &call.module.to_string());
                self.field("of request", &call.forward.to_string());
                self.backward_chain(&call.chain);
            }
            Work::Control { name } => self.field("about", name),
        }
    }

    pub(super) fn answer(&mut self, kind: &AnswerKind) {
        match kind {
            AnswerKind::Value => {}
            AnswerKind::Result(notes) => self.results(notes),
            AnswerKind::Passed(notes) => {
                self.field("result", "went on to the next rank");
                self.results(notes);
            }
            AnswerKind::Stopped => self.field("result", "none: the chain had ended before"),
            AnswerKind::Gradients(gradients) => self.gradients(gradients),
        }
    }

    fn forward(&mut self, call: &ForwardCall) {
        self.field("module", &call.module.to_string());
        self.field("children", &children(call.range));
        self.field("seed", &call.seed.to_string());
        self.context(&call.context);
        self.arguments(&call.notes);
        for link in &call.chain {
            self.field("then", &forward_link(link));
        }
        if call.stopped {
            self.field("runs", "nothing: the chain has ended before");
        }
    }

    fn context(&mut self, context: &TorchContext) {
        self.field("grad mode", on_off(context.grad_mode));
        self.field("inference mode", on_off(context.inference_mode));
        let states: Vec<String> = context
            .autocast
            .iter()
            .map(|(device, dtype, cache)| format!("{device} {dtype} cache {}", on_off(*cache)))
            .collect();
        let states = states.join(", ");
        self.field("autocast", if states.is_empty() { "off" } else { &states });
        let checkpointing = context.checkpointing.map(|how| match how {
            Checkpointing {
                isolated: false, ..
            } => "of the caller's code".to_owned(),
            Checkpointing { group: 0, .. } => "whole".to_owned(),
            Checkpointing { group, .. } => format!("{group} children at a time"),
        });
        self.field("checkpointing", checkpointing.as_deref().unwrap_or("off"));
        if !context.hooks {
            self.field("hooks", "off");
        }
        if let Some(device) = &context.device {
            self.field("default device", device);
        }
        for (setting, value) in &context.settings {
            let value = match value {
                SettingValue::Flag(flag) => on_off(*flag),
                SettingValue::Name(name) => name,
            };
            self.field(setting.name(), value);
        }
        for (name, collecting) in context.collector.iter().flatten() {
            let text = match collecting {
                Collecting::Items(items) => format!("{name}, behind {items} items"),
                Collecting::Other(other) => format!("{name} = {}", value(other)),
            };
            self.field("collects", &text);
        }
    }

    fn arguments(&mut self, notes: &ArgumentNotes) {
        for group in &notes.shared {
            self.field("share memory", &numbers(group));
        }
        self.strides(&notes.strides);
        self.some("elements overlap", &notes.overlapping);
        self.some("laid anew", &notes.relaid);
        self.composites(&notes.composites);
        self.some("views with hooks", &notes.hooked_views);
        if notes.private {
            self.field("made by", "the rank before");
        }
        self.some("kept there", &notes.kept);
    }

    fn results(&mut self, notes: &ResultNotes) {
        for (place, recipe) in &notes.recipes {
            self.field(&format!("tensor {place} is"), &recipe_text(recipe));
        }
        self.strides(&notes.strides);
        self.some("share memory", &notes.watch);
        self.some("share memory with arguments", &notes.watch_arguments);
        for (argument, place) in &notes.written {
            self.field(
                &format!("argument {argument} was written to"),
                &format!("tensor {place}"),
            );
        }
        self.some("gradient dropped", &notes.dropped);
        self.composites(&notes.composites);
        self.some("kept arguments", &notes.kept_arguments);
        self.some("kept results", &notes.kept_results);
        if let Some(collected) = &notes.collected {
            self.field("collected", &value(collected));
        }
        for (name, holds) in [
            ("open", notes.open),
            ("hooked", notes.hooked),
            ("ordered", notes.ordered),
        ] {
            if holds {
                self.field(name, "yes");
            }
        }
    }

    fn some(&mut self, name: &str, indices: &[u32]) {
        if !indices.is_empty() {
            self.field(name, &numbers(indices));
        }
    }

    fn strides(&mut self, strides: &[(u32, Vec<u64>)]) {
        for (index, strides) in strides {
            self.field(&format!("strides of tensor {index}"), &debug(strides));
        }
    }

    fn composites(&mut self, composites: &[(u32, Composite)]) {
        for (place, composite) in composites {
            let text = match composite {
                Composite::Argument(argument) => format!("argument {argument}"),
                Composite::Sparse {
                    indices,
                    values,
                    shape,
                    coalesced,
                } => format!(
                    "sparse, indices tensor {indices}, values tensor {values}, sizes {shape:?}, coalesced {}",
                    on_off(*coalesced)
                ),
                Composite::Nested {
                    values,
                    offsets,
                    ragged_dimension,
                } => format!(
                    "nested, values tensor {values}, offsets tensor {offsets}, ragged dimension {ragged_dimension}"
                ),
            };
            self.field(&format!("tensor {place} is"), &text);
        }
    }

    fn gradients(&mut self, gradients: &[(u32, u32)]) {
        let texts: Vec<String> = gradients
            .iter()
            .map(|(of, tensor)| format!("of {of} tensor {tensor}"))
            .collect();
        self.field("gradients", &texts.join(", "));
    }

    fn backward_chain(&mut self, chain: &[BackwardLink]) {
        for link in chain {
            let results = link.results.as_ref().map_or_else(String::new, |results| {
                format!(", results by argument {}", debug(results))
            });
            let text = format!(
                "request {} of rank {}: module {}, of request {}, call {}{results}",
                link.request, link.rank, link.module, link.forward, link.call
            );
            self.field("then", &text);
        }
    }
}

fn children(range: Option<SequentialRange>) -> String {
    range.map_or("all".to_owned(), |range| {
        format!("{}..{}", range.start, range.end)
    })
}

fn forward_link(link: &ForwardLink) -> String {
    format!(
        "request {} of rank {}: module {}, children {}, call {}, seed {}",
        link.request,
        link.rank,
        link.module,
        children(link.range),
        link.call,
        link.seed
    )
}

fn recipe_text(recipe: &Recipe) -> String {
    let (text, requires_grad) = match recipe {
        Recipe::Argument {
            argument,
            requires_grad,
        } => (format!("argument {argument}"), *requires_grad),
        Recipe::View {
            base,
            view,
            requires_grad,
        } => {
            let base = match base {
                Base::Argument(argument) => format!("argument {argument}"),
                Base::Result(result) => format!("tensor {result}"),
            };
            let reading = [
                (view.conjugated, ", conjugated"),
                (view.negated, ", negated"),
                (!view.grad_mode, ", made without gradients"),
            ];
            let reading: String = reading
                .into_iter()
                .filter_map(|(holds, text)| holds.then_some(text))
                .collect();
            let text = format!(
                "a view of {base}, sizes {:?}, strides {:?}, offset {}{reading}",
                view.shape, view.strides, view.offset
            );
            (text, *requires_grad)
        }
    };
    text + if requires_grad { ", requires grad" } else { "" }
}

fn numbers(indices: &[u32]) -> String {
    let texts: Vec<String> = indices.iter().map(u32::to_string).collect();
    texts.join(", ")
}

fn debug(value: &impl Debug) -> String {
    format!("{value:?}")
}
