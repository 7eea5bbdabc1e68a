//! Device memory, which is a memory file, and registered host memory.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{
    ALREADY_REGISTERED, CallFailure, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY, Undefined,
};

/// What a handle begins with.
const MAGIC: &[u8; 8] = b"rehearse";

/// What the names of memory files begin with, as they show in `/proc/<pid>/maps`.
const NAME: &str = "cuda-rehearsal";

/// What one process has of its devices' memory, and of its peers'.
pub(crate) struct ProcessMemory {
    capacity: usize,
    made: usize,
    own: BTreeMap<u64, (File, MmapRaw)>,
    opened: BTreeMap<u64, MmapRaw>,
    /// By where it begins, where it ends.
    registered: BTreeMap<u64, u64>,
}

impl ProcessMemory {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self {
            capacity,
            made: 0,
            own: BTreeMap::new(),
            opened: BTreeMap::new(),
            registered: BTreeMap::new(),
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
        self.made += 1;
        let name = format!("{NAME}-{}-{}", std::process::id(), self.made);
        let memory = memfd_create(name.as_str(), MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|_| OUT_OF_MEMORY)?;
        ftruncate(&memory, bytes as u64).map_err(|_| OUT_OF_MEMORY)?;
        let file = File::from(memory);
        let mapping = map(&file, bytes)?;
        let address = address_of(&mapping);
        self.own.insert(address, (file, mapping));
        Ok(address)
    }

    /// Frees memory that nobody else has open.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), CallFailure> {
        let (file, _) = self.own.get(&address).ok_or(INVALID_VALUE)?;
        if mappings_of(file) > 1 {
            return Err(CallFailure::Undefined(Undefined::FreedWhileOpen));
        }
        self.own.remove(&address);
        Ok(())
    }

    /// How long memory is that was allocated, opened or registered here.
    pub(crate) fn len_of(&self, address: u64) -> usize {
        let own = self.own.get(&address).map(|(_, mapping)| mapping.len());
        let opened = || self.opened.get(&address).map(MmapRaw::len);
        let registered = || Some((self.registered.get(&address)? - address) as usize);
        own.or_else(opened).or_else(registered).unwrap_or(0)
    }

    /// How many pieces of memory are allocated, opened and registered.
    pub(crate) fn len(&self) -> usize {
        self.own.len() + self.opened.len() + self.registered.len()
    }

    /// How many bytes are registered.
    pub(crate) fn registered_bytes(&self) -> u64 {
        self.registered.iter().map(|(start, end)| end - start).sum()
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

    pub(crate) fn register(&mut self, start: u64, bytes: usize) -> Result<(), i32> {
        let end = start + bytes as u64;
        let before = self.registered.range(..end).next_back();
        if before.is_some_and(|(_, end)| *end > start) {
            return Err(ALREADY_REGISTERED);
        }
        self.registered.insert(start, end);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, start: u64) -> Result<(), i32> {
        let known = self.registered.remove(&start);
        known.map(drop).ok_or(NOT_REGISTERED)
    }
}

/// How often the memory is mapped, in all processes that this one may look at.
fn mappings_of(file: &File) -> usize {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let name = name.map_or_else(|_| NAME.into(), |name| name.to_string_lossy().into_owned());
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes =
        processes.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
    let maps =
        processes.filter_map(|process| std::fs::read_to_string(process.path().join("maps")).ok());
    maps.map(|maps| maps.lines().filter(|line| line.ends_with(&name)).count())
        .sum()
}

fn map(file: &File, bytes: usize) -> Result<MmapRaw, i32> {
    let mapping = MmapOptions::new().len(bytes).map_raw(file);
    mapping.map_err(|_| OUT_OF_MEMORY)
}

fn address_of(mapping: &MmapRaw) -> u64 {
    mapping.as_mut_ptr().expose_provenance() as u64
}
