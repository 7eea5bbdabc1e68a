//! One job at a time saves into a directory: two of them would write the same files.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::process;

use crate::directory::Directory;
use crate::error::{CheckpointError, cannot};
use crate::files::{Files, disk};

/// The right to save into a directory, for as long as this lives; a process that ends loses it.
#[derive(Debug)]
pub struct DirectoryLock {
    folder: Option<File>,
    pid: u32,
}

impl Directory {
    /// The right to save into this directory, which is made if it is not there; `None` while another job has it.
    ///
    /// Object stores and some file systems know no locks: there everybody gets it.
    ///
    /// # Errors
    ///
    /// The directory cannot be made or opened.
    pub fn try_lock(&self) -> Result<Option<DirectoryLock>, CheckpointError> {
        let folder = match self.files() {
            Files::Disk => {
                let path = self.path();
                let opened = match disk::open_folder(path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        fs::create_dir_all(path).map_err(cannot("create", path))?;
                        disk::open_folder(path)
                    }
                    opened => opened,
                };
                let folder = opened.map_err(cannot("open", path))?;
                match folder.try_lock() {
                    Ok(()) => Some(folder),
                    Err(TryLockError::WouldBlock) => return Ok(None),
                    Err(TryLockError::Error(_)) => None,
                }
            }
            Files::Store(_) => None,
        };
        let pid = process::id();
        Ok(Some(DirectoryLock { folder, pid }))
    }
}

impl DirectoryLock {
    /// Whether no other job saves there: not where nobody knows of locks.
    pub(crate) fn excludes_others(&self) -> bool {
        self.folder.is_some()
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Forked children have the same open file: closing it here would not unlock it, and unlocking it there would.
        if let Some(folder) = self.folder.take_if(|_| self.pid == process::id()) {
            folder.unlock().ok();
        }
    }
}
