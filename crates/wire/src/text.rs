//! Requests and responses for people: one field a line, tensors as stubs.

use std::fmt::Write as _;

use shardwright_core::CallPath;

use crate::message::{Body, ErrorReport, Request, Response, ResponseOutcome};
use crate::tensor::TensorPart;
use crate::value::Value;

mod calls;

/// A request, with every field of the paper's appendix B. Of what is noted of tensors and torch only what differs from
/// the ordinary.
pub fn request(request: &Request) -> String {
    let mut lines = Lines::new(format!("request {}", request.id));
    lines.field("kind", request.work.kind().name());
    lines.field("requester", &format!("rank {}", request.requester));
    lines.field("step", &request.step.to_string());
    lines.field("model", &request.model.to_string());
    lines.work(&request.work);
    lines.field("microbatch", &request.microbatch.to_string());
    let parent = request
        .place
        .parent
        .map_or("the step function".to_owned(), |parent| {
            format!("request {parent}")
        });
    lines.field("place", &format!("call {} of {parent}", request.place.call));
    if request.path != CallPath::default() {
        lines.field("path", &request.path.to_string());
    }
    lines.field(
        "results",
        if request.hold {
            "held until asked for"
        } else {
            "sent"
        },
    );
    lines.body(&request.body);
    lines.text
}

/// A response.
pub fn response(response: &Response) -> String {
    let mut lines = Lines::new(format!("response {}", response.id));
    lines.field("responder", &format!("rank {}", response.responder));
    lines.field("step", &response.step.to_string());
    match &response.outcome {
        ResponseOutcome::Value(answer) => {
            lines.answer(&answer.kind);
            lines.body(&answer.body);
        }
        ResponseOutcome::Failed(report) => lines.report(report),
    }
    lines.text
}

/// A value as Python would write it, its tensors as `tensor 0`.
pub fn value(tree: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, tree);
    text
}

fn on_off(flag: bool) -> &'static str {
    if flag { "on" } else { "off" }
}

struct Lines {
    text: String,
}

impl Lines {
    fn new(title: String) -> Self {
        Self { text: title + "\n" }
    }

    fn field(&mut self, name: &str, value: &str) {
        let value = value.trim_end().replace('\n', "\n    ");
        push(&mut self.text, format_args!("  {name}: {value}\n"));
    }

    fn body(&mut self, body: &Body) {
        if body.value != Value::None || body.tensors.is_empty() {
            self.field("values", &value(&body.value));
        }
        for (index, TensorPart { meta, data, held }) in body.tensors.iter().enumerate() {
            let grad = if meta.requires_grad {
                ", requires grad"
            } else {
                ""
            };
            let held = held.map_or(String::new(), |held| {
                format!(
                    ", tensor {} of the answer to request {} of rank {}, held by rank {}",
                    held.index, held.request, held.requester, held.holder
                )
            });
            let stub = format!(
                "{}{:?}, strides {:?}, {}, {} bytes{grad}{held}",
                meta.dtype,
                meta.shape,
                meta.strides,
                meta.device,
                data.len(),
            );
            self.field(&format!("tensor {index}"), &stub);
        }
    }

    fn report(&mut self, report: &ErrorReport) {
        self.field("error", &format!("{}: {}", report.kind, report.message));
        self.field(
            "failed on",
            &format!("rank {} on host {}", report.rank, report.host),
        );
        if let Some(module) = &report.module {
            self.field("module", module);
        }
        if let Some(microbatch) = report.microbatch {
            self.field("microbatch", &microbatch.to_string());
        }
        if let Some(phase) = report.phase {
            self.field("phase", phase.name());
        }
        self.field("traceback", &report.traceback);
    }
}

fn write_value(text: &mut String, tree: &Value) {
    match tree {
        Value::None => text.push_str("None"),
        Value::Bool(flag) => text.push_str(if *flag { "True" } else { "False" }),
        Value::Int(number) => push(text, format_args!("{number}")),
        Value::BigInt(digits) => match digits.strip_prefix('-') {
            Some(digits) => push(text, format_args!("-0x{digits}")),
            None => push(text, format_args!("0x{digits}")),
        },
        Value::Float(number) => push(text, format_args!("{number:?}")),
        Value::Complex(real, imaginary) => push(text, format_args!("({real:?}+{imaginary:?}j)")),
        Value::Str(string) => push(text, format_args!("{string:?}")),
        Value::Bytes(bytes) => push(text, format_args!("<{} bytes>", bytes.len())),
        Value::List(items) => write_items(text, "[", items, "]"),
        Value::Tuple(items) => {
            let close = if items.len() == 1 { ",)" } else { ")" };
            write_items(text, "(", items, close);
        }
        Value::Set(items, false) => write_items(text, "set(", items, ")"),
        Value::Set(items, true) => write_items(text, "frozenset(", items, ")"),
        Value::Dict(entries) => {
            text.push('{');
            for (index, (key, item)) in entries.iter().enumerate() {
                text.push_str(if index == 0 { "" } else { ", " });
                write_value(text, key);
                text.push_str(": ");
                write_value(text, item);
            }
            text.push('}');
        }
        Value::Slice(parts) => write_items(text, "slice(", &parts[..], ")"),
        Value::Ellipsis => text.push_str("..."),
        Value::Dtype(name) | Value::TorchConstant(name) => push(text, format_args!("torch.{name}")),
        Value::Device(name) => push(text, format_args!("device({name})")),
        Value::Size(sizes) => push(text, format_args!("Size({sizes:?})")),
        Value::Registered(name, fields) => {
            text.push_str(name);
            text.push('(');
            write_value(text, fields);
            text.push(')');
        }
        Value::Tensor(index) => push(text, format_args!("tensor {index}")),
    }
}

fn write_items(text: &mut String, open: &str, items: &[Value], close: &str) {
    text.push_str(open);
    for (index, item) in items.iter().enumerate() {
        text.push_str(if index == 0 { "" } else { ", " });
        write_value(text, item);
    }
    text.push_str(close);
}

fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments)
        .expect("writing to a string cannot fail");
}
