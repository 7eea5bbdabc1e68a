//! A block of a pool that is given out in parts.

use std::any::Any;
use std::sync::{Arc, OnceLock, PoisonError};

use shardwright_wire::Buffer;

use super::allocator::Allocator;
use super::layout;
use super::pool::{OwnBlock, Pool, Region};
use super::raw::MappedRange;
use shardwright_system::sync::{Mutex, MutexGuard};

/// A block that is given out in parts, all of which lie in memory that a device may be told of.
pub struct Zone {
    /// What goes with the last part, before the memory.
    bound: OnceLock<Box<dyn Any + Send + Sync>>,
    whole: Region,
    allocator: Mutex<Allocator>,
}

impl Zone {
    /// So many bytes of a pool; `None` where there is no room.
    pub fn of(pool: &Arc<Pool>, bytes: usize) -> Option<Arc<Self>> {
        let whole = pool.take(bytes)?;
        let allocator = Mutex::new(Allocator::new(bytes as u64, layout::ALIGNMENT));
        Some(Arc::new(Self {
            bound: OnceLock::new(),
            whole,
            allocator,
        }))
    }

    /// Binds something to its memory: it is dropped when no part is left.
    pub fn bind(&self, bound: impl Any + Send + Sync) {
        // Only its maker binds, once.
        drop(self.bound.set(Box::new(bound)));
    }

    /// Where it begins, and how long it is.
    pub fn range(&self) -> (*mut u8, usize) {
        (self.whole.range.start(), self.whole.range.len())
    }

    /// A part that is filled later, through its start; `None` where there is no room.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Buffer> {
        let block = self.lock().allocate(bytes as u64)?;
        let pool = Arc::clone(&self.whole.holder.pool);
        let offset = layout::HEAD_BYTES as u64 + self.whole.holder.block.offset + block.offset;
        Some(Buffer::lent(Arc::new(Region {
            range: MappedRange::new(Arc::clone(&pool.mapping), offset as usize, bytes),
            holder: OwnBlock {
                pool,
                block,
                zone: Some(Arc::clone(self)),
            },
        })))
    }

    /// Where it begins behind the pool's head.
    pub(super) fn offset(&self) -> u64 {
        self.whole.holder.block.offset
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Allocator> {
        self.allocator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
