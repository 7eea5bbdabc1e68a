//! Parts whose bytes come one after another, such as those of a device, with as much memory whatever their size.

use std::fs;
use std::path::PathBuf;
use std::thread;

use crate::directory::{Directory, sync_folder};
use crate::error::{CheckpointError, cannot};
use crate::files::{Files, Upload, disk};
use crate::hash::ChunkHasher;
use crate::part::{PartLayout, PartReport, PieceSpec, lay_out_specs};
use crate::stream::Streamed;
use crate::write::{path_of, refused};

/// From this size on, another thread hashes bytes while they are written.
const HASHED_BESIDE: usize = 1 << 20;

/// A rank's file of a checkpoint that is not complete yet, while its bytes come. Nothing is left of it unless
/// [`finish`](Self::finish) succeeds.
#[derive(Debug)]
pub struct PartWriter {
    out: Option<Out>,
    layout: PartLayout,
    hasher: ChunkHasher,
    name: String,
    written: u64,
}

#[derive(Debug)]
enum Out {
    File(Streamed, PathBuf),
    Object(Box<Upload>),
}

impl PartWriter {
    /// Lays the file out, and creates it.
    ///
    /// # Errors
    ///
    /// A piece makes no sense, or the file system or the store refuses.
    pub fn begin(
        directory: &Directory,
        tag: &str,
        name: &str,
        pieces: &[PieceSpec<'_>],
    ) -> Result<Self, CheckpointError> {
        let path = path_of(directory, tag, name)?;
        let layout = lay_out_specs(pieces).map_err(refused(&path))?;
        let (out, name) = if let Files::Store(store) = directory.files() {
            let (name, upload) = store.upload(&directory.writing(tag), name, layout.bytes)?;
            (Out::Object(Box::new(upload)), name)
        } else {
            let folder = directory.writing(tag);
            disk::make_folder(&folder).map_err(cannot("create", &folder))?;
            let file = disk::create(&path).map_err(cannot("create", &path))?;
            let file = Streamed::new(file, &path, layout.bytes);
            (Out::File(file, path), name.to_owned())
        };
        let mut part = Self {
            out: Some(out),
            layout,
            hasher: ChunkHasher::default(),
            name,
            written: 0,
        };
        let header = part.layout.header.clone();
        part.write(&header)?;
        Ok(part)
    }

    /// The places of the given pieces in the order in which their bytes come. Pieces without bytes are not among them.
    pub fn order(&self) -> &[usize] {
        &self.layout.order
    }

    /// How many bytes are still to come.
    pub fn left(&self) -> u64 {
        self.layout.bytes - self.written
    }

    /// Takes the next bytes; at most those that are [`left`](Self::left).
    ///
    /// # Errors
    ///
    /// The file system or the store refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let Some(out) = &mut self.out else {
            return Ok(()); // it has failed
        };
        let hasher = &mut self.hasher;
        let (result, is_counted) = thread::scope(|scope| {
            let beside = (bytes.len() >= HASHED_BESIDE).then(|| {
                let hashing = thread::Builder::new().name("checkpoint-hash".to_owned());
                hashing.spawn_scoped(scope, || hasher.update(bytes)).is_ok()
            });
            let result = out.write(bytes);
            (result, beside.unwrap_or(false))
        });
        if !is_counted {
            self.hasher.update(bytes); // it is short, or there was no thread
        }
        self.written += bytes.len() as u64;
        result
    }

    /// Brings the file down to the disk, after all bytes have come.
    ///
    /// # Errors
    ///
    /// The file system or the store refuses.
    pub fn finish(mut self) -> Result<PartReport, CheckpointError> {
        debug_assert_eq!(self.left(), 0, "all bytes have come");
        if let Some(out) = self.out.take() {
            out.finish()?;
        }
        let hasher = std::mem::take(&mut self.hasher);
        Ok(self.layout.report(&self.name, hasher.finish()))
    }
}

impl Drop for PartWriter {
    fn drop(&mut self) {
        if let Some(Out::File(file, path)) = self.out.take() {
            drop(file);
            remove(&path);
        }
    }
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        match self {
            Self::File(file, _) => file.write(bytes),
            Self::Object(upload) => upload.write(bytes),
        }
    }

    fn finish(self) -> Result<(), CheckpointError> {
        match self {
            Self::Object(upload) => upload.finish(),
            Self::File(file, path) => {
                let folder = path.parent().expect("a part is in a folder").to_owned();
                let synced = file.finish().and_then(|()| sync_folder(&folder));
                synced.inspect_err(|_| remove(&path))
            }
        }
    }
}

/// It is of no use, and may be what fills the disk. The error that is told is the one that came first.
fn remove(path: &std::path::Path) {
    fs::remove_file(path).ok();
}
