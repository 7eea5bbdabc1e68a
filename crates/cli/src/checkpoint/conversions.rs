//! Other forms of checkpoints.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use shardwright_checkpoint::{
    Checkpoint, CheckpointError, Directory, ExportOptions, ForeignModel, Manifest, Tensor,
    export_full, reshard as rewrite,
};
use shardwright_timeline::size;

use super::json;
use super::progress::Progress;
use crate::Finished;

/// So many files may be written of any checkpoint, and more of one that has something for each.
const ALWAYS_ALLOWED: u64 = 1024;
const FEWEST_BYTES: u64 = 4 << 10;

/// What `export` writes.
#[derive(Clone, Debug, Args)]
pub struct ExportArguments {
    #[command(flatten)]
    from: From,
    /// The folder to write, in the layout of the Hugging Face libraries.
    #[arg(long, value_name = "OUT")]
    full: PathBuf,
    /// The largest size of a file, such as 500MB or 2GiB.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = bytes)]
    max_shard_size: u64,
    #[command(flatten)]
    how: How,
}

/// What `reshard` writes.
#[derive(Clone, Debug, Args)]
pub struct ReshardArguments {
    #[command(flatten)]
    from: From,
    /// The directory of checkpoints to write into, which need not exist; or `s3://BUCKET/PREFIX`.
    out: PathBuf,
    /// How many files to write: as many as ranks will read them.
    #[arg(long, value_name = "N")]
    ranks: NonZeroU16,
    #[command(flatten)]
    how: How,
}

/// What `import` reads and writes.
#[derive(Clone, Debug, Args)]
pub struct ImportArguments {
    /// The folder with model.safetensors, or with model.safetensors.index.json and its files.
    folder: PathBuf,
    /// The directory of checkpoints to write into, which need not exist.
    out: PathBuf,
    /// The new checkpoint's tag.
    #[arg(long, default_value = "imported")]
    tag: String,
    /// How many files to write; as many as are read if not given.
    #[arg(long, value_name = "N")]
    ranks: Option<NonZeroU16>,
    #[command(flatten)]
    how: How,
}

/// The checkpoint to read.
#[derive(Clone, Debug, Args)]
struct From {
    /// The directory of the checkpoints, or the folder of one; or `s3://BUCKET/PREFIX`.
    path: PathBuf,
    /// Its tag; the newest if none is given.
    #[arg(long)]
    tag: Option<String>,
}

impl From {
    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::locate(&self.path, self.tag.as_deref())
    }
}

#[derive(Clone, Copy, Debug, Args)]
struct How {
    /// Replace what an earlier run wrote there.
    #[arg(long)]
    force: bool,
    /// Write one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was written.
#[derive(Serialize)]
struct Written {
    path: PathBuf,
    tensors: usize,
    bytes: u64,
    files: Vec<String>,
}

impl Written {
    fn new(folder: PathBuf, manifest: &Manifest) -> Self {
        let tensors = &manifest.tensors;
        Self {
            path: folder,
            tensors: tensors.len(),
            bytes: tensors.iter().map(Tensor::num_bytes).sum(),
            files: manifest
                .files
                .iter()
                .map(|file| file.name.clone())
                .collect(),
        }
    }

    fn finished(&self, how: How) -> Finished {
        let Self {
            path,
            tensors,
            bytes,
            files,
        } = self;
        let files = files.len();
        let output = if how.json {
            json(self)
        } else {
            let (path, bytes) = (path.display(), size(*bytes));
            format!("{path}: {tensors} tensors with {bytes} in {files} files\n")
        };
        Finished {
            output,
            ..Finished::default()
        }
    }
}

pub(super) fn export(arguments: &ExportArguments) -> Result<Finished, CheckpointError> {
    let checkpoint = arguments.from.open()?;
    let model = checkpoint.manifest().tensors.iter();
    let model = model.filter(|tensor| tensor.name.starts_with("model/"));
    let progress = Progress::new("exporting", model.map(Tensor::num_bytes).sum());
    let options = ExportOptions {
        max_shard_bytes: arguments.max_shard_size,
        replace: arguments.how.force,
    };
    let exported = export_full(&checkpoint, &arguments.full, options, &mut |bytes| {
        progress.add(bytes);
    });
    drop(progress);
    let exported = exported?;
    let written = Written {
        path: arguments.full.clone(),
        tensors: exported.tensors,
        bytes: exported.bytes,
        files: exported.files,
    };
    let mut finished = written.finished(arguments.how);
    if !exported.has_config {
        let complaint = "shardwright checkpoint: the checkpoint has no configuration of a transformers model \
                              (huggingface_config in its user content), so config.json was not written\n";
        finished.complaint.push_str(complaint);
    }
    Ok(finished)
}

pub(super) fn reshard(arguments: &ReshardArguments) -> Result<Finished, CheckpointError> {
    let checkpoint = arguments.from.open()?;
    let into = Directory::new(&arguments.out)?;
    let bytes = checkpoint.manifest().tensors.iter().map(Tensor::num_bytes);
    check_files(arguments.ranks, bytes.fold(0, u64::saturating_add))?;
    let all = checkpoint.manifest().tensors.iter();
    let progress = Progress::new("resharding", all.map(Tensor::num_bytes).sum());
    let force = arguments.how.force;
    let done = rewrite(&checkpoint, &into, arguments.ranks, force, &mut |bytes| {
        progress.add(bytes);
    });
    drop(progress);
    let manifest = done?.manifest;
    Ok(Written::new(into.folder(&manifest.tag), &manifest).finished(arguments.how))
}

pub(super) fn import(arguments: &ImportArguments) -> Result<Finished, CheckpointError> {
    let mut model = ForeignModel::open(&arguments.folder)?;
    let into = Directory::new(&arguments.out)?;
    let as_many = u16::try_from(model.num_files()).unwrap_or(u16::MAX);
    let as_many = NonZeroU16::new(as_many).unwrap_or(NonZeroU16::MIN);
    let parts = arguments.ranks.unwrap_or(as_many);
    check_files(parts, model.num_bytes())?;
    let progress = Progress::new("importing", model.num_bytes());
    let force = arguments.how.force;
    let done = model.import(&into, &arguments.tag, parts, force, &mut |bytes| {
        progress.add(bytes);
    });
    drop(progress);
    let manifest = done?;
    Ok(Written::new(into.folder(&manifest.tag), &manifest).finished(arguments.how))
}

/// Refuses files that would hold next to nothing, each of which takes its time.
fn check_files(files: NonZeroU16, bytes: u64) -> Result<(), CheckpointError> {
    let most = (bytes / FEWEST_BYTES).max(ALWAYS_ALLOWED);
    if u64::from(files.get()) > most {
        return Err(CheckpointError::TooManyFiles {
            files: files.get(),
            bytes,
            most,
        });
    }
    Ok(())
}

/// A size such as 5GB, 500MiB or 12345, as `transformers` has them.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|one: char| one.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return Err("the unit is none of KB, MB, GB, TB, KiB, MiB, GiB, TiB".to_owned()),
    };
    let number: u64 = digits
        .trim_end()
        .parse()
        .map_err(|_| "a size is a whole number and a unit, such as 500MB or 2GiB".to_owned())?;
    let bytes = number.checked_mul(unit).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "the size is 0, or beyond 64 bits".to_owned())
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_those_of_transformers() {
        for (text, expected) in [
            ("5GB", 5_000_000_000),
            ("1GiB", 1 << 30),
            ("7", 7),
            ("2 KB", 2000),
        ] {
            assert_eq!(bytes(text), Ok(expected));
        }
        for text in ["", "GB", "0", "-1GB", "1.5GB", "5gb", "99999999999TB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
