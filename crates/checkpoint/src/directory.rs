//! A directory of checkpoints: which are there, and which one is the newest.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::eager::write_file;
use crate::error::{CheckpointError, cannot};
use crate::files::{Files, disk};
use crate::manifest::Manifest;
use crate::names::{FOLDER_SUFFIX, MANIFEST, NEWEST, REMOVING, WRITING, check_tag};

/// How many bytes `newest` has at most: two lines.
const NEWEST_BYTES: u64 = 1 << 10;
/// How many bytes a manifest has at most, where it is written and where it is read; that of 10 TB has 200 MB.
pub(crate) const MANIFEST_BYTES: u64 = 256 << 20;

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
    /// something is asked of it first. Addresses of other kinds, and an empty path, are refused.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let path = path.into();
        let files = Files::of(&path)?;
        Ok(Self { path, files })
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
            match self.check_folder(&tag) {
                Err(error) if error.is_absence() => {} // it went meanwhile
                checked => return checked.map(|()| self.folder(&tag)),
            }
        }
        Err(CheckpointError::NoCheckpoint {
            directory: self.path.clone(),
            found: self.tags(),
            tag,
        })
    }

    /// Refuses a link in the place of a checkpoint's folder: it may lead anywhere.
    fn check_folder(&self, tag: &str) -> Result<(), CheckpointError> {
        let folder = self.folder(tag);
        match &self.files {
            Files::Disk => disk::check_folder(&folder).map_err(cannot("open", &folder)),
            Files::Store(_) => Ok(()),
        }
    }

    /// Whether a checkpoint is there, whatever its folder holds; in a store, whether it is complete.
    pub(crate) fn has(&self, tag: &str) -> Result<bool, CheckpointError> {
        let folder = self.folder(tag);
        match &self.files {
            Files::Disk => Ok(folder.symlink_metadata().is_ok()),
            Files::Store(_) => self.has_manifest(&folder),
        }
    }

    /// Whether a folder that was found is still there.
    pub(crate) fn has_folder(&self, folder: &Path) -> bool {
        match &self.files {
            Files::Disk => folder.symlink_metadata().is_ok(),
            Files::Store(_) => self.has_manifest(folder).unwrap_or(true),
        }
    }

    fn has_manifest(&self, folder: &Path) -> Result<bool, CheckpointError> {
        match &self.files {
            Files::Disk => {
                let found = folder.join(MANIFEST).symlink_metadata();
                Ok(found.is_ok_and(|found| found.is_file()))
            }
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
        let Some(bytes) = self.files.read(&path, NEWEST_BYTES)? else {
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
                    Err(error) if error.is_absence() && !self.has(tag)? => continue, // it went meanwhile
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
        self.check_folder(tag)?;
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
        match remove_folder(&aside) {
            // Somebody still reads a file of it on a file system that keeps such files in their folder: it goes later.
            Err(CheckpointError::Io { source, .. })
                if source.kind() == ErrorKind::DirectoryNotEmpty =>
            {
                Ok(())
            }
            removed => removed,
        }
    }
}

/// A line with the tag, and one with the hash of it, so that no byte changes unnoticed to that of another tag.
fn newest_text(tag: &str) -> String {
    format!("{tag}\n{}\n", blake3::hash(tag.as_bytes()).to_hex())
}

/// Refuses a tag that no folder can be named after.
///
/// # Errors
///
/// Names the tag, and what is wrong with it.
pub fn checked_tag(tag: &str) -> Result<(), CheckpointError> {
    check_tag(tag).map_err(|source| CheckpointError::Name {
        what: "checkpoint",
        name: tag.to_owned(),
        source,
    })
}

pub(crate) fn read_manifest(files: &Files, path: &Path) -> Result<Manifest, CheckpointError> {
    let bytes = files.read(path, MANIFEST_BYTES)?;
    let bytes = bytes.ok_or_else(|| cannot("read", path)(ErrorKind::NotFound.into()))?;
    Manifest::from_bytes(&bytes).map_err(|source| CheckpointError::Manifest {
        path: path.to_owned(),
        source,
    })
}

/// Refuses to write what would not be read.
pub(crate) fn check_manifest_size(manifest: &Path, bytes: u64) -> Result<(), CheckpointError> {
    if bytes > MANIFEST_BYTES {
        return Err(CheckpointError::LargeManifest {
            path: manifest.to_owned(),
            bytes,
            allowed: MANIFEST_BYTES,
        });
    }
    Ok(())
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

/// What was created, renamed or removed in a folder stays so if the machine stops.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    let synced = disk::open_folder(folder).and_then(|folder| folder.sync_all());
    synced.map_err(cannot("write to the disk", folder))
}

pub(crate) fn remove_folder(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(cannot("remove", folder)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{MANIFEST_BYTES, check_manifest_size};

    #[test]
    fn a_manifest_that_could_not_be_read_is_not_written() {
        let path = Path::new("c/t_partial/manifest.json");
        assert!(check_manifest_size(path, MANIFEST_BYTES).is_ok());
        let error = check_manifest_size(path, MANIFEST_BYTES + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "c/t_partial/manifest.json would have 268435457 bytes, and 268435456 are allowed: keep large user content in \
             tensors, or in a file of its own"
        );
    }
}
