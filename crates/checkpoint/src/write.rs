//! Writing: each rank its file, then one rank the manifest.
//!
//! - CK-1: a checkpoint's folder appears under its name complete, or not at all. In a store, that is its manifest.
//! - CK-2: whatever fails, checkpoints that were complete stay, and `newest` names one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::assemble::{Description, assemble};
use crate::directory::{
    Directory, EntryState, check_manifest_size, checked_tag, names_in, remove_folder, sync_folder,
};
use crate::eager::{EagerFile, write_file, write_slices};
use crate::error::{CheckpointError, cannot};
use crate::files::{Files, Store, disk, is_of_a_save};
use crate::hash::{ChunkHash, ChunkHasher, hash_chunks};
use crate::incoming::PartWriter;
use crate::leftovers::remove_leftovers;
use crate::manifest::{Manifest, PartFile};
use crate::names::{MANIFEST, check_file_name};
use crate::part::{PartLayout, PartReport, PieceError, PieceSpec, PieceView, lay_out};
use crate::retention::{Complete, superseded};

/// Writes a rank's pieces into its file of a checkpoint that is not complete yet, down to the disk. The bytes are written
/// from where they are, in one stream, while another thread hashes them. In a store, the file has a name that no other
/// attempt to save has, which the report tells; bytes are copied, and sent while further ones are hashed.
///
/// # Errors
///
/// A piece makes no sense, or the file system or the store refuses: nothing is left of the file then.
pub fn write_part(
    directory: &Directory,
    tag: &str,
    name: &str,
    pieces: &[PieceView<'_>],
) -> Result<PartReport, CheckpointError> {
    let path = path_of(directory, tag, name)?;
    let layout = lay_out(pieces).map_err(refused(&path))?;
    let data = layout.order.iter().map(|place| pieces[*place].bytes);
    let slices: Vec<&[u8]> = std::iter::once(&*layout.header).chain(data).collect();
    if let Files::Store(store) = directory.files() {
        return upload(store, &directory.writing(tag), name, &layout, |sink| {
            slices.iter().try_for_each(|slice| sink(slice))
        });
    }
    write_laid_out(&path, name, &layout, |file| {
        write_hashed(file, &path, &slices)
    })
}

/// Refuses what [`write_part`] would refuse before it writes.
pub(crate) fn check_part(
    directory: &Directory,
    tag: &str,
    name: &str,
    pieces: &[PieceView<'_>],
) -> Result<(), CheckpointError> {
    let path = path_of(directory, tag, name)?;
    lay_out(pieces).map(|_| ()).map_err(refused(&path))
}

/// Writes a file whose pieces are not all in memory, down to the disk. `fill` hands over the bytes of a piece, which is
/// given by its place, in any slices; the pieces come in the order of the file.
pub(crate) fn stream_part(
    directory: &Directory,
    tag: &str,
    name: &str,
    pieces: &[PieceSpec<'_>],
    mut fill: impl FnMut(usize, &mut Sink<'_>) -> Result<(), CheckpointError>,
) -> Result<PartReport, CheckpointError> {
    let mut part = PartWriter::begin(directory, tag, name, pieces)?;
    for place in part.order().to_vec() {
        fill(place, &mut |bytes: &[u8]| part.write(bytes))?;
    }
    part.finish()
}

/// Writes a file of a store, of which nothing is left after an error.
fn upload(
    store: &Store,
    folder: &Path,
    name: &str,
    layout: &PartLayout,
    fill: impl FnOnce(&mut Sink<'_>) -> Result<(), CheckpointError>,
) -> Result<PartReport, CheckpointError> {
    let (name, mut upload) = store.upload(folder, name, layout.bytes)?;
    let mut hasher = ChunkHasher::default();
    fill(&mut |bytes: &[u8]| {
        hasher.update(bytes);
        upload.write(bytes)
    })?;
    upload.finish()?;
    Ok(layout.report(&name, hasher.finish()))
}

/// Takes the next bytes of a file.
pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// Where a part is while its checkpoint is written.
pub(crate) fn path_of(
    directory: &Directory,
    tag: &str,
    name: &str,
) -> Result<PathBuf, CheckpointError> {
    checked_tag(tag)?;
    check_file_name(name).map_err(|source| CheckpointError::Name {
        what: "part",
        name: name.to_owned(),
        source,
    })?;
    Ok(directory.writing(tag).join(name))
}

pub(crate) fn refused(path: &Path) -> impl FnOnce(PieceError) -> CheckpointError {
    move |source| CheckpointError::Piece {
        path: path.to_owned(),
        source: Box::new(source),
    }
}

/// Creates the file and lets it be written; nothing is left of it after an error.
fn write_laid_out(
    path: &Path,
    name: &str,
    layout: &PartLayout,
    write: impl FnOnce(File) -> Result<Vec<ChunkHash>, CheckpointError>,
) -> Result<PartReport, CheckpointError> {
    let folder = path.parent().expect("a part is in a folder");
    disk::make_folder(folder).map_err(cannot("create", folder))?;
    let file = disk::create(path).map_err(cannot("create", path))?;
    let chunks = write(file)
        .and_then(|chunks| sync_folder(folder).map(|()| chunks))
        .inspect_err(|_| {
            // It is of no use, and may be what fills the disk. The error that is told is the one that came first.
            fs::remove_file(path).ok();
        })?;
    Ok(layout.report(name, chunks))
}

impl PartLayout {
    /// What is told of the file that was written.
    pub(crate) fn report(&self, name: &str, chunks: Vec<ChunkHash>) -> PartReport {
        let file = PartFile {
            name: name.to_owned(),
            bytes: self.bytes,
            data_begin: self.header.len() as u64,
            chunks,
        };
        PartReport {
            file,
            tensors: self.tensors.clone(),
        }
    }
}

fn write_hashed(
    file: File,
    path: &Path,
    slices: &[&[u8]],
) -> Result<Vec<ChunkHash>, CheckpointError> {
    thread::scope(|scope| {
        let hashing = thread::Builder::new().name("checkpoint-hash".to_owned());
        let hashing = hashing
            .spawn_scoped(scope, || hash_chunks(slices.iter().copied()))
            .map_err(cannot("start a thread for", path))?;
        let mut file = EagerFile::new(file);
        write_slices(&mut file, path, slices)?;
        file.sync().map_err(cannot("write to the disk", path))?;
        Ok(hashing.join().expect("hashing does not panic"))
    })
}

/// What a commit did.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// The manifest that was written.
    pub manifest: Manifest,
    /// The tags of older checkpoints that were removed.
    pub removed: Vec<String>,
}

/// Completes a checkpoint, after all ranks have written their files: writes the manifest, gives the folder its name in one
/// step (a checkpoint of the same tag is replaced in that step), and then makes it the newest. In a store the step is that of
/// writing the manifest. At most `keep` complete checkpoints are left.
///
/// # Errors
///
/// The parts do not make a checkpoint, or the file system or the store refuses. The checkpoints from before are then as they were, and
/// if the new one has got its name, it is complete. In a store, what was written goes, or the error says that it stays.
pub fn commit(
    directory: &Directory,
    tag: &str,
    description: Description,
    parts: Vec<PartReport>,
    keep: Option<NonZeroU32>,
) -> Result<Committed, CheckpointError> {
    let error = match try_commit(directory, tag, description, parts, keep) {
        Ok(committed) => return Ok(committed),
        Err(error) => error,
    };
    if !directory.is_in_store() {
        return Err(error); // whoever writes gives up its folder
    }
    Err(match abandon(directory, tag) {
        Ok(()) => error,
        Err(left) => CheckpointError::Left {
            folder: directory.folder(tag),
            source: Box::new(error),
            left: Box::new(left),
        },
    })
}

fn try_commit(
    directory: &Directory,
    tag: &str,
    description: Description,
    parts: Vec<PartReport>,
    keep: Option<NonZeroU32>,
) -> Result<Committed, CheckpointError> {
    checked_tag(tag)?;
    let writing = directory.writing(tag);
    check_parts(directory, &writing, &parts)?;
    let sequence = complete(directory)?
        .iter()
        .map(|one| one.sequence.saturating_add(1))
        .max()
        .unwrap_or(0);
    let manifest = assemble(tag, sequence, description, parts)?;
    let path = writing.join(MANIFEST);
    let bytes = manifest.to_bytes();
    check_manifest_size(&path, bytes.len() as u64)?;
    // What the parser would refuse later, such as values nested too deeply, is refused now.
    Manifest::from_bytes(&bytes).map_err(|source| CheckpointError::Manifest {
        path: path.clone(),
        source,
    })?;
    match directory.files() {
        Files::Disk => {
            write_file(&path, &bytes)?;
            sync_folder(&writing)?;
            give_name(directory, tag)?;
        }
        Files::Store(store) => store.write_manifest(&path, &bytes)?,
    }
    directory.set_newest(tag)?;
    match directory.files() {
        Files::Disk => {
            remove_folder(&writing)?; // what had the name before
            remove_leftovers(directory)?;
        }
        Files::Store(store) => {
            remove_of_saves(store, &directory.folder(tag), Some(&manifest))?;
        }
    }
    let removed = match keep {
        Some(keep) => superseded(&complete(directory)?, Some(tag), keep),
        None => Vec::new(),
    };
    for old in &removed {
        directory.remove(old)?;
    }
    Ok(Committed { manifest, removed })
}

/// Removes what was written of a checkpoint that will not be completed. One of the same tag that is complete stays.
pub fn abandon(directory: &Directory, tag: &str) -> Result<(), CheckpointError> {
    checked_tag(tag)?;
    match directory.files() {
        Files::Disk => remove_folder(&directory.writing(tag)),
        Files::Store(store) if store.is_unsure() => Ok(()), // the next save of this tag removes it
        Files::Store(store) => {
            let complete = match directory.manifest(tag) {
                Ok(manifest) => Some(manifest),
                Err(error) if error.is_absence() => None,
                Err(error) => return Err(error),
            };
            remove_of_saves(store, &directory.folder(tag), complete.as_ref())
        }
    }
}

/// Removes what attempts to save a tag have left in a store, besides what the manifest names.
fn remove_of_saves(
    store: &Store,
    folder: &Path,
    manifest: Option<&Manifest>,
) -> Result<(), CheckpointError> {
    let is_named = |name: &str| {
        manifest.is_some_and(|manifest| {
            let files = &manifest.files;
            files.binary_search_by(|one| (*one.name).cmp(name)).is_ok()
        })
    };
    let all = store.list(folder)?.into_iter().map(|one| one.name);
    let left = all.filter(|name| is_of_a_save(name) && !is_named(name));
    store.remove(folder, left)
}

/// All files are there. On a disk, others are of an earlier job that was ended while it wrote, and go; in a store they go
/// when the manifest does not name them any more.
fn check_parts(
    directory: &Directory,
    writing: &Path,
    parts: &[PartReport],
) -> Result<(), CheckpointError> {
    let files = directory.files();
    let there: Option<BTreeMap<String, Option<u64>>> = match files {
        Files::Disk => None,
        Files::Store(_) => {
            let listed = files.list(writing)?.into_iter();
            Some(listed.map(|one| (one.name, one.bytes)).collect())
        }
    };
    for PartReport { file, .. } in parts {
        let path = writing.join(&file.name);
        let bytes = match &there {
            Some(there) => there.get(&file.name).copied().flatten(),
            None => match path.symlink_metadata() {
                Ok(found) => found.is_file().then_some(found.len()),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(cannot("look at", &path)(error)),
            },
        };
        let found = match bytes {
            Some(found) if found == file.bytes => continue,
            Some(found) => format!("has {found} of its {} bytes here", file.bytes),
            None => "is not there".to_owned(),
        };
        return Err(CheckpointError::PartElsewhere { path, found });
    }
    if there.is_some() {
        return Ok(());
    }
    let ours: BTreeSet<&str> = parts.iter().map(|part| &*part.file.name).collect();
    for name in names_in(writing)? {
        if !ours.contains(&*name) && !disk::goes_by_itself(&name) {
            let path = writing.join(name);
            fs::remove_file(&path).map_err(cannot("remove", &path))?;
        }
    }
    Ok(())
}

fn complete(directory: &Directory) -> Result<Vec<Complete>, CheckpointError> {
    let entries = directory.entries()?.into_iter();
    let complete = entries.filter_map(|entry| match entry.state {
        EntryState::Complete(manifest) => Some(Complete {
            tag: entry.tag,
            sequence: manifest.sequence,
        }),
        EntryState::Unusable(_) | EntryState::Incomplete => None,
    });
    Ok(complete.collect())
}

/// The one step (CK-1).
fn give_name(directory: &Directory, tag: &str) -> Result<(), CheckpointError> {
    let (writing, folder) = (directory.writing(tag), directory.folder(tag));
    if folder.symlink_metadata().is_ok() {
        renameat_with(CWD, &writing, CWD, &folder, RenameFlags::EXCHANGE).map_err(|error| {
            CheckpointError::NoExchange {
                path: folder.clone(),
                source: error.into(),
            }
        })?;
    } else {
        fs::rename(&writing, &folder).map_err(cannot("name", &folder))?;
    }
    sync_folder(directory.path())
}
