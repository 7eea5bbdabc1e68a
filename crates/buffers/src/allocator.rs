//! Which ranges of a persistent buffer are taken: arithmetic only, the memory is elsewhere.
//!
//! A range is taken from the smallest hole that it fits into, among equals from
//! the lowest, and from that hole's low end. The steps of a training repeat
//! their sizes, so the smallest hole is mostly the one that the same tensor
//! left in the last step: its pages are mapped and perhaps still in a cache,
//! and larger holes stay whole for larger tensors. What was never used lies at
//! the high end and is touched last, so a small job never pays for the whole
//! buffer.
//!
//! - AL-1: ranges that are taken never overlap, lie within the capacity and
//!   begin at multiples of the alignment.
//! - AL-2: no two holes touch: neighbours become one when a range is freed.
//! - AL-3: the same calls give the same ranges.
//! - AL-4: every call takes time logarithmic in the number of ranges.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

/// A range of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Where it begins, in bytes from the buffer's beginning.
    pub offset: u64,
    /// The bytes that were asked for; what they occupy is rounded up to the alignment.
    pub len: u64,
}

/// A block that was freed but is not allocated (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no block of {} bytes at offset {} is allocated", .0.len, .0.offset)]
pub struct NotAllocated(
    /// The block.
    pub Block,
);

/// Allocates ranges of a buffer of fixed capacity.
#[derive(Clone, Debug)]
pub struct Allocator {
    capacity: u64,
    alignment: u64,
    /// Bytes asked for, by offset.
    taken: BTreeMap<u64, u64>,
    /// Lengths of holes, by offset.
    holes: BTreeMap<u64, u64>,
    /// The same holes as length and offset: the first that is long enough is the best fit.
    by_length: BTreeSet<(u64, u64)>,
    free_bytes: u64,
}

impl Allocator {
    /// An allocator for a buffer of `capacity` bytes that is itself aligned.
    ///
    /// A capacity that is no multiple of the alignment is rounded down; an alignment of 0 is 1.
    pub fn new(capacity: u64, alignment: u64) -> Self {
        let alignment = alignment.max(1);
        let capacity = capacity - capacity % alignment;
        let mut allocator = Self {
            capacity,
            alignment,
            taken: BTreeMap::new(),
            holes: BTreeMap::new(),
            by_length: BTreeSet::new(),
            free_bytes: 0,
        };
        allocator.add_hole(0, capacity);
        allocator.free_bytes = capacity;
        allocator
    }

    /// Takes a range; `None` when no hole is long enough.
    ///
    /// No bytes need no room: such a block is always granted, at offset 0, and
    /// counts nowhere.
    pub fn allocate(&mut self, bytes: u64) -> Option<Block> {
        if bytes == 0 {
            return Some(Block { offset: 0, len: 0 });
        }
        let occupied = self.occupied(bytes)?;
        let &(length, offset) = self.by_length.range((occupied, 0)..).next()?;
        self.remove_hole(offset, length);
        self.add_hole(offset + occupied, length - occupied);
        self.taken.insert(offset, bytes);
        self.free_bytes -= occupied;
        Some(Block { offset, len: bytes })
    }

    /// Gives a range back.
    pub fn free(&mut self, block: Block) -> Result<(), NotAllocated> {
        if block.len == 0 {
            return Ok(());
        }
        if self.taken.get(&block.offset) != Some(&block.len) {
            return Err(NotAllocated(block));
        }
        let occupied = self.occupied(block.len).ok_or(NotAllocated(block))?;
        self.taken.remove(&block.offset);
        self.free_bytes += occupied;
        let (mut offset, mut end) = (block.offset, block.offset + occupied);
        if let Some((&before, &length)) = self.holes.range(..offset).next_back()
            && before + length == offset
        {
            self.remove_hole(before, length);
            offset = before;
        }
        if let Some(&length) = self.holes.get(&end) {
            self.remove_hole(end, length);
            end += length;
        }
        self.add_hole(offset, end - offset);
        Ok(())
    }

    /// The bytes that can be taken at all, were nothing taken.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The bytes that are not occupied, in however many pieces.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The most bytes that one block can have now.
    pub fn largest_free(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Whether nothing is taken.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    fn occupied(&self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(self.alignment)
    }

    fn add_hole(&mut self, offset: u64, length: u64) {
        if length > 0 {
            self.holes.insert(offset, length);
            self.by_length.insert((length, offset));
        }
    }

    fn remove_hole(&mut self, offset: u64, length: u64) {
        self.holes.remove(&offset);
        self.by_length.remove(&(length, offset));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Allocator, Block, NotAllocated};

    #[test]
    fn a_range_comes_from_the_smallest_hole_that_fits() {
        let mut allocator = Allocator::new(100, 1);
        let [small, _wall, large, _other] =
            [10, 1, 20, 1].map(|bytes| allocator.allocate(bytes).unwrap());
        allocator.free(large).unwrap();
        allocator.free(small).unwrap();
        assert_eq!(allocator.allocate(9), Some(Block { offset: 0, len: 9 }));
        assert_eq!(
            allocator.allocate(12),
            Some(Block {
                offset: 11,
                len: 12
            })
        );
    }

    #[test]
    fn the_range_that_was_freed_is_the_next_one_taken() {
        let mut allocator = Allocator::new(1 << 20, 64);
        let first = allocator.allocate(1000).unwrap();
        for _ in 0..3 {
            allocator.free(first).unwrap();
            assert_eq!(allocator.allocate(1000), Some(first));
        }
    }

    #[test]
    fn no_bytes_are_always_granted_and_occupy_nothing() {
        let mut allocator = Allocator::new(64, 64);
        let all = allocator.allocate(64).unwrap();
        let nothing = allocator.allocate(0).unwrap();
        assert_eq!(nothing.len, 0);
        allocator.free(nothing).unwrap();
        allocator.free(all).unwrap();
        assert!(allocator.is_empty());
    }

    #[test]
    fn what_is_not_allocated_cannot_be_freed() {
        let mut allocator = Allocator::new(256, 64);
        let block = allocator.allocate(100).unwrap();
        for wrong in [
            Block {
                offset: 64,
                len: 36,
            },
            Block {
                offset: 0,
                len: 128,
            },
            Block {
                offset: u64::MAX,
                len: u64::MAX,
            },
        ] {
            assert_eq!(allocator.free(wrong), Err(NotAllocated(wrong)));
        }
        allocator.free(block).unwrap();
        let error = allocator.free(block).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no block of 100 bytes at offset 0 is allocated"
        );
    }

    #[test]
    fn odd_capacities_alignments_and_sizes_are_survived() {
        assert_eq!(Allocator::new(100, 64).capacity(), 64);
        assert_eq!(Allocator::new(63, 64).allocate(1), None);
        assert_eq!(Allocator::new(0, 0).allocate(1), None);
        assert_eq!(Allocator::new(10, 0).largest_free(), 10);
        let mut whole = Allocator::new(u64::MAX, 1);
        assert_eq!(whole.allocate(u64::MAX).unwrap().len, u64::MAX);
        assert_eq!(Allocator::new(u64::MAX, 64).allocate(u64::MAX), None);
    }

    /// The same allocator as a row of units that are taken or not.
    struct Model {
        alignment: usize,
        taken: Vec<bool>,
    }

    impl Model {
        fn new(capacity: u64, alignment: u64) -> Self {
            Self {
                alignment: alignment as usize,
                taken: vec![false; (capacity / alignment) as usize],
            }
        }

        /// Length and start of every hole.
        fn holes(&self) -> Vec<(usize, usize)> {
            let mut holes = Vec::new();
            let mut start = 0;
            for (at, taken) in self.taken.iter().chain([&true]).enumerate() {
                if *taken {
                    if at > start {
                        holes.push((at - start, start));
                    }
                    start = at + 1;
                }
            }
            holes
        }

        fn mark(&mut self, block: Block, taken: bool) {
            let start = block.offset as usize / self.alignment;
            let units = (block.len as usize).div_ceil(self.alignment);
            for unit in &mut self.taken[start..start + units] {
                assert_ne!(*unit, taken, "AL-1: {block:?}");
                *unit = taken;
            }
        }

        fn allocate(&mut self, bytes: u64) -> Option<Block> {
            let units = (bytes as usize).div_ceil(self.alignment);
            let (_, start) = self
                .holes()
                .into_iter()
                .filter(|&(length, _)| length >= units)
                .min()?;
            let block = Block {
                offset: (start * self.alignment) as u64,
                len: bytes,
            };
            self.mark(block, true);
            Some(block)
        }

        fn free_bytes(&self) -> u64 {
            (self.taken.iter().filter(|taken| !**taken).count() * self.alignment) as u64
        }

        fn largest_free(&self) -> u64 {
            let units = self
                .holes()
                .into_iter()
                .max()
                .map_or(0, |(length, _)| length);
            (units * self.alignment) as u64
        }
    }

    #[derive(Clone, Debug)]
    enum Call {
        Allocate(u64),
        /// The block at this index among those taken, modulo their number.
        Free(usize),
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let call = prop_oneof![
            3 => (0_u64..200).prop_map(Call::Allocate),
            2 => any::<usize>().prop_map(Call::Free),
        ];
        proptest::collection::vec(call, 0..200)
    }

    proptest! {
        #[test]
        fn it_does_what_a_row_of_units_does(
            capacity in 0_u64..2000, alignment in 1_u64..70, calls in calls()
        ) {
            let mut model = Model::new(capacity, alignment);
            let mut allocator = Allocator::new(capacity, alignment);
            let mut taken = Vec::new();
            for call in calls {
                match call {
                    Call::Allocate(0) => prop_assert_eq!(allocator.allocate(0).unwrap().len, 0),
                    Call::Allocate(bytes) => {
                        let block = allocator.allocate(bytes);
                        prop_assert_eq!(block, model.allocate(bytes));
                        if let Some(block) = block {
                            prop_assert_eq!(block.offset % alignment, 0);
                            taken.push(block);
                        }
                    }
                    Call::Free(index) if !taken.is_empty() => {
                        let block = taken.swap_remove(index % taken.len());
                        model.mark(block, false);
                        prop_assert_eq!(allocator.free(block), Ok(()));
                        prop_assert_eq!(allocator.free(block), Err(NotAllocated(block)));
                    }
                    Call::Free(_) => {}
                }
                prop_assert_eq!(allocator.free_bytes(), model.free_bytes());
                prop_assert_eq!(allocator.largest_free(), model.largest_free());
                prop_assert_eq!(allocator.is_empty(), taken.is_empty());
                prop_assert_eq!(allocator.holes.len(), model.holes().len(), "AL-2");
                prop_assert_eq!(allocator.by_length.len(), allocator.holes.len());
            }
            for block in taken {
                allocator.free(block).unwrap();
            }
            prop_assert!(allocator.is_empty());
            prop_assert_eq!(allocator.largest_free(), allocator.capacity());
            prop_assert_eq!(allocator.allocate(allocator.capacity()).unwrap().offset, 0);
        }
    }
}
