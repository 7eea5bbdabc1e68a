//! Reading: the wanted bytes, verified.
//!
//! Chunks are read into memory of this process, verified there and used from there: what was verified is what is used,
//! and a file that is cut or lost meanwhile is an error with its name. Mapped files would end the process instead.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::chunks::{Chunks, Slot, read_chunks};
use crate::damage::Damage;
use crate::directory::{Directory, read_manifest};
use crate::error::CheckpointError;
use crate::files::{Files, Found, OpenFile, disk, is_of_a_save};
use crate::hash::{CHUNK_BYTES, ChunkHash, num_chunks};
use crate::manifest::Manifest;
use crate::names::{FOLDER_SUFFIX, MANIFEST};
use crate::plan::plan;
use crate::region::Region;

/// How often a checkpoint is looked for that another job removes or replaces meanwhile.
const LOOKS: usize = 20;

/// A complete checkpoint, open for reading.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Files,
    manifest: Manifest,
}

/// What is wanted of a tensor, and where to.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The tensor's name, or an alias.
    pub name: &'a str,
    /// What of it.
    pub region: Region,
    /// The memory that takes the region's elements, contiguous.
    pub into: &'a mut [u8],
}

/// What a read has touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Files.
    pub files: u64,
    /// Chunks, each read and verified once.
    pub chunks: u64,
    /// Bytes of these chunks.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens a checkpoint of a directory, the newest if no tag is given. All its files are there then, with their sizes,
    /// and no others; their bytes are verified where they are read.
    pub fn open(directory: &Directory, tag: Option<&str>) -> Result<Self, CheckpointError> {
        let is_newest = tag.is_none();
        Self::whole(look_again(is_newest, || {
            Self::look(directory, directory.find(tag)?)
        })?)
    }

    /// Opens the checkpoint that a user means by a path: that of a directory, or of a checkpoint's folder if no tag is given.
    pub fn locate(path: &Path, tag: Option<&str>) -> Result<Self, CheckpointError> {
        Self::whole(Self::inspect(path, tag)?)
    }

    /// What [`locate`](Self::locate) opens, and its files that are missing, too many or of other sizes.
    pub fn inspect(path: &Path, tag: Option<&str>) -> Result<(Self, Vec<Damage>), CheckpointError> {
        let directory = Directory::new(path)?;
        look_again(tag.is_none(), || {
            Self::look(&directory, directory.locate(tag)?)
        })
    }

    fn whole((checkpoint, damages): (Self, Vec<Damage>)) -> Result<Self, CheckpointError> {
        if damages.is_empty() {
            Ok(checkpoint)
        } else {
            Err(checkpoint.damaged(damages))
        }
    }

    fn look(
        directory: &Directory,
        folder: PathBuf,
    ) -> Result<(Self, Vec<Damage>), CheckpointError> {
        let path = folder.join(MANIFEST);
        let files = directory.files().clone();
        let manifest = read_manifest(&files, &path).map_err(|error| {
            if error.is_absence() && !directory.has_folder(&folder) {
                let folder = folder.clone();
                CheckpointError::Gone { folder }
            } else {
                error
            }
        })?;
        let name = folder.file_name().map(|name| name.to_string_lossy());
        let expected = name
            .as_ref()
            .and_then(|name| name.strip_suffix(FOLDER_SUFFIX));
        if let Some(expected) = expected.filter(|tag| **tag != manifest.tag) {
            return Err(CheckpointError::OtherTag {
                path,
                found: manifest.tag,
                expected: expected.to_owned(),
            });
        }
        let checkpoint = Self {
            folder,
            files,
            manifest,
        };
        let damages = checkpoint.damaged_files();
        let damages = damages.map_err(|error| checkpoint.explained(error))?;
        if !damages.is_empty() && checkpoint.is_gone() {
            return Err(checkpoint.gone());
        }
        Ok((checkpoint, damages))
    }

    /// Whether its folder has another manifest by now, or none.
    pub(crate) fn is_gone(&self) -> bool {
        match read_manifest(&self.files, &self.folder.join(MANIFEST)) {
            Ok(found) => found != self.manifest,
            Err(error) => error.is_absence(),
        }
    }

    pub(crate) fn gone(&self) -> CheckpointError {
        CheckpointError::Gone {
            folder: self.folder.clone(),
        }
    }

    /// An error of reading, which is none of the checkpoint's where it is not there any more.
    pub(crate) fn explained(&self, error: CheckpointError) -> CheckpointError {
        let is_of_files = matches!(error, CheckpointError::Damaged { .. }) || error.is_absence();
        if is_of_files && self.is_gone() {
            self.gone()
        } else {
            error
        }
    }

    /// What it holds, and where.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads all that is wanted, each touched chunk once, in the order of the files.
    ///
    /// # Errors
    ///
    /// A tensor or region is not in the checkpoint, or a touched chunk or header is not as it was written. What the
    /// memory then holds is not said.
    pub fn read(&self, wanted: Vec<Wanted<'_>>) -> Result<Touched, CheckpointError> {
        let mut chunks = Chunks::new();
        for one in wanted {
            self.place(one, &mut chunks)?;
        }
        let mut files: Vec<usize> = chunks.keys().map(|(file, _)| *file).collect();
        files.dedup();
        for &file in &files {
            for chunk in 0..num_chunks(self.manifest.files[file].data_begin) {
                chunks.entry((file, chunk)).or_default();
            }
        }
        let mut touched = Touched {
            files: files.len() as u64,
            ..Touched::default()
        };
        for &(number, chunk) in chunks.keys() {
            let range = self.range(number, chunk);
            touched.chunks += 1;
            touched.bytes += range.end - range.start;
        }
        read_chunks(self, chunks).map_err(|error| self.explained(error))?;
        Ok(touched)
    }

    /// Notes which chunks hold what is wanted.
    fn place<'a>(
        &self,
        wanted: Wanted<'a>,
        chunks: &mut Chunks<'a>,
    ) -> Result<(), CheckpointError> {
        let Some(tensor) = self.manifest.tensor(wanted.name) else {
            return Err(CheckpointError::NoTensor {
                folder: self.folder.clone(),
                name: wanted.name.to_owned(),
            });
        };
        let mut reads = plan(tensor, &wanted.region).map_err(|source| CheckpointError::Plan {
            folder: self.folder.clone(),
            source: Box::new(source),
        })?;
        let expected = reads.iter().map(|read| read.bytes).sum();
        let given = wanted.into.len() as u64;
        if given != expected {
            return Err(CheckpointError::Memory {
                name: wanted.name.to_owned(),
                given,
                expected,
            });
        }
        reads.sort_unstable_by_key(|read| read.destination);
        let mut rest = wanted.into;
        for read in reads {
            let mut at = self.manifest.files[read.file].data_begin + read.source;
            let mut bytes = read.bytes;
            while bytes > 0 {
                let (chunk, from) = (at / CHUNK_BYTES, at % CHUNK_BYTES);
                let now = bytes.min(CHUNK_BYTES - from);
                let (into, later) = rest.split_at_mut(now as usize);
                let from = from as usize;
                let slots = chunks.entry((read.file, chunk)).or_default();
                slots.push(Slot { from, into });
                rest = later;
                at += now;
                bytes -= now;
            }
        }
        Ok(())
    }

    pub(crate) fn damaged_files(&self) -> Result<Vec<Damage>, CheckpointError> {
        let listed = self.files.list(&self.folder)?.into_iter();
        let mut there: BTreeMap<String, Option<u64>> =
            listed.map(|one| (one.name, one.bytes)).collect();
        there.remove(MANIFEST);
        let mut damages = Vec::new();
        for file in &self.manifest.files {
            let (name, expected) = (file.name.clone(), file.bytes);
            match there.remove(&name) {
                Some(Some(found)) if found == expected => {}
                Some(None) => damages.push(Damage::NotRegular { file: name }),
                Some(Some(found)) => damages.push(Damage::Size {
                    file: name,
                    found,
                    expected,
                }),
                None => damages.push(Damage::Missing { file: name }),
            }
        }
        match self.files {
            Files::Disk => there.retain(|name, _| !disk::goes_by_itself(name)),
            Files::Store(_) => there.retain(|name, _| !is_of_a_save(name)),
        }
        damages.extend(there.into_keys().map(|file| Damage::Extra { file }));
        Ok(damages)
    }

    fn damaged(&self, damages: Vec<Damage>) -> CheckpointError {
        CheckpointError::Damaged {
            folder: self.folder.clone(),
            damages,
        }
    }

    /// Where its files are.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    pub(crate) fn open_file(&self, number: usize) -> Result<OpenFile, CheckpointError> {
        let path = self.folder.join(&self.manifest.files[number].name);
        self.files.open(&path)
    }

    /// Where a chunk lies in its file.
    pub(crate) fn range(&self, number: usize, chunk: u64) -> Range<u64> {
        let begin = chunk * CHUNK_BYTES;
        begin..(begin + CHUNK_BYTES).min(self.manifest.files[number].bytes)
    }

    pub(crate) fn read_chunk(
        &self,
        file: &OpenFile,
        number: usize,
        chunk: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        self.read_at(file, number, self.range(number, chunk).start, into)?;
        self.verify_chunk(number, chunk, into)
    }

    /// Compares a chunk with what was written.
    pub(crate) fn verify_chunk(
        &self,
        number: usize,
        chunk: u64,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let hash = ChunkHash::of(bytes);
        let place = chunk as usize;
        let files = &self.manifest.files;
        if hash == files[number].chunks[place] {
            return Ok(());
        }
        let owner = files
            .iter()
            .find(|one| one.chunks.get(place) == Some(&hash));
        let range = self.range(number, chunk);
        Err(self.damaged(vec![Damage::Chunk {
            file: files[number].name.clone(),
            begin: range.start,
            end: range.end,
            belongs_to: owner.map(|owner| owner.name.clone()),
        }]))
    }

    pub(crate) fn read_at(
        &self,
        file: &OpenFile,
        number: usize,
        begin: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let expected = &self.manifest.files[number];
        let path = self.folder.join(&expected.name);
        let name = expected.name.clone();
        let damage = match file.read_at(&path, begin, into)? {
            Found::All => return Ok(()),
            Found::Only(found) => Damage::Size {
                file: name,
                found,
                expected: expected.bytes,
            },
            Found::Nothing => Damage::Missing { file: name },
        };
        Err(self.damaged(vec![damage]))
    }
}

/// Looks for a checkpoint again while it goes. The newest is looked for again, too, where the one that was named is not there.
fn look_again<T>(
    is_newest: bool,
    mut look: impl FnMut() -> Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    for _ in 1..LOOKS {
        match look() {
            Err(error) if error.is_passing() => {}
            Err(CheckpointError::NoCheckpoint { .. }) if is_newest => {}
            other => return other,
        }
    }
    look()
}
