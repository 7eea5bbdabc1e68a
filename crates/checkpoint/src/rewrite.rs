//! A checkpoint out of the bytes of other files.

use std::num::NonZeroU16;
use std::path::Path;

use crate::assemble::Description;
use crate::directory::{Directory, checked_tag};
use crate::error::CheckpointError;
use crate::files::disk;
use crate::manifest::{Manifest, Tensor};
use crate::part::{PartReport, PieceSpec};
use crate::read::{Checkpoint, Touched};
use crate::recut::{Cut, recut};
use crate::stream::{BLOCK_BYTES, Source, Verified};
use crate::write::{abandon, commit, stream_part};

/// What resharding did.
#[derive(Clone, Debug, PartialEq)]
pub struct Resharded {
    /// The new checkpoint's manifest.
    pub manifest: Manifest,
    /// What was read.
    pub touched: Touched,
}

/// Writes a checkpoint's tensors into `parts` files of equal sizes, as a new checkpoint of the same tag in another
/// directory. Every byte is read once, in order, and verified; what the checkpoint says of its job stays. `progress` is
/// told how many bytes have been written since it was told last. A checkpoint of the tag that is there already is
/// replaced only with `replace`.
///
/// # Errors
///
/// A file is not as it was written, or the file system refuses. What was written is removed then.
pub fn reshard(
    source: &Checkpoint,
    into: &Directory,
    parts: NonZeroU16,
    replace: bool,
    progress: &mut dyn FnMut(u64),
) -> Result<Resharded, CheckpointError> {
    let manifest = source.manifest();
    if is_inside(source.folder(), into.path()) {
        return Err(CheckpointError::SameDirectory {
            path: into.path().to_owned(),
        });
    }
    let description = Description {
        library_version: env!("CARGO_PKG_VERSION").to_owned(),
        step: manifest.step,
        degrees: manifest.degrees,
        partition: manifest.partition.clone(),
        aliases: manifest.aliases.clone(),
        user_content: manifest.user_content.clone(),
    };
    let mut reader = Verified::new(source);
    let target = Target {
        directory: into,
        tag: &manifest.tag,
        parts,
        replace,
    };
    let written = target.write(&manifest.tensors, description, &mut reader, progress)?;
    Ok(Resharded {
        manifest: written,
        touched: reader.touched(),
    })
}

/// Whether a folder is in this one, whatever they are called. Addresses in a store are compared as they are.
fn is_inside(folder: &Path, directory: &Path) -> bool {
    if folder.parent() == Some(directory) {
        return true;
    }
    let (Ok(folder), Ok(directory)) = (folder.canonicalize(), directory.canonicalize()) else {
        return false; // a directory that is not there yet
    };
    folder.parent() == Some(&*directory)
}

/// Where a checkpoint goes.
pub(crate) struct Target<'a> {
    pub(crate) directory: &'a Directory,
    pub(crate) tag: &'a str,
    pub(crate) parts: NonZeroU16,
    pub(crate) replace: bool,
}

impl Target<'_> {
    /// Writes the tensors, whose pieces are in the source's files.
    pub(crate) fn write(
        &self,
        tensors: &[Tensor],
        description: Description,
        source: &mut dyn Source,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Manifest, CheckpointError> {
        checked_tag(self.tag)?;
        if !self.replace && self.directory.has(self.tag)? {
            let path = self.directory.folder(self.tag);
            return Err(CheckpointError::Exists { path });
        }
        let new = if self.directory.is_in_store() {
            Vec::new()
        } else {
            disk::missing(self.directory.path())
        };
        // A job that saves there removes what it takes for left by others.
        let Some(_lock) = self.directory.try_lock()? else {
            let path = self.directory.path().to_owned();
            return Err(CheckpointError::Busy { path, seconds: 0.0 });
        };
        abandon(self.directory, self.tag)?; // what an ended run left
        let written = self
            .write_parts(tensors, source, progress)
            .and_then(|parts| commit(self.directory, self.tag, description, parts, None));
        match written {
            Ok(committed) => Ok(committed.manifest),
            Err(error) => {
                abandon(self.directory, self.tag).ok(); // the error that is told is the one that came first
                disk::remove_empty(&new);
                Err(error)
            }
        }
    }

    fn write_parts(
        &self,
        tensors: &[Tensor],
        source: &mut dyn Source,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<PartReport>, CheckpointError> {
        let parts = self.parts.get();
        let mut block = Vec::new();
        let mut reports = Vec::new();
        for (number, cuts) in recut(tensors, parts.into()).iter().enumerate() {
            let name = format!("part-{number:05}-of-{parts:05}.safetensors");
            let specs: Vec<PieceSpec<'_>> = cuts.iter().map(Cut::spec).collect();
            let report = stream_part(self.directory, self.tag, &name, &specs, |place, sink| {
                for range in &cuts[place].from {
                    let (mut at, end) = (range.at, range.at + range.bytes);
                    while at < end {
                        let now = (end - at).min(BLOCK_BYTES);
                        block.resize(now as usize, 0);
                        source.read(range.file, at, &mut block)?;
                        sink(&block)?;
                        progress(now);
                        at += now;
                    }
                }
                Ok(())
            })?;
            reports.push(report);
        }
        Ok(reports)
    }
}
