//! Files that go to the disk while they are written.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::num::NonZeroU64;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use crate::error::{CheckpointError, cannot};
use crate::files::disk;

/// Writes a small file, down to the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = disk::create(path).map_err(cannot("create", path))?;
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
