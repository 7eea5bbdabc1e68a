//! Seeds made from seeds.

/// A seed for the `number`-th part of what `seed` stands for: well mixed (the finalizer of
/// `splitmix64`), the same everywhere, and not negative as a signed number.
pub fn derive_seed(seed: u64, number: u64) -> u64 {
    let mut mixed = seed ^ number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) & (u64::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::derive_seed;

    #[test]
    fn seeds_are_stable_and_apart_in_the_bits_that_generators_use() {
        assert_eq!(derive_seed(0, 0), 0x6220_A839_7B1D_CDAF);
        let low: BTreeSet<_> = (0..40)
            .flat_map(|seed| (0..40).map(move |number| derive_seed(seed, number) & 0xFFFF_FFFF))
            .collect();
        assert_eq!(low.len(), 1600);
    }
}
