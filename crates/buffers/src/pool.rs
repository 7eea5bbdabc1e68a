//! A rank's own persistent buffer.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use shardwright_core::Rank;
use shardwright_wire::{Buffer, Lent, NoMemory, SharedMemory, SharedPlace};

use super::allocator::{Allocator, Block};
use super::layout::{self, mapped, slot};
use super::raw::{MappedRange, Mapping};
use super::zone::Zone;
use shardwright_system::Owner;
use shardwright_system::sync::{Mutex, MutexGuard};

/// The name under which the memory shows in `/proc`.
pub(super) const NAME: &str = "shardwright";

/// How many of the oldest lent blocks are looked at before each allocation; all are when there is no room.
const LOOKED_AT: usize = 16;

/// What another process needs to map a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The owner's process.
    pub pid: u32,
    /// The memory's file descriptor there.
    pub fd: i32,
    /// Its size in bytes, head included.
    pub bytes: u64,
    /// What its head holds, so that no other memory is taken for it.
    pub token: [u8; layout::TOKEN_BYTES],
}

/// A rank's own persistent buffer.
pub struct Pool {
    pub(super) mapping: Arc<Mapping>,
    file: File,
    token: [u8; layout::TOKEN_BYTES],
    owner: Owner,
    state: Mutex<State>,
}

struct State {
    allocator: Allocator,
    slots: Vec<u32>,
    lent: VecDeque<Loan>,
    closed: bool,
}

/// A block that a peer holds, or will.
struct Loan {
    slot: u32,
    /// Goes back to its allocator when dropped.
    _memory: Arc<dyn Any + Send + Sync>,
}

/// A range of a mapping, and what keeps it from being given to anybody else until it is dropped.
pub(super) struct LentRange<H> {
    pub(super) range: MappedRange,
    pub(super) holder: H,
}

/// Bytes of the pool in this process's hands.
pub(super) type Region = LentRange<OwnBlock>;

/// A block of the pool; freed when dropped.
pub(super) struct OwnBlock {
    pub(super) pool: Arc<Pool>,
    pub(super) block: Block,
    /// Whose the block is, where it is a part of a larger one.
    pub(super) zone: Option<Arc<Zone>>,
}

impl OwnBlock {
    /// Where it begins in the buffer.
    fn offset(&self) -> u64 {
        let zone = self.zone.as_ref().map_or(0, |zone| zone.offset());
        layout::HEAD_BYTES as u64 + zone + self.block.offset
    }
}

impl Pool {
    /// A buffer for `bytes` bytes of tensors; memory is taken as it is first used.
    pub fn new(bytes: u64) -> io::Result<Arc<Self>> {
        let whole = bytes
            .checked_add(layout::HEAD_BYTES as u64)
            .filter(|whole| usize::try_from(*whole).is_ok_and(|whole| whole < usize::MAX / 2))
            .ok_or_else(|| io::Error::other(format!("a buffer of {bytes} bytes is too large")))?;
        let memory = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, whole)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        let file = File::from(memory);
        let mapping = Arc::new(Mapping::of(&file, whole as usize)?);
        let mut token = [0; layout::TOKEN_BYTES];
        getrandom::fill(&mut token).map_err(io::Error::other)?;
        for (index, word) in token.chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes(word.try_into().expect("chunks are of four bytes"));
            mapping
                .word(layout::token_word(index))
                .store(word, Ordering::Relaxed);
        }
        mapping.word(0).store(layout::MAGIC, Ordering::Release);
        Ok(Arc::new(Self {
            mapping,
            file,
            token,
            owner: Owner::this_process(),
            state: Mutex::new(State {
                allocator: Allocator::new(bytes, layout::ALIGNMENT),
                slots: (0..layout::SLOTS).rev().collect(),
                lent: VecDeque::new(),
                closed: false,
            }),
        }))
    }

    /// What a peer needs to map it.
    pub fn offer(&self) -> Offer {
        Offer {
            pid: std::process::id(),
            fd: self.file.as_raw_fd(),
            bytes: self.mapping.len() as u64,
            token: self.token,
        }
    }

    /// A buffer of so many bytes, filled once; on the heap where there is no room.
    pub fn filled_by<E: From<NoMemory>>(
        self: &Arc<Self>,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Buffer, E> {
        let Some(mut region) = self.take(bytes) else {
            return Buffer::filled_by(bytes, fill);
        };
        fill(region.range.as_mut_bytes())?;
        Ok(Buffer::lent(Arc::new(region)))
    }

    /// A copy of some bytes; on the heap where there is no room.
    pub fn copy_of(self: &Arc<Self>, bytes: &[u8]) -> Buffer {
        let Some(mut region) = self.take(bytes.len()) else {
            return Buffer::copy_of(bytes);
        };
        region.range.as_mut_bytes().copy_from_slice(bytes);
        Buffer::lent(Arc::new(region))
    }

    /// A block that is filled later, through its start; `None` where there is no room.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Buffer> {
        Some(Buffer::lent(Arc::new(self.take(bytes)?)))
    }

    /// Tells the ranks that have mapped the buffer how to open the one in device memory; once.
    pub fn offer_device(&self, words: layout::DeviceOffer) {
        for (index, word) in words.into_iter().enumerate() {
            let place = self.mapping.word(layout::device_word(index));
            place.store(word, Ordering::Relaxed);
        }
        let offered = self.mapping.word(layout::DEVICE_OFFERED);
        offered.store(1, Ordering::SeqCst);
    }

    /// Whether a rank of this host has mapped the buffer.
    pub fn is_mapped_by(&self, rank: Rank) -> bool {
        self.mapped(rank) >= mapped::HOST
    }

    /// Whether a rank of this host has opened the buffer in device memory too.
    pub fn device_is_mapped_by(&self, rank: Rank) -> bool {
        self.mapped(rank) == mapped::DEVICE
    }

    /// Whether a rank of this host has tried to open it in vain.
    pub fn device_is_refused_to(&self, rank: Rank) -> bool {
        self.mapped(rank) == mapped::REFUSED
    }

    /// From now on nobody opens the buffer in device memory any more.
    pub fn withdraw_device(&self) {
        // Against `Import::opens_device`: one of both sees what the other has written.
        self.mapping
            .word(layout::DEVICE_OFFERED)
            .store(0, Ordering::SeqCst);
    }

    /// The ranks that have the buffer in device memory open.
    pub fn device_users(&self) -> Vec<Rank> {
        let is_user = |rank: &Rank| matches!(self.mapped(*rank), mapped::OPENING | mapped::DEVICE);
        (0..layout::MAX_RANKS).map(Rank).filter(is_user).collect()
    }

    /// A rank whose process has ended has nothing open.
    pub fn forget_device_user(&self, rank: Rank) {
        if let Some(word) = layout::mapped_word(rank) {
            self.mapping
                .word(word)
                .store(mapped::HOST, Ordering::SeqCst);
        }
    }

    fn mapped(&self, rank: Rank) -> u32 {
        layout::mapped_word(rank).map_or(0, |word| self.mapping.word(word).load(Ordering::SeqCst))
    }

    /// Hands a block over to a peer that has mapped the buffer (BU-1); `None` when it is not of
    /// this pool, somebody else holds it too, or too many blocks are lent.
    pub fn lend(self: &Arc<Self>, buffer: &Buffer) -> Option<SharedPlace> {
        self.owner.check().ok()?;
        let memory: Arc<dyn Any + Send + Sync> = Arc::<dyn Lent>::clone(buffer.as_lent()?);
        let region = memory.downcast::<Region>().ok()?;
        // One is the buffer's own, one is ours.
        if !Arc::ptr_eq(&region.holder.pool, self) || Arc::strong_count(&region) > 2 {
            return None;
        }
        self.lend_block(SharedMemory::Host, region.holder.offset(), region)
    }

    /// Copies bytes into a block of their own and hands that over; `None` when there is no room, or too many blocks are
    /// lent.
    pub fn lend_copy(self: &Arc<Self>, bytes: &[u8]) -> Option<SharedPlace> {
        if !self.can_lend() {
            return None;
        }
        let mut region = self.take(bytes.len())?;
        region.range.as_mut_bytes().copy_from_slice(bytes);
        self.lend_block(SharedMemory::Host, region.holder.offset(), Arc::new(region))
    }

    /// Whether one more block can be lent, after taking back what was given back.
    pub fn can_lend(&self) -> bool {
        if self.lock().slots.is_empty() {
            self.take_back(usize::MAX);
        }
        let state = self.lock();
        !state.slots.is_empty() && !state.closed
    }

    /// Lends memory, of this buffer or the one in device memory, and keeps it until it is given back.
    pub fn lend_block(
        &self,
        memory: SharedMemory,
        offset: u64,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> Option<SharedPlace> {
        if !self.can_lend() {
            return None;
        }
        let mut state = self.lock();
        let slot = state.slots.pop()?;
        let word = layout::slot_word(slot)?;
        self.mapping.word(word).store(slot::LENT, Ordering::Release);
        state.lent.push_back(Loan {
            slot,
            _memory: kept,
        });
        Some(SharedPlace {
            memory,
            slot,
            offset,
        })
    }

    /// Takes back a block that was not sent after all.
    pub fn revoke(&self, place: SharedPlace) {
        if let Some(word) = layout::slot_word(place.slot) {
            self.mapping.word(word).store(slot::FREE, Ordering::Release);
        }
    }

    /// Takes and lends no block any more, and waits for none that a peer has: what is lent holds the buffer, and a peer
    /// may keep it for as long as its own process lives. Its mapping keeps the memory until then.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let lent = std::mem::take(&mut state.lent);
        drop(state);
        // Their blocks go back to the allocator here, which takes the lock again.
        drop(lent);
    }

    /// Bytes in use here or lent, after taking back what was given back.
    pub fn used_bytes(&self) -> u64 {
        self.take_back(usize::MAX);
        let state = self.lock();
        state.allocator.capacity() - state.allocator.free_bytes()
    }

    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Option<Region> {
        if bytes == 0 || !self.owner.is_here() || self.lock().closed {
            return None;
        }
        self.take_back(LOOKED_AT);
        let mut block = self.lock().allocator.allocate(bytes as u64);
        if block.is_none() {
            self.take_back(usize::MAX);
            block = self.lock().allocator.allocate(bytes as u64);
        }
        let block = block?;
        let offset = layout::HEAD_BYTES + block.offset as usize;
        Some(Region {
            range: MappedRange::new(Arc::clone(&self.mapping), offset, bytes),
            holder: OwnBlock {
                pool: Arc::clone(self),
                block,
                zone: None,
            },
        })
    }

    /// Looks at so many of the lent blocks for some that were given back, the oldest first.
    pub fn take_back(&self, at_most: usize) {
        let mut given_back = Vec::new();
        let mut state = self.lock();
        let mut index = 0;
        for _ in 0..at_most.min(state.lent.len()) {
            let slot = state.lent[index].slot;
            let word = layout::slot_word(slot).expect("lent slots exist");
            if self.mapping.word(word).load(Ordering::Acquire) == slot::FREE {
                given_back.extend(state.lent.remove(index));
                state.slots.push(slot);
            } else {
                index += 1;
            }
        }
        drop(state);
        // Their blocks go back to the allocator here, which takes the lock again.
        drop(given_back);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Pool({} bytes)", self.mapping.len())
    }
}

impl<H: Send + Sync + 'static> Lent for LentRange<H> {
    fn as_bytes(&self) -> &[u8] {
        self.range.as_bytes()
    }

    fn len(&self) -> usize {
        self.range.len()
    }

    fn start(&self) -> *mut u8 {
        self.range.start()
    }
}

impl Drop for OwnBlock {
    fn drop(&mut self) {
        // A forked child has a copy of the allocator, whose lock a thread of the parent may have held (BU-4).
        if !self.pool.owner.is_here() {
            return;
        }
        let freed = match &self.zone {
            Some(zone) => zone.lock().free(self.block),
            None => self.pool.lock().allocator.free(self.block),
        };
        if let Err(error) = freed {
            tracing::error!(%error, "a block of the persistent buffer was given back twice");
        }
    }
}
