//! `shardwright checkpoint`: what checkpoints hold, whether they are whole, how two differ, and other forms of them.

mod conversions;
mod difference;
mod progress;
mod tables;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;
use shardwright_checkpoint::{Checkpoint, CheckpointError, Directory};

use crate::Finished;
use crate::misuse::line;
use conversions::{ExportArguments, ImportArguments, ReshardArguments};
use progress::Progress;

/// What to do with checkpoints.
#[derive(Clone, Debug, Subcommand)]
pub enum CheckpointVerb {
    /// List the checkpoints of a directory, the oldest first. The newest, which is resumed from, has a star.
    Ls(ListArguments),
    /// Say what a checkpoint holds: its job's degrees, its files, each tensor and over how many files it is divided.
    Show(ShowArguments),
    /// Read all of a checkpoint, and name every file that is not as it was written.
    Verify(VerifyArguments),
    /// Say how two checkpoints differ: their jobs, their tensors, and the elements of these, however they are divided.
    Diff(DiffArguments),
    /// Write the model's tensors whole, in the layout that `from_pretrained` of `transformers` reads.
    Export(ExportArguments),
    /// Write a checkpoint's tensors into as many files as asked, of equal sizes: a new checkpoint with the same contents.
    Reshard(ReshardArguments),
    /// Make a checkpoint of a model that others saved as safetensors files.
    Import(ImportArguments),
}

/// What `ls` lists.
#[derive(Clone, Debug, Args)]
pub struct ListArguments {
    /// The directory of the checkpoints, or `s3://BUCKET/PREFIX`.
    pub path: PathBuf,
    /// Write one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `show` shows.
#[derive(Clone, Debug, Args)]
pub struct ShowArguments {
    #[command(flatten)]
    checkpoint: Which,
    /// Write the manifest, which is JSON.
    #[arg(long)]
    pub json: bool,
}

/// What `verify` reads.
#[derive(Clone, Debug, Args)]
pub struct VerifyArguments {
    #[command(flatten)]
    checkpoint: Which,
    /// Write one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `diff` compares.
#[derive(Clone, Debug, Args)]
pub struct DiffArguments {
    /// The first checkpoint: its folder, or a directory of checkpoints, of which the newest is taken.
    pub a: PathBuf,
    /// The second.
    pub b: PathBuf,
    /// Write one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A checkpoint.
#[derive(Clone, Debug, Args)]
struct Which {
    /// The directory of the checkpoints, or the folder of one; or `s3://BUCKET/PREFIX`.
    path: PathBuf,
    /// Its tag; the newest if none is given.
    tag: Option<String>,
}

#[derive(Serialize)]
struct Verified<'a> {
    tag: &'a str,
    files: usize,
    bytes: u64,
    damages: Vec<String>,
}

/// Runs a verb.
pub fn run(verb: &CheckpointVerb) -> Finished {
    let done = match verb {
        CheckpointVerb::Ls(arguments) => list(arguments),
        CheckpointVerb::Show(arguments) => show(arguments),
        CheckpointVerb::Verify(arguments) => verify(arguments),
        CheckpointVerb::Diff(arguments) => difference(arguments),
        CheckpointVerb::Export(arguments) => conversions::export(arguments),
        CheckpointVerb::Reshard(arguments) => conversions::reshard(arguments),
        CheckpointVerb::Import(arguments) => conversions::import(arguments),
    };
    let damaged = matches!(done, Err(CheckpointError::Damaged { .. }));
    done.unwrap_or_else(|error| Finished {
        status: if damaged { 1 } else { 2 },
        output: String::new(),
        complaint: line(&format!("shardwright checkpoint: {error}")),
    })
}

fn list(arguments: &ListArguments) -> Result<Finished, CheckpointError> {
    let directory = Directory::new(&arguments.path)?;
    let listed = tables::Listed::new(&directory.entries()?, directory.newest()?.as_deref());
    Ok(Finished {
        status: u8::from(listed.has_unusable()),
        output: if arguments.json {
            json(&listed)
        } else {
            listed.to_text()
        },
        complaint: String::new(),
    })
}

fn show(arguments: &ShowArguments) -> Result<Finished, CheckpointError> {
    let Which { path, tag } = &arguments.checkpoint;
    let checkpoint = Checkpoint::locate(path, tag.as_deref())?;
    let manifest = checkpoint.manifest();
    Ok(Finished {
        output: if arguments.json {
            json(manifest)
        } else {
            tables::manifest(manifest)
        },
        ..Finished::default()
    })
}

fn verify(arguments: &VerifyArguments) -> Result<Finished, CheckpointError> {
    let Which { path, tag } = &arguments.checkpoint;
    let (checkpoint, _) = Checkpoint::inspect(path, tag.as_deref())?;
    let files = &checkpoint.manifest().files;
    let progress = Progress::new("verifying", files.iter().map(|file| file.bytes).sum());
    let damages = checkpoint.verify(|bytes| progress.add(bytes))?;
    drop(progress);
    let verified = Verified {
        tag: &checkpoint.manifest().tag,
        files: files.len(),
        bytes: files.iter().map(|file| file.bytes).sum(),
        damages: damages.iter().map(ToString::to_string).collect(),
    };
    Ok(Finished {
        status: u8::from(!damages.is_empty()),
        output: if arguments.json {
            json(&verified)
        } else {
            tables::verified(&verified)
        },
        complaint: String::new(),
    })
}

fn difference(arguments: &DiffArguments) -> Result<Finished, CheckpointError> {
    let open = |path: &Path| Checkpoint::locate(path, None);
    let (a, b) = (open(&arguments.a)?, open(&arguments.b)?);
    let difference = difference::Difference::between(&a, &b)?;
    Ok(Finished {
        status: u8::from(!difference.is_none()),
        output: if arguments.json {
            json(&difference)
        } else {
            difference.to_text()
        },
        complaint: String::new(),
    })
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("names and numbers are JSON") + "\n"
}
