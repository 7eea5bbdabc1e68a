//! Files that are read and written piece by piece, with as much memory whatever their size.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::eager::{EagerFile, write_slices};
use crate::error::{CheckpointError, cannot};
use crate::hash::{CHUNK_BYTES, num_chunks};
use crate::manifest::Tensor;
use crate::plan::plan;
use crate::read::{Checkpoint, Touched};
use crate::region::Region;

/// How many chunks are kept, so that one that belongs to several pieces is read once. With them, 128 MiB of memory.
const KEPT_CHUNKS: usize = 32;
/// How much is handed on at once.
pub(crate) const BLOCK_BYTES: u64 = CHUNK_BYTES;

/// Bytes of numbered files, by their places in the files' data.
pub(crate) trait Source {
    /// Fills the memory.
    fn read(&mut self, file: usize, at: u64, into: &mut [u8]) -> Result<(), CheckpointError>;
}

/// Reads a checkpoint in any order, verified, and keeps what it read last.
pub(crate) struct Verified<'a> {
    checkpoint: &'a Checkpoint,
    /// What was used last is at the end.
    kept: Vec<Kept>,
    /// Files whose headers have been verified.
    begun: Vec<bool>,
    touched: Touched,
}

struct Kept {
    file: usize,
    chunk: u64,
    bytes: Vec<u8>,
}

impl<'a> Verified<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self {
            checkpoint,
            kept: Vec::new(),
            begun: vec![false; checkpoint.manifest().files.len()],
            touched: Touched::default(),
        }
    }

    /// What has been read so far; a chunk that was dropped and read again counts twice.
    pub(crate) fn touched(&self) -> Touched {
        self.touched
    }

    /// Reads elements of a tensor, in the order of a contiguous one.
    pub(crate) fn read_elements(
        &mut self,
        tensor: &Tensor,
        first: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let count = into.len() as u64 / tensor.item_bytes();
        let wanted = Region::whole(&tensor.shape).run(first, count);
        let reads = plan(tensor, &wanted).map_err(|source| CheckpointError::Plan {
            folder: self.checkpoint.folder().to_owned(),
            source: Box::new(source),
        })?;
        for read in reads {
            let begin = read.destination as usize;
            let into = &mut into[begin..begin + read.bytes as usize];
            self.read(read.file, read.source, into)?;
        }
        Ok(())
    }

    /// A chunk that is kept, or read now.
    fn chunk(&mut self, file: usize, chunk: u64) -> Result<&[u8], CheckpointError> {
        let same = |one: &Kept| one.file == file && one.chunk == chunk;
        let found = self.kept.iter().rposition(same);
        let kept = match found {
            Some(place) => self.kept.remove(place),
            None => self.read_chunk(file, chunk)?,
        };
        self.kept.push(kept);
        Ok(&self.kept.last().expect("it was just put there").bytes)
    }

    fn read_chunk(&mut self, number: usize, chunk: u64) -> Result<Kept, CheckpointError> {
        let mut bytes = if self.kept.len() < KEPT_CHUNKS {
            Vec::new()
        } else {
            self.kept.remove(0).bytes
        };
        let range = self.checkpoint.range(number, chunk);
        bytes.resize((range.end - range.start) as usize, 0);
        let checkpoint = self.checkpoint;
        let read = checkpoint
            .open_file(number)
            .and_then(|file| checkpoint.read_chunk(&file, number, chunk, &mut bytes));
        read.map_err(|error| checkpoint.explained(error))?;
        self.touched.chunks += 1;
        self.touched.bytes += bytes.len() as u64;
        Ok(Kept {
            file: number,
            chunk,
            bytes,
        })
    }
}

impl Source for Verified<'_> {
    fn read(&mut self, file: usize, at: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        let data_begin = self.checkpoint.manifest().files[file].data_begin;
        if !self.begun[file] {
            self.begun[file] = true;
            self.touched.files += 1;
            for chunk in 0..num_chunks(data_begin) {
                self.chunk(file, chunk)?;
            }
        }
        let mut at = data_begin + at;
        let mut rest = into;
        while !rest.is_empty() {
            let from = (at % CHUNK_BYTES) as usize;
            let now = rest.len().min(CHUNK_BYTES as usize - from);
            let (into, later) = rest.split_at_mut(now);
            let chunk = self.chunk(file, at / CHUNK_BYTES)?;
            into.copy_from_slice(&chunk[from..from + now]);
            at += now as u64;
            rest = later;
        }
        Ok(())
    }
}

/// A file whose bytes come one after another.
#[derive(Debug)]
pub(crate) struct Streamed {
    file: EagerFile,
    path: PathBuf,
    written: u64,
    wanted: u64,
}

impl Streamed {
    /// A new file that is to have `wanted` bytes.
    pub(crate) fn new(file: File, path: &Path, wanted: u64) -> Self {
        Self {
            file: EagerFile::new(file),
            path: path.to_owned(),
            written: 0,
            wanted,
        }
    }

    /// Takes the next bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let result = write_slices(&mut self.file, &self.path, &[bytes]);
        let (before, wanted) = (self.written, self.wanted);
        self.written += bytes.len() as u64;
        result.map_err(|error| match error {
            CheckpointError::Write {
                path,
                written,
                source,
                ..
            } => CheckpointError::Write {
                path,
                written: before + written,
                wanted,
                source,
            },
            other => other,
        })
    }

    /// Brings it down to the disk.
    pub(crate) fn finish(self) -> Result<(), CheckpointError> {
        debug_assert_eq!(self.written, self.wanted, "all bytes have come");
        self.file
            .sync()
            .map_err(cannot("write to the disk", &self.path))
    }
}
