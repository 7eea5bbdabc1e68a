//! Received memory that came back, for the next messages.

/// Memory that is kept for re-use, up to a bound. Memory that is fresh from the system costs more
/// to touch for the first time than a message costs to copy.
#[derive(Debug, Default)]
pub(crate) struct SpareMemory {
    kept: Vec<Vec<u128>>,
    bytes: usize,
    limit: usize,
}

impl SpareMemory {
    /// Keeps at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Empty memory for `words` words: the smallest kept that is no more than twice as large, else
    /// fresh; `None` where the system has none.
    pub(crate) fn take(&mut self, words: usize) -> Option<Vec<u128>> {
        let fitting = self
            .kept
            .iter()
            .enumerate()
            .filter(|(_, memory)| (words..=words.saturating_mul(2)).contains(&memory.capacity()))
            .min_by_key(|(_, memory)| memory.capacity())
            .map(|(place, _)| place);
        if let Some(place) = fitting {
            let memory = self.kept.swap_remove(place);
            self.bytes -= memory.capacity() * size_of::<u128>();
            return Some(memory);
        }
        let mut memory = Vec::new();
        memory.try_reserve_exact(words).ok()?;
        Some(memory)
    }

    /// Takes memory back, and lets the oldest go where there is too much.
    pub(crate) fn give_back(&mut self, mut memory: Vec<u128>) {
        let bytes = memory.capacity() * size_of::<u128>();
        if bytes == 0 || bytes > self.limit {
            return;
        }
        memory.clear();
        self.kept.push(memory);
        self.bytes += bytes;
        while self.bytes > self.limit {
            let oldest = self.kept.remove(0);
            self.bytes -= oldest.capacity() * size_of::<u128>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_where_it_fits_and_only_up_to_the_bound() {
        let mut spare = SpareMemory::new(100 * 16);
        let place = |memory: &Vec<u128>| memory.as_ptr();
        let (large, small) = (Vec::with_capacity(60), Vec::with_capacity(30));
        let (large_place, small_place) = (place(&large), place(&small));
        spare.give_back(large);
        spare.give_back(small);
        assert_eq!(place(&spare.take(25).unwrap()), small_place);
        let other = spare.take(25).unwrap();
        assert!(other.capacity() < 60, "60 words are too many for 25");
        assert_eq!(place(&spare.take(60).unwrap()), large_place);
        spare.give_back(Vec::with_capacity(101));
        assert_eq!((spare.kept.len(), spare.bytes), (0, 0));
        spare.give_back(Vec::with_capacity(70));
        spare.give_back(Vec::with_capacity(50));
        assert_eq!((spare.kept.len(), spare.bytes), (1, 50 * 16));
    }

    #[test]
    fn memory_that_the_system_does_not_have_is_refused() {
        assert!(SpareMemory::new(0).take(usize::MAX / 16).is_none());
    }
}
