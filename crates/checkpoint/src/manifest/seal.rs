//! The seal: a hash of the manifest's bytes in the manifest, so that no byte of it changes unnoticed. It is the same in
//! all formats.

use std::str;

use super::ManifestError;

/// A manifest is one JSON object whose first field is the hash of all bytes behind [`AFTER`].
const BEFORE: &str = "{\"blake3\":\"";
const AFTER: &str = "\",\n";
const DIGITS: usize = 2 * blake3::OUT_LEN;

/// A JSON object with its seal as the first field.
pub fn seal(object: &str) -> Vec<u8> {
    let rest = format!("{}\n", object.strip_prefix('{').unwrap_or(object));
    let hash = blake3::hash(rest.as_bytes()).to_hex();
    [BEFORE, &hash, AFTER, &rest].concat().into_bytes()
}

/// The object without its seal, if its bytes are those that were sealed.
pub(super) fn open(bytes: &[u8]) -> Result<String, ManifestError> {
    let altered = |problem| Err(ManifestError::Altered { problem });
    let Some((hash, rest)) = parts(bytes) else {
        return altered("it does not begin with its hash");
    };
    if hash != blake3::hash(rest).to_hex().as_bytes() {
        return altered("its bytes do not have its hash");
    }
    match str::from_utf8(rest) {
        Ok(rest) => Ok(format!("{{{rest}")),
        Err(_) => altered("it is not text"),
    }
}

fn parts(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (hash, rest) = bytes
        .strip_prefix(BEFORE.as_bytes())?
        .split_at_checked(DIGITS)?;
    Some((hash, rest.strip_prefix(AFTER.as_bytes())?))
}
