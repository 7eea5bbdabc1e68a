//! Why a checkpoint is not written, or not read.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::assemble::AssembleError;
use crate::damage::Damage;
use crate::files::StoreError;
use crate::foreign::ForeignError;
use crate::manifest::ManifestError;
use crate::names::NameError;
use crate::part::PieceError;
use crate::plan::PlanError;

/// Why a checkpoint is not written, or not read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Files that would hold next to nothing.
    #[error(
        "{files} files are too many for a checkpoint of {bytes} bytes; allowed are up to {most}: any number of ranks loads them"
    )]
    TooManyFiles {
        /// How many were asked for.
        files: u16,
        /// The bytes of all tensors.
        bytes: u64,
        /// How many are allowed.
        most: u64,
    },
    /// The tag, or a part's name, cannot be used.
    #[error("{name:?} cannot be the name of a {what}: {source}")]
    Name {
        /// What it was to be.
        what: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        source: NameError,
    },
    /// A path that is neither a folder nor an address in a store.
    #[error("{path:?} is not taken as a folder: {problem}")]
    NoPlace {
        /// The path.
        path: PathBuf,
        /// What is wrong with it, and what is allowed.
        problem: &'static str,
    },
    /// More than is read again.
    #[error(
        "{} would have {bytes} bytes, and {allowed} are allowed: keep large user content in tensors, or in a file of its own",
        path.display()
    )]
    LargeManifest {
        /// The manifest.
        path: PathBuf,
        /// How many bytes it would have.
        bytes: u64,
        /// How many are allowed.
        allowed: u64,
    },
    /// A manifest may have been written, or not.
    #[error(
        "{source}; whether the store has it all the same is not known, so that what this save wrote in {} stays: the next save \
         of this tag removes it",
        folder.display()
    )]
    Unsure {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// What failed.
        source: Box<CheckpointError>,
    },
    /// What a failed save has written could not be removed.
    #[error(
        "{source}; what this save wrote in {} stays, and the next save of this tag removes it: {left}",
        folder.display()
    )]
    Left {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// Why the save failed.
        source: Box<CheckpointError>,
        /// Why it stays.
        left: Box<CheckpointError>,
    },
    /// Another job saves into the directory.
    #[error(
        "another job has been saving into {} for {seconds} s; give each job a directory of its own, and end those that still \
         run from before",
        path.display()
    )]
    Busy {
        /// The directory.
        path: PathBuf,
        /// How long this job has waited for it.
        seconds: f64,
    },
    /// The file system refuses.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// An object store refuses, or does not answer.
    #[error("cannot {action} {}: {source}", path.display())]
    Store {
        /// What was asked.
        action: &'static str,
        /// The address of what it was asked of.
        path: PathBuf,
        /// What it said.
        source: Box<StoreError>,
    },
    /// A file was not written in full.
    #[error("{}: {written} of {wanted} bytes were written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// How many bytes were written.
        written: u64,
        /// How many it was to have.
        wanted: u64,
        /// What the file system said.
        source: io::Error,
    },
    /// A piece cannot be written.
    #[error("{}: {source}", path.display())]
    Piece {
        /// The file that it was to be in.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<PieceError>,
    },
    /// A rank says that it has written a file, which is not there.
    #[error(
        "{} was written by another rank and {found}: the checkpoint's folder has to be the same for all ranks",
        path.display()
    )]
    PartElsewhere {
        /// The file as the rank that writes the manifest sees it.
        path: PathBuf,
        /// What that one finds.
        found: String,
    },
    /// The parts do not make a checkpoint.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// There is a checkpoint of this name already, which this file system cannot replace in one step.
    #[error(
        "{} exists, and this file system cannot exchange it with the new one in one step ({source}): save under another \
         tag, or remove it first",
        path.display()
    )]
    NoExchange {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// It is there already, and is not to be replaced.
    #[error("{} exists already", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A folder that is not replaced, because it holds what would be lost.
    #[error("{} is not replaced: it holds {found}, which no export has written", path.display())]
    NotReplaceable {
        /// The folder.
        path: PathBuf,
        /// What it holds.
        found: String,
    },
    /// A new checkpoint in the directory of the one that it is made of.
    #[error("{} is the directory of the checkpoint itself: write the new one into another", path.display())]
    SameDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// There is nothing to export.
    #[error("the checkpoint in {} has no tensors under \"model/\"", folder.display())]
    NoModel {
        /// The checkpoint's folder.
        folder: PathBuf,
    },
    /// A tensor with a name that the format keeps for itself.
    #[error("tensor {name:?} has a name that files of tensors cannot hold")]
    ReservedName {
        /// The tensor's name.
        name: String,
    },
    /// There is nothing to import.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json; other formats, such as pickles, are not read",
        folder.display()
    )]
    NoForeignModel {
        /// The folder.
        folder: PathBuf,
    },
    /// A folder is a checkpoint of torch, whose own library reads it.
    #[error(
        "{} is a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle: import it in Python by \
         smp.import_torch_checkpoint, which runs nothing that is in it",
        folder.display()
    )]
    TorchDistributed {
        /// The folder.
        folder: PathBuf,
    },
    /// A file that others wrote cannot be used.
    #[error("{}: {source}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Box<ForeignError>,
    },
    /// `newest` does not name a checkpoint in the form in which it was written.
    #[error("{} is not as it was written: name a checkpoint by its tag", path.display())]
    Newest {
        /// The file.
        path: PathBuf,
    },
    /// No thread can be started.
    #[error("cannot start a thread that writes: {source}")]
    NoThread {
        /// Why not.
        source: io::Error,
    },
    /// A thread that wrote has ended early.
    #[error("the thread that wrote a part of a checkpoint has panicked")]
    Panicked,
    /// A part that was written in the background failed, and nobody waited for it.
    #[error("an earlier part of a checkpoint could not be written: {0}")]
    Earlier(Arc<CheckpointError>),
    /// No checkpoint was ever completed here, or `newest` is gone.
    #[error("{} names no newest checkpoint{}", directory.display(), there(.found))]
    NoNewest {
        /// Where one was looked for.
        directory: PathBuf,
        /// The checkpoints that are there.
        found: Vec<String>,
    },
    /// There is no checkpoint of this name.
    #[error("there is no checkpoint {tag:?} in {}{}", directory.display(), there(.found))]
    NoCheckpoint {
        /// Where one was looked for.
        directory: PathBuf,
        /// Its tag.
        tag: String,
        /// The checkpoints that are there.
        found: Vec<String>,
    },
    /// The manifest cannot be used.
    #[error("{}: {source}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// The manifest is another checkpoint's.
    #[error("{} is the manifest of checkpoint {found:?}, not of {expected:?}", path.display())]
    OtherTag {
        /// The manifest.
        path: PathBuf,
        /// Its tag.
        found: String,
        /// That of its folder.
        expected: String,
    },
    /// Files are not as they were written.
    #[error("the checkpoint in {} is damaged: {}", folder.display(), listed(.damages))]
    Damaged {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// What is wrong with them.
        damages: Vec<Damage>,
    },
    /// Another job has removed the checkpoint, or replaced it, since it was opened.
    #[error(
        "the checkpoint in {} was removed or replaced while it was read, as by a job that keeps the newest ones only: nothing \
         is wrong with those that are there",
        folder.display()
    )]
    Gone {
        /// The checkpoint's folder.
        folder: PathBuf,
    },
    /// The checkpoint has no such tensor.
    #[error("the checkpoint in {} has no tensor {name:?}", folder.display())]
    NoTensor {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The tensor's name.
        name: String,
    },
    /// A region cannot be read.
    #[error("{}: {source}", folder.display())]
    Plan {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// Why not.
        source: Box<PlanError>,
    },
    /// The memory to read into has another size than what is read.
    #[error("tensor {name:?}: {given} bytes of memory were given for {expected}")]
    Memory {
        /// The tensor's name.
        name: String,
        /// How many bytes of memory.
        given: u64,
        /// How many bytes are read.
        expected: u64,
    },
}

impl CheckpointError {
    /// Whether a file is not there, or no longer.
    pub(crate) fn is_absence(&self) -> bool {
        use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
        let gone = [NotFound, StaleNetworkFileHandle];
        matches!(self, Self::Io { source, .. } if gone.contains(&source.kind()))
    }

    /// Whether a store was asked and has not answered, so that what was asked may still be done.
    pub(crate) fn is_without_answer(&self) -> bool {
        let Self::Store { source, .. } = self else {
            return false;
        };
        matches!(**source, StoreError::Deadline(_) | StoreError::NoThread)
    }

    /// Whether it is of a checkpoint that went meanwhile: who looks again may find another.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

fn listed(damages: &[Damage]) -> String {
    let damages = damages.iter().map(ToString::to_string);
    damages.collect::<Vec<_>>().join("; ")
}

fn there(found: &[String]) -> String {
    if found.is_empty() {
        "; no checkpoint is there".to_owned()
    } else {
        format!("; there are {}", found.join(", "))
    }
}

/// For `map_err`: what was tried with which path.
pub(crate) fn cannot(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}
