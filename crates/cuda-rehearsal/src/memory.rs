//! Device memory, which is a memory file, and registered host memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY};

/// What a handle begins with.
const MAGIC: &[u8; 8] = b"rehearse";

/// What one process has of its devices' memory, and of its peers'.
pub(crate) struct Memory {
    capacity: usize,
    own: BTreeMap<u64, (File, MmapRaw)>,
    opened: BTreeMap<u64, MmapRaw>,
    registered: BTreeSet<u64>,
}

impl Memory {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self {
            capacity,
            own: BTreeMap::new(),
            opened: BTreeMap::new(),
            registered: BTreeSet::new(),
        }
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, i32> {
        let used: usize = self.own.values().map(|(_, mapping)| mapping.len()).sum();
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if used.saturating_add(bytes) > self.capacity {
            return Err(OUT_OF_MEMORY);
        }
        let memory = memfd_create("cuda-rehearsal", MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|_| OUT_OF_MEMORY)?;
        ftruncate(&memory, bytes as u64).map_err(|_| OUT_OF_MEMORY)?;
        let file = File::from(memory);
        let mapping = map(&file, bytes)?;
        let address = address_of(&mapping);
        self.own.insert(address, (file, mapping));
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), i32> {
        self.own.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    /// What another process needs to open this memory: where it is.
    pub(crate) fn share(&self, address: u64) -> Result<[u8; 64], i32> {
        let (file, mapping) = self.own.get(&address).ok_or(INVALID_VALUE)?;
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(MAGIC);
        handle[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
        handle[12..16].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
        handle[16..24].copy_from_slice(&(mapping.len() as u64).to_ne_bytes());
        Ok(handle)
    }

    /// Opens another process's memory, and this one's own, which the driver would refuse: ranks may be threads of one
    /// test.
    pub(crate) fn open(&mut self, handle: &[u8; 64]) -> Result<u64, i32> {
        let word = |at: usize| {
            handle[at..at + 4]
                .try_into()
                .expect("four bytes were taken")
        };
        let pid = u32::from_ne_bytes(word(8));
        if handle[..8] != MAGIC[..] {
            return Err(INVALID_VALUE);
        }
        let path = format!("/proc/{pid}/fd/{}", i32::from_ne_bytes(word(12)));
        let bytes = u64::from_ne_bytes(handle[16..24].try_into().expect("eight bytes were taken"));
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|_| INVALID_VALUE)?;
        let found = file.metadata().map_err(|_| INVALID_VALUE)?.len();
        if found != bytes {
            return Err(INVALID_VALUE);
        }
        let mapping = map(&file, bytes as usize)?;
        let address = address_of(&mapping);
        self.opened.insert(address, mapping);
        Ok(address)
    }

    /// The whole mapping, of this process's memory or an opened one, that an address lies in.
    pub(crate) fn range(&self, address: u64) -> Result<(u64, usize), i32> {
        let own = self.own.values().map(|(_, mapping)| mapping);
        own.chain(self.opened.values())
            .map(|mapping| (address_of(mapping), mapping.len()))
            .find(|(start, bytes)| (*start..*start + *bytes as u64).contains(&address))
            .ok_or(INVALID_VALUE)
    }

    pub(crate) fn close(&mut self, address: u64) -> Result<(), i32> {
        self.opened.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    pub(crate) fn register(&mut self, start: u64) -> Result<(), i32> {
        let new = self.registered.insert(start);
        new.then_some(()).ok_or(ALREADY_REGISTERED)
    }

    pub(crate) fn unregister(&mut self, start: u64) -> Result<(), i32> {
        let known = self.registered.remove(&start);
        known.then_some(()).ok_or(NOT_REGISTERED)
    }
}

fn map(file: &File, bytes: usize) -> Result<MmapRaw, i32> {
    let mapping = MmapOptions::new().len(bytes).map_raw(file);
    mapping.map_err(|_| OUT_OF_MEMORY)
}

fn address_of(mapping: &MmapRaw) -> u64 {
    mapping.as_mut_ptr().expose_provenance() as u64
}
