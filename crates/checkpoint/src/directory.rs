//! A directory of checkpoints: which are there, and which one is the newest.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

use crate::error::{CheckpointError, cannot};
use crate::files::Files;
use crate::manifest::Manifest;
use crate::names::{FOLDER_SUFFIX, MANIFEST, NEWEST, REMOVING, WRITING, check_tag};

/// A directory of checkpoints: a folder for each, and the file `newest` with the tag of the one that was completed last. It is
/// on a disk, or in an object store.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    files: Files,
}

/// A checkpoint of a directory, or what is left of one.
#[derive(Debug)]
pub struct Entry {
    /// Its tag.
    pub tag: String,
    /// What it is.
    pub state: EntryState,
}

/// What a checkpoint's folder holds.
#[derive(Debug)]
pub enum EntryState {
    /// A checkpoint; of its files only the manifest was looked at.
    Complete(Box<Manifest>),
    /// One that cannot be used.
    Unusable(CheckpointError),
    /// One that is being written, or whose writing was ended midway.
    Incomplete,
}

impl Directory {
    /// The directory at this path, which need not exist yet; or at the address `s3://BUCKET/PREFIX`, which is looked at when
    /// something is asked of it first.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let files = Files::of(&path);
        Self { path, files }
    }

    /// Refuses a directory that cannot be used: of an object store whether it answers, has the bucket, and accepts who asks.
    /// A folder is made when it is written to, so that there is nothing to ask.
    pub fn check(&self) -> Result<(), CheckpointError> {
        match &self.files {
            Files::Disk => Ok(()),
            Files::Store(_) => self.files.list(&self.path).map(|_| ()),
        }
    }

    /// Whether it is in an object store.
    pub fn is_in_store(&self) -> bool {
        matches!(self.files, Files::Store(_))
    }

    /// Where its files are.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of a checkpoint.
    pub fn folder(&self, tag: &str) -> PathBuf {
        self.path.join(format!("{tag}{FOLDER_SUFFIX}"))
    }

    /// The folder of a checkpoint that is there: of the newest if no tag is given.
    pub fn find(&self, tag: Option<&str>) -> Result<PathBuf, CheckpointError> {
        let tag = match tag {
            Some(tag) => {
                checked_tag(tag)?;
                tag.to_owned()
            }
            None => self.newest()?.ok_or_else(|| CheckpointError::NoNewest {
                directory: self.path.clone(),
                found: self.tags(),
            })?,
        };
        if self.has(&tag)? {
            return Ok(self.folder(&tag));
        }
        Err(CheckpointError::NoCheckpoint {
            directory: self.path.clone(),
            found: self.tags(),
            tag,
        })
    }

    /// Whether a checkpoint is there, whatever its folder holds; in a store, whether it is complete.
    pub(crate) fn has(&self, tag: &str) -> Result<bool, CheckpointError> {
        let folder = self.folder(tag);
        match &self.files {
            Files::Disk => Ok(folder.symlink_metadata().is_ok()),
            Files::Store(_) => self.has_manifest(&folder),
        }
    }

    fn has_manifest(&self, folder: &Path) -> Result<bool, CheckpointError> {
        match &self.files {
            Files::Disk => Ok(folder.join(MANIFEST).is_file()),
            Files::Store(_) => {
                let listed = self.files.list(folder)?;
                Ok(listed.iter().any(|one| one.name == MANIFEST))
            }
        }
    }

    /// The folder of a checkpoint that a user means by a path: a directory of checkpoints, or the folder of one.
    pub(crate) fn locate(&self, tag: Option<&str>) -> Result<PathBuf, CheckpointError> {
        if tag.is_none() && self.has_manifest(&self.path)? {
            return Ok(self.path.clone());
        }
        self.find(tag)
    }

    /// Where the parts of a checkpoint are while it is not complete.
    pub(crate) fn writing(&self, tag: &str) -> PathBuf {
        match &self.files {
            Files::Disk => self.path.join(format!(".{tag}{FOLDER_SUFFIX}{WRITING}")),
            Files::Store(_) => self.folder(tag),
        }
    }

    /// The tag of the checkpoint that was completed last; `None` if there is none.
    pub fn newest(&self) -> Result<Option<String>, CheckpointError> {
        let path = self.path.join(NEWEST);
        let Some(bytes) = self.files.read(&path)? else {
            return Ok(None);
        };
        let text = String::from_utf8(bytes).unwrap_or_default();
        match text.split_once('\n') {
            Some((tag, _)) if check_tag(tag).is_ok() && text == newest_text(tag) => {
                Ok(Some(tag.to_owned()))
            }
            _ => Err(CheckpointError::Newest { path }),
        }
    }

    /// All that are there, ordered by when they were written; what is not complete comes last.
    pub fn entries(&self) -> Result<Vec<Entry>, CheckpointError> {
        let mut entries = Vec::new();
        for name in self.names()? {
            let unfinished = name.strip_prefix('.').and_then(|name| {
                let tag = name.strip_suffix(WRITING)?;
                tag.strip_suffix(FOLDER_SUFFIX)
            });
            let (tag, state) = if let Some(tag) = unfinished {
                (tag, EntryState::Incomplete)
            } else if let Some(tag) = name.strip_suffix(FOLDER_SUFFIX)
                && check_tag(tag).is_ok()
            {
                let state = match self.manifest(tag) {
                    Ok(manifest) => EntryState::Complete(Box::new(manifest)),
                    Err(error) if self.is_incomplete(&error) => EntryState::Incomplete,
                    Err(error) => EntryState::Unusable(error),
                };
                (tag, state)
            } else {
                continue;
            };
            entries.push(Entry {
                tag: tag.to_owned(),
                state,
            });
        }
        entries.sort_by_key(|entry| {
            let sequence = match &entry.state {
                EntryState::Complete(manifest) => manifest.sequence,
                EntryState::Unusable(_) | EntryState::Incomplete => u64::MAX,
            };
            (sequence, entry.tag.clone())
        });
        Ok(entries)
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        match &self.files {
            Files::Disk => names_in(&self.path),
            Files::Store(_) => {
                let listed = self.files.list(&self.path)?;
                Ok(listed.into_iter().map(|one| one.name).collect())
            }
        }
    }

    /// Whether a manifest is missing that is written last.
    fn is_incomplete(&self, error: &CheckpointError) -> bool {
        self.is_in_store() && error.is_absence()
    }

    /// The tags of checkpoints that are there, whatever is in their folders.
    pub(crate) fn tags(&self) -> Vec<String> {
        let names = self.names().unwrap_or_default().into_iter();
        let tags = names.filter_map(|name| name.strip_suffix(FOLDER_SUFFIX).map(str::to_owned));
        tags.filter(|tag| check_tag(tag).is_ok()).collect()
    }

    /// The manifest of a checkpoint.
    pub(crate) fn manifest(&self, tag: &str) -> Result<Manifest, CheckpointError> {
        let path = self.folder(tag).join(MANIFEST);
        let manifest = read_manifest(&self.files, &path)?;
        if manifest.tag != tag {
            return Err(CheckpointError::OtherTag {
                path,
                found: manifest.tag,
                expected: tag.to_owned(),
            });
        }
        Ok(manifest)
    }

    /// Makes a checkpoint the newest.
    pub fn set_newest(&self, tag: &str) -> Result<(), CheckpointError> {
        checked_tag(tag)?;
        let path = self.path.join(NEWEST);
        let text = newest_text(tag);
        if let Files::Store(store) = &self.files {
            return store.write(&path, text.into_bytes());
        }
        let beside = self.path.join(format!(".{NEWEST}{WRITING}"));
        write_file(&beside, text.as_bytes())?;
        fs::rename(&beside, &path).map_err(cannot("write", &path))?;
        sync_folder(&self.path)
    }

    /// Removes a checkpoint: its folder is another's from one moment to the next, so that no half of it is ever read. In a
    /// store its manifest goes first.
    pub fn remove(&self, tag: &str) -> Result<(), CheckpointError> {
        checked_tag(tag)?;
        if let Files::Store(store) = &self.files {
            let folder = self.folder(tag);
            store.remove(&folder, [MANIFEST.to_owned()])?;
            let left = self.files.list(&folder)?.into_iter();
            let left = left.filter(|one| one.bytes.is_some());
            return store.remove(&folder, left.map(|one| one.name));
        }
        let aside = self.path.join(format!(".{tag}{FOLDER_SUFFIX}{REMOVING}"));
        remove_folder(&aside)?;
        let folder = self.folder(tag);
        fs::rename(&folder, &aside).map_err(cannot("remove", &folder))?;
        sync_folder(&self.path)?;
        remove_folder(&aside)
    }
}

/// A line with the tag, and one with the hash of it, so that no byte changes unnoticed to that of another tag.
fn newest_text(tag: &str) -> String {
    format!("{tag}\n{}\n", blake3::hash(tag.as_bytes()).to_hex())
}

pub(crate) fn checked_tag(tag: &str) -> Result<(), CheckpointError> {
    check_tag(tag).map_err(|source| CheckpointError::Name {
        what: "checkpoint",
        name: tag.to_owned(),
        source,
    })
}

pub(crate) fn read_manifest(files: &Files, path: &Path) -> Result<Manifest, CheckpointError> {
    let bytes = files.read(path)?;
    let bytes = bytes.ok_or_else(|| cannot("read", path)(ErrorKind::NotFound.into()))?;
    Manifest::from_bytes(&bytes).map_err(|source| CheckpointError::Manifest {
        path: path.to_owned(),
        source,
    })
}

/// The names in a folder, in order; those that are no text are shown with replacements.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(folder).map_err(cannot("list", folder))?;
    let names: io::Result<Vec<String>> = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect();
    let mut names = names.map_err(cannot("list", folder))?;
    names.sort_unstable();
    Ok(names)
}

/// Writes a small file, down to the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = File::create(path).map_err(cannot("create", path))?;
    write_slices(&mut file, path, &[bytes])?;
    file.sync_all().map_err(cannot("write to the disk", path))
}

/// A file that goes to the disk while it is written. The kernel would begin with that when much memory is full of such data,
/// or at the end.
#[derive(Debug)]
pub(crate) struct EagerFile {
    file: File,
    written: u64,
    begun: u64,
}

impl EagerFile {
    /// How much is handed to the disk at once.
    const STRETCH: u64 = 16 << 20;

    /// A file at its beginning.
    pub(crate) fn new(file: File) -> Self {
        Self {
            file,
            written: 0,
            begun: 0,
        }
    }

    /// Waits until all is on the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

impl Write for EagerFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = (Self::STRETCH - (self.written - self.begun)) as usize;
        let count = self.file.write(&bytes[..bytes.len().min(room)])?;
        self.written += count as u64;
        if self.written - self.begun == Self::STRETCH {
            // Of data that are not on the disk yet, Linux begins to write those that will not be needed in memory. This is
            // advice: where it is not taken, the end is only later.
            let stretch = NonZeroU64::new(Self::STRETCH);
            fadvise(&self.file, self.begun, stretch, Advice::DontNeed).ok();
            self.begun = self.written;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes slices one after another, and tells how far it came if it fails.
pub(crate) fn write_slices(
    out: &mut impl Write,
    path: &Path,
    slices: &[&[u8]],
) -> Result<(), CheckpointError> {
    let mut written = 0;
    let failed = |written, source| CheckpointError::Write {
        path: path.to_owned(),
        written,
        wanted: slices.iter().map(|slice| slice.len() as u64).sum(),
        source,
    };
    for mut rest in slices.iter().copied() {
        while !rest.is_empty() {
            match out.write(rest) {
                Ok(0) => return Err(failed(written, ErrorKind::WriteZero.into())),
                Ok(count) => {
                    written += count as u64;
                    rest = &rest[count..];
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(written, error)),
            }
        }
    }
    Ok(())
}

/// What was created, renamed or removed in a folder stays so if the machine stops.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(cannot("write to the disk", folder))
}

pub(crate) fn remove_folder(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(cannot("remove", folder)(error)),
        _ => Ok(()),
    }
}
