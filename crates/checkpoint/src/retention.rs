//! Which checkpoints go when only some are kept. Pure.

use std::num::NonZeroU32;

/// A complete checkpoint of a directory. One that is still written has no manifest, and is none of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    /// Its name.
    pub tag: String,
    /// Its place in the order of their writing.
    pub sequence: u64,
}

/// The tags of those that go, the oldest first, so that `keep` are left. The one that `newest` names stays, even if others
/// have been written after it.
pub fn superseded(complete: &[Complete], newest: Option<&str>, keep: NonZeroU32) -> Vec<String> {
    let mut order: Vec<&Complete> = complete.iter().collect();
    order.sort_by_key(|one| (Some(&*one.tag) == newest, one.sequence, &one.tag));
    let num_superseded = order.len().saturating_sub(keep.get() as usize);
    let going = order.into_iter().take(num_superseded);
    going.map(|one| one.tag.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::{Complete, superseded};

    fn keep(number: u32) -> NonZeroU32 {
        NonZeroU32::new(number).expect("not 0")
    }

    fn checkpoints(sequences: &[u64]) -> Vec<Complete> {
        let numbered = sequences.iter().enumerate();
        numbered
            .map(|(number, &sequence)| Complete {
                tag: format!("t{number}"),
                sequence,
            })
            .collect()
    }

    #[test]
    fn the_oldest_go() {
        let found = checkpoints(&[5, 3, 9, 4]);
        assert_eq!(superseded(&found, Some("t2"), keep(2)), ["t1", "t3"]);
        assert!(superseded(&found, Some("t2"), keep(4)).is_empty());
    }

    #[test]
    fn the_newest_stays_even_if_others_were_written_later() {
        let found = checkpoints(&[5, 3, 9, 4]);
        assert_eq!(superseded(&found, Some("t1"), keep(1)), ["t3", "t0", "t2"]);
    }

    proptest! {
        #[test]
        fn as_many_are_kept_as_asked_and_newer_ones_before_older(
            sequences in prop::collection::btree_set(0u64..100, 0..12),
            newest in 0usize..12,
            number in 1u32..8,
        ) {
            let sequences: Vec<u64> = sequences.into_iter().collect();
            let found = checkpoints(&sequences);
            let newest = format!("t{newest}");
            let going = superseded(&found, Some(&newest), keep(number));
            prop_assert_eq!(found.len() - going.len(), found.len().min(number as usize));
            prop_assert!(!going.contains(&newest));
            let staying = found.iter().filter(|one| !going.contains(&one.tag) && one.tag != newest);
            let oldest_staying = staying.map(|one| one.sequence).min().unwrap_or(u64::MAX);
            for one in found.iter().filter(|one| going.contains(&one.tag)) {
                prop_assert!(one.sequence < oldest_staying);
            }
        }
    }
}
