//! Host memory that is locked for devices, kept for the next tensors of its size.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use shardwright_system::Owner;
use shardwright_system::sync::{Mutex, MutexGuard};
use shardwright_wire::{Buffer, Lent};

/// Host memory that a frontend has allocated and locked.
pub trait HostBlock: Send + Sync {
    /// The bytes.
    fn as_bytes(&self) -> &[u8];
    /// The bytes, to write to.
    fn as_bytes_mut(&mut self) -> &mut [u8];
    /// Where they begin.
    fn start(&self) -> *mut u8;
    /// How many there are, without a look at them.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The blocks of a rank. Nothing is locked or unlocked while training repeats its sizes.
pub struct HostPool {
    state: Mutex<Blocks>,
    owner: Owner,
}

#[derive(Default)]
struct Blocks {
    idle: BTreeMap<usize, Vec<Box<dyn HostBlock>>>,
    idle_bytes: usize,
    bytes: usize,
}

/// A block in use. It goes back to its pool when nobody has it any more.
pub struct LeasedBlock {
    block: Option<Box<dyn HostBlock>>,
    len: usize,
    pool: Arc<HostPool>,
}

impl Default for HostPool {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            owner: Owner::this_process(),
        }
    }
}

impl HostPool {
    /// The smallest idle block of at least `len` bytes and at most twice as many.
    pub fn lease(self: &Arc<Self>, len: usize) -> Option<LeasedBlock> {
        let mut state = self.lock();
        let fits = len..=len.saturating_mul(2);
        let size = *state.idle.range(fits).next()?.0;
        let blocks = state.idle.get_mut(&size)?;
        let block = blocks.pop();
        if blocks.is_empty() {
            state.idle.remove(&size);
        }
        state.idle_bytes -= size;
        drop(state);
        Some(self.leased(block?, len))
    }

    /// Takes a new block for `len` bytes. Where more lies idle than is in use, what lies idle is let go: sizes have changed.
    ///
    /// # Panics
    /// When the block is smaller.
    pub fn add(self: &Arc<Self>, block: Box<dyn HostBlock>, len: usize) -> LeasedBlock {
        let size = block.len();
        assert!(len <= size, "a block of {size} bytes for {len}");
        let mut state = self.lock();
        let mut gone = BTreeMap::new();
        if state.idle_bytes > state.bytes - state.idle_bytes {
            state.bytes -= std::mem::take(&mut state.idle_bytes);
            gone = std::mem::take(&mut state.idle);
        }
        state.bytes += size;
        drop(state);
        drop(gone); // calls the frontend, and so not under the lock
        self.leased(block, len)
    }

    /// The bytes of all blocks, in use or not.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes as u64
    }

    fn leased(self: &Arc<Self>, block: Box<dyn HostBlock>, len: usize) -> LeasedBlock {
        LeasedBlock {
            block: Some(block),
            len,
            pool: Arc::clone(self),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeasedBlock {
    /// The bytes, to write to.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        let block = self.block.as_mut().expect("a block until it is dropped");
        &mut block.as_bytes_mut()[..len]
    }

    /// The block, to be shared and not written to any more.
    pub fn into_buffer(self) -> Buffer {
        Buffer::lent(Arc::new(self))
    }

    fn block(&self) -> &dyn HostBlock {
        self.block.as_deref().expect("a block until it is dropped")
    }
}

impl Lent for LeasedBlock {
    fn as_bytes(&self) -> &[u8] {
        &self.block().as_bytes()[..self.len]
    }

    fn len(&self) -> usize {
        self.len
    }

    fn start(&self) -> *mut u8 {
        self.block().start()
    }
}

impl Drop for LeasedBlock {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else {
            return;
        };
        if !self.pool.owner.is_here() {
            std::mem::forget(block); // in a forked child, where the lock may be held for ever
            return;
        }
        let size = block.len();
        let mut state = self.pool.lock();
        state.idle_bytes += size;
        state.idle.entry(size).or_default().push(block);
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HostPool").finish_non_exhaustive()
    }
}
