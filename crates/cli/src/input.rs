//! Files that the command is given to read.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// The most bytes of a file that is read whole: traces of long jobs have some hundred megabytes.
const MOST_BYTES: u64 = 2 << 30;

/// The text of a file, which must be a regular one: others may never end, or never begin.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let refused = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return refused("it is no regular file");
    }
    if found.len() > MOST_BYTES {
        return refused("it has more than 2 GiB");
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}
