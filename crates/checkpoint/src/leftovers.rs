//! What ended jobs have left of checkpoints that they were writing or removing.

use crate::directory::{Directory, names_in, remove_folder};
use crate::error::CheckpointError;
use crate::files::Files;
use crate::lock::DirectoryLock;
use crate::names::{FOLDER_SUFFIX, REMOVING, WRITING};

/// Removes folders that have lost the names of checkpoints already.
pub(crate) fn remove_leftovers(directory: &Directory) -> Result<(), CheckpointError> {
    let ending = format!("{FOLDER_SUFFIX}{REMOVING}");
    for name in names_in(directory.path())? {
        if name.starts_with('.') && name.ends_with(&ending) {
            // Another job may be removing it, and what cannot be removed harms nobody.
            remove_folder(&directory.path().join(name)).ok();
        }
    }
    Ok(())
}

/// Removes what ended jobs have written of checkpoints that they never completed, but of `tag`, whose next save replaces it.
///
/// Nobody else writes there while the lock is held. Where file systems know no locks another job may, and all stays.
///
/// # Errors
///
/// The directory cannot be listed.
pub fn remove_unfinished(
    directory: &Directory,
    lock: &DirectoryLock,
    tag: &str,
) -> Result<(), CheckpointError> {
    if !lock.excludes_others() || !matches!(directory.files(), Files::Disk) {
        return Ok(());
    }
    let ending = format!("{FOLDER_SUFFIX}{WRITING}");
    let own = directory.writing(tag);
    for name in names_in(directory.path())? {
        let path = directory.path().join(&name);
        if name.starts_with('.') && name.ends_with(&ending) && path != own {
            remove_folder(&path).ok(); // what cannot be removed harms nobody
        }
    }
    Ok(())
}
