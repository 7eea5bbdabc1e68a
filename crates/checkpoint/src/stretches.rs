//! Which chunks are read at once. Pure.

use crate::hash::CHUNK_BYTES;

/// Neighbours in a file, each with what belongs to it.
pub(crate) type Stretch<T> = Vec<((usize, u64), T)>;

/// Puts chunks that follow one another in a file together, up to so many, in their order. Nothing that is not wanted is between
/// them.
pub(crate) fn stretches<T>(
    chunks: impl IntoIterator<Item = ((usize, u64), T)>,
    most: usize,
) -> Vec<Stretch<T>> {
    let mut all: Vec<Stretch<T>> = Vec::new();
    for (place, what) in chunks {
        let (file, chunk) = place;
        match all.last_mut() {
            Some(last)
                if last.len() < most
                    && last.last().is_some_and(|((in_file, before), _)| {
                        *in_file == file && before + 1 == chunk
                    }) =>
            {
                last.push((place, what));
            }
            _ => all.push(vec![(place, what)]),
        }
    }
    all
}

/// Where the bytes of chunk number `place` of a stretch lie, if those of all are `bytes` long.
pub(crate) fn within(place: usize, bytes: usize) -> std::ops::Range<usize> {
    let chunk = CHUNK_BYTES as usize;
    place * chunk..((place + 1) * chunk).min(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{stretches, within};
    use crate::hash::CHUNK_BYTES;

    proptest! {
        #[test]
        fn each_chunk_is_in_one_stretch_of_neighbours(
            chunks in prop::collection::btree_set((0usize..3, 0u64..12), 0..30), most in 1usize..6,
        ) {
            let given = chunks.iter().map(|place| (*place, ()));
            let found = stretches(given, most);
            let flat: Vec<_> = found.iter().flatten().map(|(place, ())| *place).collect();
            prop_assert_eq!(flat, chunks.iter().copied().collect::<Vec<_>>());
            for stretch in &found {
                let ((file, first), ()) = stretch[0];
                prop_assert!(stretch.len() <= most);
                for (number, (place, ())) in stretch.iter().enumerate() {
                    prop_assert_eq!(*place, (file, first + number as u64));
                }
            }
            // No two could have been one.
            for pair in found.windows(2) {
                let ((file, last), ()) = pair[0][pair[0].len() - 1];
                prop_assert!(pair[0].len() == most || pair[1][0].0 != (file, last + 1));
            }
        }

        #[test]
        fn chunks_lie_one_behind_another_in_what_is_read(count in 1usize..5, last in 1u64..=CHUNK_BYTES) {
            let bytes = (count - 1) * CHUNK_BYTES as usize + last as usize;
            let ranges: Vec<_> = (0..count).map(|place| within(place, bytes)).collect();
            prop_assert_eq!(ranges[0].start, 0);
            prop_assert_eq!(ranges[count - 1].end, bytes);
            let starts: BTreeSet<usize> = ranges.iter().map(|one| one.start).collect();
            prop_assert_eq!(starts.len(), count);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
