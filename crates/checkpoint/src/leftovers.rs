//! What an ended job has left of checkpoints that it was removing.

use crate::directory::{Directory, names_in, remove_folder};
use crate::error::CheckpointError;
use crate::names::{FOLDER_SUFFIX, REMOVING};

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
