//! Names that become names of files, and those that are fixed. Pure.

/// What a checkpoint's folder is called is its tag with this behind it.
pub(crate) const FOLDER_SUFFIX: &str = "_partial";
/// The file that holds the newest checkpoint's tag.
pub(crate) const NEWEST: &str = "newest";
/// The manifest in a checkpoint's folder.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Ends the names of what is not yet complete; such names begin with a dot.
pub(crate) const WRITING: &str = ".writing";
/// Ends the names of checkpoints that go.
pub(crate) const REMOVING: &str = ".removing";

/// File systems allow names of 255 bytes; the rest is for what stands around a tag.
const MAX_NAME_BYTES: usize = 200;

/// What is wrong with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No characters.
    #[error("it is empty")]
    Empty,
    /// Too many.
    #[error("it has more than {MAX_NAME_BYTES} bytes")]
    TooLong,
    /// It would lead elsewhere, or hide.
    #[error("it begins with a dot")]
    Dot,
    /// It would lead elsewhere.
    #[error("it has {0:?}, which names of files cannot have")]
    Character(char),
    /// It is taken.
    #[error("it is the manifest's name")]
    Manifest,
}

/// Refuses a tag that cannot be part of a folder's name.
pub fn check_tag(tag: &str) -> Result<(), NameError> {
    if tag.is_empty() {
        return Err(NameError::Empty);
    }
    if tag.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong);
    }
    if tag.starts_with('.') {
        return Err(NameError::Dot);
    }
    let refused = |one: &char| one.is_control() || ['/', '\\'].contains(one);
    match tag.chars().find(refused) {
        Some(character) => Err(NameError::Character(character)),
        None => Ok(()),
    }
}

/// Refuses a name that is not that of a file in the checkpoint's folder.
pub(crate) fn check_file_name(name: &str) -> Result<(), NameError> {
    check_tag(name)?;
    if name == MANIFEST {
        return Err(NameError::Manifest);
    }
    Ok(())
}
