//! What ranks that save in the background tell one another, beside the parts of a checkpoint that is not complete.

use std::fs;
use std::path::PathBuf;

use crate::directory::{Directory, checked_tag};
use crate::error::{CheckpointError, cannot};
use crate::files::Files;
use crate::names::{WRITING, check_file_name};

/// Leaves a note, which is there whole or not at all, and goes when the checkpoint is completed or given up.
pub fn leave_note(
    directory: &Directory,
    tag: &str,
    name: &str,
    text: &str,
) -> Result<(), CheckpointError> {
    let path = path_of(directory, tag, name)?;
    match directory.files() {
        Files::Disk => {
            let beside = path.with_extension("beside");
            fs::write(&beside, text).map_err(cannot("write", &beside))?;
            fs::rename(&beside, &path).map_err(cannot("write", &path))
        }
        Files::Store(store) => store.write(&path, text.as_bytes().to_vec()),
    }
}

/// What a note says; `None` if it is not there.
pub fn note(
    directory: &Directory,
    tag: &str,
    name: &str,
) -> Result<Option<String>, CheckpointError> {
    let path = path_of(directory, tag, name)?;
    let bytes = directory.files().read(&path)?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn path_of(directory: &Directory, tag: &str, name: &str) -> Result<PathBuf, CheckpointError> {
    checked_tag(tag)?;
    check_file_name(name).map_err(|source| CheckpointError::Name {
        what: "note",
        name: name.to_owned(),
        source,
    })?;
    Ok(directory.writing(tag).join(format!("{name}{WRITING}")))
}
