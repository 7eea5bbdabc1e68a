//! Where files are: on a disk, or in an object store.
//!
//! A path of a store is its address. The two differ in how a checkpoint becomes whole, and what is asked of both is little:
//! what is in a folder, a small file, bytes of a large one.

mod client;
pub(crate) mod disk;
mod error;
mod layout;
mod runtime;
mod store;
mod upload;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{CheckpointError, cannot};
pub use error::StoreError;
pub(crate) use layout::is_of_a_save;
pub(crate) use store::Store;
use store::failed;
pub(crate) use upload::Upload;

/// Refuses an address in a store for what is written to folders on a disk only.
pub(crate) fn check_on_disk(path: &Path) -> Result<(), CheckpointError> {
    check_place(path)?;
    if layout::is_address(path) {
        return Err(failed("write", path)(StoreError::OnlyOnDisk));
    }
    Ok(())
}

/// Refuses a path that is neither a folder nor an address in a store, though it may look like one.
pub(crate) fn check_place(path: &Path) -> Result<(), CheckpointError> {
    layout::check_place(path).map_err(|problem| CheckpointError::NoPlace {
        path: path.to_owned(),
        problem,
    })
}

/// Where files are.
#[derive(Clone, Debug)]
pub(crate) enum Files {
    /// In folders, which are renamed and flushed.
    Disk,
    /// In a store, where objects appear whole, and nothing is renamed.
    Store(Arc<Store>),
}

/// What is in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) name: String,
    /// The size of a file; `None` for anything else.
    pub(crate) bytes: Option<u64>,
}

/// A file that is open for reading.
pub(crate) enum OpenFile {
    Disk(File),
    Store(Arc<Store>),
}

/// What was found of bytes that are wanted of a file.
pub(crate) enum Found {
    All,
    /// Less than that: the file has so many bytes.
    Only(u64),
    /// There is no such file.
    Nothing,
}

/// How much is read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// How many threads read.
    pub(crate) threads: usize,
    /// How many neighbouring chunks each reads at once.
    pub(crate) chunks: usize,
}

impl Files {
    /// How to read many chunks: a disk works while a chunk is hashed; a store, whose answers take their time, is asked for much
    /// at once. Each thread then has the 8 MiB that come, and those that it copies from: 128 MiB in all.
    pub(crate) fn pace(&self) -> Pace {
        let (threads, chunks) = match self {
            Self::Disk => (2, 1),
            Self::Store(_) => (8, 2),
        };
        Pace { threads, chunks }
    }

    /// Where the files at this path are. Nothing is asked of a store yet.
    pub(crate) fn of(path: &Path) -> Result<Self, CheckpointError> {
        check_place(path)?;
        Ok(if layout::is_address(path) {
            Self::Store(Arc::new(Store::new(path)))
        } else {
            Self::Disk
        })
    }

    /// What is in a folder, in the order of names; names that are no text are shown with replacements.
    pub(crate) fn list(&self, folder: &Path) -> Result<Vec<Listed>, CheckpointError> {
        match self {
            Self::Disk => list_on_disk(folder),
            Self::Store(store) => store.list(folder),
        }
    }

    /// All of a file that has so many bytes at most; `None` if it is not there.
    pub(crate) fn read(
        &self,
        path: &Path,
        allowed: u64,
    ) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self {
            Self::Disk => match disk::open(path).and_then(|file| disk::read(&file, allowed)) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(cannot("read", path)(error)),
            },
            Self::Store(store) => store.read(path, allowed),
        }
    }

    /// Opens a file; a store is asked when it is read.
    pub(crate) fn open(&self, path: &Path) -> Result<OpenFile, CheckpointError> {
        match self {
            Self::Disk => {
                let file = disk::open(path).map_err(cannot("open", path))?;
                Ok(OpenFile::Disk(file))
            }
            Self::Store(store) => Ok(OpenFile::Store(Arc::clone(store))),
        }
    }
}

impl OpenFile {
    /// Fills memory with a file's bytes from `begin` on.
    pub(crate) fn read_at(
        &self,
        path: &Path,
        begin: u64,
        into: &mut [u8],
    ) -> Result<Found, CheckpointError> {
        match self {
            Self::Disk(file) => match file.read_exact_at(into, begin) {
                Ok(()) => Ok(Found::All),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    Ok(Found::Only(file.metadata().map_or(0, |found| found.len())))
                }
                Err(error) => Err(cannot("read", path)(error)),
            },
            Self::Store(store) => match store.read_range(path, begin, into) {
                Ok(Some(())) => Ok(Found::All),
                Ok(None) => Ok(Found::Nothing),
                Err(error) => match store.size(path) {
                    Ok(Some(size)) if size < begin + into.len() as u64 => Ok(Found::Only(size)),
                    _ => Err(error),
                },
            },
        }
    }
}

/// The operations of a store that a disk has in another form.
impl Store {
    /// Begins an object of a checkpoint, under a name of its own in this attempt to save.
    pub(crate) fn upload(
        &self,
        folder: &Path,
        name: &str,
        bytes: u64,
    ) -> Result<(String, Upload), CheckpointError> {
        let mut attempt = [0; layout::ATTEMPT_BYTES];
        getrandom::fill(&mut attempt)
            .map_err(|error| failed("write", &folder.join(name))(StoreError::Random(error)))?;
        let name = layout::name_of_attempt(name, attempt);
        let upload = Upload::new(self, folder.join(&name), bytes)?;
        Ok((name, upload))
    }
}

fn list_on_disk(folder: &Path) -> Result<Vec<Listed>, CheckpointError> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot("list", folder))? {
        let entry = entry.map_err(cannot("list", folder))?;
        let path: PathBuf = entry.path();
        let bytes = match entry.metadata() {
            Ok(found) if found.is_file() => Some(found.len()),
            Ok(_) => None,
            Err(error) if error.kind() == ErrorKind::NotFound => continue, // it has gone meanwhile
            Err(error) => return Err(cannot("look at", &path)(error)),
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        all.push(Listed { name, bytes });
    }
    all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}
