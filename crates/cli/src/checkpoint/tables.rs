//! Checkpoints as text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;
use shardwright_checkpoint::{Degrees, Entry, EntryState, Manifest, Tensor};
use shardwright_timeline::{size, table};

use super::Verified;

/// The checkpoints of a directory.
#[derive(Serialize)]
pub(super) struct Listed {
    newest: Option<String>,
    checkpoints: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    tag: String,
    state: &'static str,
    #[serde(flatten)]
    held: Option<Held>,
    problem: Option<String>,
}

#[derive(Serialize)]
struct Held {
    sequence: u64,
    step: Option<u64>,
    degrees: Degrees,
    tensors: usize,
    files: usize,
    bytes: u64,
}

impl Listed {
    pub(super) fn new(entries: &[Entry], newest: Option<&str>) -> Self {
        Self {
            newest: newest.map(str::to_owned),
            checkpoints: entries.iter().map(row).collect(),
        }
    }

    pub(super) fn has_unusable(&self) -> bool {
        self.checkpoints.iter().any(|row| row.problem.is_some())
    }

    pub(super) fn to_text(&self) -> String {
        let heading = [
            "",
            "tag",
            "state",
            "step",
            "pp x tp x rdp",
            "tensors",
            "files",
            "size",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for row in &self.checkpoints {
            let star = if self.newest.as_ref() == Some(&row.tag) {
                "*"
            } else {
                ""
            };
            let mut cells = vec![star.to_owned(), row.tag.clone(), row.state.to_owned()];
            if let Some(held) = &row.held {
                cells.push(held.step.map_or_else(String::new, |step| step.to_string()));
                cells.push(degrees(held.degrees));
                cells.push(held.tensors.to_string());
                cells.push(held.files.to_string());
                cells.push(size(held.bytes));
            }
            rows.push(cells);
        }
        let mut text = table(&rows, 3);
        for row in &self.checkpoints {
            if let Some(problem) = &row.problem {
                writeln!(text, "{}: {problem}", row.tag).expect("text takes all");
            }
        }
        text
    }
}

fn row(entry: &Entry) -> Row {
    let (state, held, problem) = match &entry.state {
        EntryState::Complete(manifest) => ("complete", Some(held(manifest)), None),
        EntryState::Unusable(error) => ("unusable", None, Some(error.to_string())),
        EntryState::Incomplete => ("incomplete", None, None),
    };
    Row {
        tag: entry.tag.clone(),
        state,
        held,
        problem,
    }
}

fn held(manifest: &Manifest) -> Held {
    Held {
        sequence: manifest.sequence,
        step: manifest.step,
        degrees: manifest.degrees,
        tensors: manifest.tensors.len(),
        files: manifest.files.len(),
        bytes: manifest.files.iter().map(|file| file.bytes).sum(),
    }
}

pub(super) fn degrees(degrees: Degrees) -> String {
    let Degrees {
        pipeline,
        tensor,
        reduced_data,
        optimizer_sharding,
        sharded_data,
    } = degrees;
    let mut text = format!("{pipeline} x {tensor} x {reduced_data}");
    let sharded = [
        ("optimizer state", optimizer_sharding),
        ("parameters", sharded_data),
    ];
    for (what, degree) in sharded {
        if degree.get() > 1 {
            write!(text, ", {what} over {degree}").expect("text takes all");
        }
    }
    text
}

/// What a checkpoint holds.
pub(super) fn manifest(manifest: &Manifest) -> String {
    let mut text = format!("checkpoint {}", manifest.tag);
    if let Some(step) = manifest.step {
        write!(text, ", step {step}").expect("text takes all");
    }
    writeln!(
        text,
        ", number {} of its directory, written by shardwright {}\npp x tp x rdp: {}\n",
        manifest.sequence,
        manifest.library_version,
        degrees(manifest.degrees)
    )
    .expect("text takes all");
    text += &files(manifest);
    text.push('\n');
    text += &tensors(manifest);
    if !manifest.partition.is_empty() {
        let mut modules: BTreeMap<u32, usize> = BTreeMap::new();
        for place in &manifest.partition {
            *modules.entry(place.pp_rank).or_default() += 1;
        }
        let ranks = modules.iter();
        let ranks: Vec<String> = ranks
            .map(|(rank, modules)| format!("{modules} on pp_rank {rank}"))
            .collect();
        writeln!(text, "\nmodules: {}", ranks.join(", ")).expect("text takes all");
    }
    if let Some(content) = manifest
        .user_content
        .as_object()
        .filter(|all| !all.is_empty())
    {
        let names: Vec<&str> = content.keys().map(String::as_str).collect();
        writeln!(text, "\nuser content: {}", names.join(", ")).expect("text takes all");
    }
    text
}

fn files(manifest: &Manifest) -> String {
    let mut tensors = vec![BTreeSet::new(); manifest.files.len()];
    for (number, tensor) in manifest.tensors.iter().enumerate() {
        for piece in &tensor.pieces {
            tensors[piece.file].insert(number);
        }
    }
    let mut rows = vec![["file", "size", "tensors"].map(str::to_owned).to_vec()];
    for (file, tensors) in manifest.files.iter().zip(tensors) {
        let held = tensors.len().to_string();
        rows.push(vec![file.name.clone(), size(file.bytes), held]);
    }
    table(&rows, 1)
}

fn tensors(manifest: &Manifest) -> String {
    let heading = ["tensor", "dtype", "shape", "size", "pieces", "files"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    let row = |name: String, tensor: &Tensor| {
        let files: BTreeSet<usize> = tensor.pieces.iter().map(|piece| piece.file).collect();
        vec![
            name,
            tensor.dtype.to_string(),
            format!("{:?}", tensor.shape),
            size(tensor.num_bytes()),
            tensor.pieces.len().to_string(),
            files.len().to_string(),
        ]
    };
    rows.extend(
        manifest
            .tensors
            .iter()
            .map(|one| row(one.name.clone(), one)),
    );
    for alias in &manifest.aliases {
        rows.push(vec![format!("{} = {}", alias.name, alias.of)]);
    }
    table(&rows, 3)
}

/// What `verify` found.
pub(super) fn verified(verified: &Verified<'_>) -> String {
    let Verified {
        tag,
        files,
        bytes,
        damages,
    } = verified;
    let mut text = String::new();
    for damage in damages {
        writeln!(text, "{damage}").expect("text takes all");
    }
    let bytes = size(*bytes);
    let end = match damages.len() {
        0 => format!("checkpoint {tag}: {files} files with {bytes} are as they were written"),
        1 => format!("checkpoint {tag} of {files} files with {bytes} is damaged in 1 place"),
        more => {
            format!("checkpoint {tag} of {files} files with {bytes} is damaged in {more} places")
        }
    };
    writeln!(text, "{end}").expect("text takes all");
    text
}
