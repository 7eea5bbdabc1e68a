//! How two checkpoints differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;
use shardwright_checkpoint::{
    Checkpoint, CheckpointError, Difference as Unlike, Manifest, TensorKind, Unequal, differences,
    unequal,
};

use super::tables::degrees;

/// How two checkpoints differ, from the first to the second.
#[derive(Serialize)]
pub(super) struct Difference {
    a: String,
    b: String,
    /// What their jobs differ in.
    job: Vec<String>,
    /// Tensors that only one has, or that have other types or shapes.
    tensors: Vec<String>,
    /// Tensors with other elements.
    elements: Vec<Unequal>,
    /// How many tensors have the same.
    equal_tensors: usize,
}

impl Difference {
    pub(super) fn between(a: &Checkpoint, b: &Checkpoint) -> Result<Self, CheckpointError> {
        let elements = unequal(a, b)?;
        let (first, second) = (a.manifest(), b.manifest());
        let tensors = tensors(first, second);
        let alike = first.tensors.iter().filter(|tensor| {
            let other = second.tensor(&tensor.name);
            other.is_some_and(|other| other.dtype == tensor.dtype && other.shape == tensor.shape)
        });
        Ok(Self {
            a: a.folder().display().to_string(),
            b: b.folder().display().to_string(),
            job: job(first, second),
            tensors,
            equal_tensors: alike.count() - elements.len(),
            elements,
        })
    }

    pub(super) fn is_none(&self) -> bool {
        self.job.is_empty() && self.tensors.is_empty() && self.elements.is_empty()
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("A: {}\nB: {}\n\n", self.a, self.b);
        let elements = self.elements.iter().map(|one| {
            let Unequal { name, elements, of } = one;
            format!("elements: {elements} of {of} of {name} differ")
        });
        let lines = self.job.iter().chain(&self.tensors).cloned();
        for line in lines.chain(elements) {
            writeln!(text, "{line}").expect("text takes all");
        }
        if !self.is_none() {
            text.push('\n');
        }
        writeln!(text, "equal tensors: {}", self.equal_tensors).expect("text takes all");
        text
    }
}

fn tensors(a: &Manifest, b: &Manifest) -> Vec<String> {
    let kind = |dtype, shape: &[u64]| TensorKind {
        dtype,
        shape: shape.to_vec(),
    };
    let wanted = b.tensors.iter();
    let wanted: BTreeMap<String, TensorKind> = wanted
        .map(|tensor| (tensor.name.clone(), kind(tensor.dtype, &tensor.shape)))
        .collect();
    let lines = differences(&wanted, a).into_iter().map(|one| match one {
        Unlike::Missing { name } => format!("only in B: {name}"),
        Unlike::Unexpected { name } => format!("only in A: {name}"),
        Unlike::Shape {
            name,
            wanted,
            found,
        } => format!("shape: {name} is {found:?} in A and {wanted:?} in B"),
        Unlike::Dtype {
            name,
            wanted,
            found,
        } => format!("dtype: {name} is {found} in A and {wanted} in B"),
    });
    lines.collect()
}

fn job(a: &Manifest, b: &Manifest) -> Vec<String> {
    let mut lines = Vec::new();
    let mut compare = |what: &str, a: String, b: String| {
        if a != b {
            lines.push(format!("{what}: {a} in A and {b} in B"));
        }
    };
    let step = |step: Option<u64>| step.map_or("unknown".to_owned(), |step| step.to_string());
    compare("step", step(a.step), step(b.step));
    compare("pp x tp x rdp", degrees(a.degrees), degrees(b.degrees));
    let places = |manifest: &Manifest| {
        let places = manifest.partition.iter();
        let places = places.map(|place| (place.module.clone(), place.pp_rank));
        places.collect::<BTreeMap<_, _>>()
    };
    let (places_a, places_b) = (places(a), places(b));
    let modules: BTreeSet<&String> = places_a.keys().chain(places_b.keys()).collect();
    let moved = modules
        .iter()
        .filter(|module| places_a.get(**module) != places_b.get(**module));
    match moved.count() {
        0 => {}
        count => lines.push(format!(
            "partition: {count} of {} modules moved",
            modules.len()
        )),
    }
    if a.aliases != b.aliases {
        lines.push("aliases: tensors are tied differently".to_owned());
    }
    lines.extend(content(&a.user_content, &b.user_content));
    lines
}

/// Which of the outermost names of user content have other values.
fn content(a: &Value, b: &Value) -> Option<String> {
    if a == b {
        return None;
    }
    let (Value::Object(a), Value::Object(b)) = (a, b) else {
        return Some("user content: it differs".to_owned());
    };
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let names = names
        .into_iter()
        .filter(|name| a.get(*name) != b.get(*name));
    let names: Vec<&str> = names.map(String::as_str).collect();
    Some(format!(
        "user content: other values of {}",
        names.join(", ")
    ))
}
