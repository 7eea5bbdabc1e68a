//! A file without a name, in which a rank keeps what it has offloaded.

use std::fs::{File, OpenOptions, remove_file};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use shardwright_buffers::{Allocator, Block};

/// Places in the file begin at pages.
const PAGE: u64 = 4096;
/// More than any disk has: how much a file holds is the disk's affair.
const CAPACITY: u64 = 1 << 60;
/// How many names are tried where files have to have one at first.
const NAMES: u32 = 16;

/// The file, and which of its places are taken. Places are used again, so that it grows to what was in it at once at most.
#[derive(Debug)]
pub(crate) struct Places {
    blocks: Allocator,
    /// The end of the last place that was ever taken.
    pub(crate) size: u64,
}

impl Places {
    pub(crate) fn new() -> Self {
        Self {
            blocks: Allocator::new(CAPACITY, PAGE),
            size: 0,
        }
    }

    pub(crate) fn take(&mut self, bytes: u64) -> Option<Block> {
        let block = self.blocks.allocate(bytes)?;
        self.size = self.size.max(block.offset + block.len);
        Some(block)
    }

    pub(crate) fn give_back(&mut self, block: Block) {
        self.blocks.free(block).expect("a place is given back once");
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// The file itself.
#[derive(Debug)]
pub(crate) struct StorageFile {
    file: File,
    pub(crate) directory: PathBuf,
}

impl StorageFile {
    /// Makes a file in a directory that no other process can open by a name.
    pub(crate) fn make_in(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
            Ok(descriptor) => File::from(descriptor),
            // File systems and kernels that do not know files without a name.
            Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL,
            ) => Self::make_with_a_name(directory)?,
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            file,
            directory: directory.to_owned(),
        })
    }

    fn make_with_a_name(directory: &Path) -> io::Result<File> {
        let mut tries = 0;
        loop {
            let mut number = [0; 8];
            getrandom::fill(&mut number).map_err(io::Error::other)?;
            let number = u64::from_ne_bytes(number);
            let path = directory.join(format!("shardwright-offload-{number:016x}"));
            let made = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            match made {
                Ok(file) => {
                    remove_file(&path)?;
                    return Ok(file);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < NAMES => {
                    tries += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sets a place on the disk aside, so that none of its bytes can fail to find room later.
    pub(crate) fn reserve(&self, place: &Block) -> io::Result<()> {
        let flags = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(&self.file, flags, place.offset, place.len) {
            Err(rustix::io::Errno::OPNOTSUPP) => self.fill(place),
            done => Ok(done?),
        }
    }

    /// Writes zeros, where a file system cannot set a place aside in another way.
    fn fill(&self, place: &Block) -> io::Result<()> {
        let zeros = vec![0; 1 << 20];
        let mut at = place.offset;
        while at < place.offset + place.len {
            let bytes = zeros.len().min((place.offset + place.len - at) as usize);
            self.write(&zeros[..bytes], at)?;
            at += bytes as u64;
        }
        Ok(())
    }

    pub(crate) fn descriptor(&self) -> &File {
        &self.file
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    /// Whether what is written stays in memory, because the directory is of a file system that has no disk.
    pub(crate) fn is_in_memory(&self) -> bool {
        const TMPFS: i64 = 0x0102_1994;
        const RAMFS: i64 = 0x8584_58f6;
        rustix::fs::fstatfs(&self.file).is_ok_and(|system| [TMPFS, RAMFS].contains(&system.f_type))
    }
}
