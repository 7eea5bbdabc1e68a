//! The Mersenne Twister MT19937, moved forward without drawing (Haramoto et al., "Efficient Jump Ahead for
//! F2-Linear Random Number Generators", 2008).
//!
//! Its words are a linear recurrence over bits: each word is a sum (exclusive or) of earlier ones. Word `n` is the sum
//! of those of the first 19937 words whose power of `x` is in the remainder of `x^n` by the characteristic polynomial.

use std::sync::LazyLock;

/// Words of a block, which the generator makes at once.
pub const BLOCK: usize = 624;
const DISTANCE: usize = 397;
const MATRIX: u32 = 0x9908_B0DF;
/// The degree of the characteristic polynomial: the bits of the state.
const DEGREE: usize = 19937;
/// Words of a polynomial of at most that degree, of 64 bits each.
const WORDS: usize = DEGREE / 64 + 1;

/// Exponents of the characteristic polynomial but the highest. The second is far below the first.
static LOWER_EXPONENTS: LazyLock<Vec<usize>> = LazyLock::new(|| {
    // Matsumoto and Nishimura, 1998, appendix A, with n = 624, m = 397, w = 32, r = 31.
    let outer = [BLOCK, DISTANCE];
    let inner = [BLOCK - 1, DISTANCE - 1];
    let mut polynomial = [0_u64; WORDS];
    let powers = std::iter::successors(Some(vec![0]), |power| Some(times(power, inner)));
    let powers: Vec<_> = powers.take(32).collect();
    let mut add = |exponents: &[usize]| {
        for exponent in exponents {
            polynomial[exponent / 64] ^= 1 << (exponent % 64);
        }
    };
    add(&times(&powers[31], outer));
    for bit in 0..31 {
        if MATRIX >> bit & 1 == 1 {
            add(&times(&powers[30 - bit], outer));
        }
    }
    if MATRIX >> 31 & 1 == 1 {
        add(&[0]);
    }
    let is_in = |exponent: &usize| polynomial[exponent / 64] >> (exponent % 64) & 1 == 1;
    (0..DEGREE).filter(is_in).collect()
});

/// A polynomial times one of two terms, each as its exponents.
fn times(exponents: &[usize], terms: [usize; 2]) -> Vec<usize> {
    let mut product: Vec<usize> = exponents
        .iter()
        .flat_map(|exponent| terms.map(|term| exponent + term))
        .collect();
    product.sort_unstable();
    let mut left: Vec<usize> = Vec::new();
    for exponent in product {
        if left.last() == Some(&exponent) {
            left.pop(); // twice is none
        } else {
            left.push(exponent);
        }
    }
    left
}

/// The remainder of `x^exponent` by the characteristic polynomial.
fn power_of_x(exponent: u128) -> [u64; WORDS] {
    let mut remainder = [0; WORDS];
    remainder[0] = 1;
    for bit in (0..u128::BITS - exponent.leading_zeros()).rev() {
        remainder = squared(&remainder);
        if exponent >> bit & 1 == 1 {
            let mut carry = 0;
            for word in &mut remainder {
                (*word, carry) = (*word << 1 | carry, *word >> 63);
            }
            if remainder[DEGREE / 64] >> (DEGREE % 64) & 1 == 1 {
                remainder[DEGREE / 64] ^= 1 << (DEGREE % 64);
                for lower in LOWER_EXPONENTS.iter() {
                    remainder[lower / 64] ^= 1 << (lower % 64);
                }
            }
        }
    }
    remainder
}

/// The remainder of a square: over bits, that is every exponent doubled.
fn squared(polynomial: &[u64; WORDS]) -> [u64; WORDS] {
    let mut wide = [0_u64; 2 * WORDS + 1];
    for (index, word) in polynomial.iter().enumerate() {
        wide[2 * index] = spread(*word as u32);
        wide[2 * index + 1] = spread((*word >> 32) as u32);
    }
    // Words from the highest down to that of the highest term, whose upper bits alone are reduced.
    for index in (DEGREE / 64..2 * WORDS).rev() {
        let kept = if index == DEGREE / 64 {
            (1 << (DEGREE % 64)) - 1
        } else {
            0
        };
        let high = wide[index] & !kept;
        wide[index] &= kept;
        for lower in LOWER_EXPONENTS.iter() {
            // Each bit of `high` moves down by the same distance. One word is added, as the lowest ones would come before the first; they are zero.
            let lowest = (index + 1) * 64 - (DEGREE - lower);
            let (word, shift) = (lowest / 64, lowest % 64);
            if word > 0 {
                wide[word - 1] ^= high << shift;
            }
            if shift > 0 {
                wide[word] ^= high >> (64 - shift);
            }
        }
    }
    let mut remainder = [0; WORDS];
    remainder.copy_from_slice(&wide[..WORDS]);
    remainder
}

/// The bits of a word with a zero after each.
fn spread(word: u32) -> u64 {
    let mut wide = u64::from(word);
    for (shift, mask) in [
        (16, 0x0000_FFFF_0000_FFFF),
        (8, 0x00FF_00FF_00FF_00FF),
        (4, 0x0F0F_0F0F_0F0F_0F0F),
        (2, 0x3333_3333_3333_3333),
        (1, 0x5555_5555_5555_5555_u64),
    ] {
        wide = (wide | wide << shift) & mask;
    }
    wide
}

/// The block that comes `blocks` after one.
pub fn block_after(block: &[u32; BLOCK], blocks: u64) -> [u32; BLOCK] {
    let Some(whole) = blocks.checked_sub(1) else {
        return *block;
    };
    let powers = power_of_x(u128::from(whole) * BLOCK as u128 + (BLOCK as u128 - 1));
    // All words from the second on are functions of the state; of the first one, only the highest bit is.
    let mut words = block.to_vec();
    for next in 0..=DEGREE {
        let twisted = words[next] & 0x8000_0000 | words[next + 1] & 0x7FFF_FFFF;
        let added = if twisted & 1 == 1 { MATRIX } else { 0 };
        words.push(words[next + DISTANCE] ^ twisted >> 1 ^ added);
    }
    let mut sum = [0; BLOCK];
    for exponent in 0..DEGREE {
        if powers[exponent / 64] >> (exponent % 64) & 1 == 1 {
            for (of_sum, word) in sum.iter_mut().zip(&words[exponent + 1..]) {
                *of_sum ^= word;
            }
        }
    }
    sum
}

/// How far the words of a generator's block are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advance {
    /// How many blocks come before the one it stands in then.
    pub blocks: u64,
    /// How many words of that one are drawn.
    pub drawn: u64,
}

/// Where a generator stands that has drawn `drawn` words of its block, after it has drawn `words` more.
pub fn advance(drawn: u64, words: u64) -> Advance {
    let block = BLOCK as u64;
    let end = u128::from(drawn) + u128::from(words);
    if words == 0 || end <= u128::from(block) {
        return Advance {
            blocks: 0,
            drawn: drawn + words,
        };
    }
    // A block is made when its first word is drawn, and stays until all of them are.
    let blocks = (end - 1) / u128::from(block);
    Advance {
        blocks: blocks as u64,
        drawn: (end - blocks * u128::from(block)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Advance, BLOCK, DISTANCE, MATRIX, advance, block_after};

    /// The generator's own way, one block after another.
    fn next(block: &[u32; BLOCK]) -> [u32; BLOCK] {
        let mut made = *block;
        for index in 0..BLOCK {
            let twisted = made[index] & 0x8000_0000 | made[(index + 1) % BLOCK] & 0x7FFF_FFFF;
            let added = if twisted & 1 == 1 { MATRIX } else { 0 };
            made[index] = made[(index + DISTANCE) % BLOCK] ^ twisted >> 1 ^ added;
        }
        made
    }

    fn seeded(seed: u32) -> [u32; BLOCK] {
        let mut block = [seed; BLOCK];
        for index in 1..BLOCK {
            let before = block[index - 1];
            block[index] = 1_812_433_253_u32
                .wrapping_mul(before ^ before >> 30)
                .wrapping_add(index as u32);
        }
        block
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn a_jump_ends_where_the_blocks_between_end(seed: u32, blocks in 0_u64..300) {
            let start = seeded(seed);
            let expected = (0..blocks).fold(start, |block, _| next(&block));
            prop_assert_eq!(block_after(&start, blocks), expected);
        }

        #[test]
        fn two_jumps_are_one(seed: u32, first in 1_u64..1 << 40, second in 1_u64..1 << 40) {
            let start = seeded(seed);
            let there = block_after(&block_after(&start, first), second);
            prop_assert_eq!(there, block_after(&start, first + second));
        }

        #[test]
        fn words_are_counted_as_the_generator_counts_them(drawn in 0..=BLOCK as u64, words in 0_u64..5000) {
            let mut expected = Advance { blocks: 0, drawn };
            for _ in 0..words {
                if expected.drawn == BLOCK as u64 {
                    expected = Advance { blocks: expected.blocks + 1, drawn: 0 };
                }
                expected.drawn += 1;
            }
            prop_assert_eq!(advance(drawn, words), expected);
        }
    }
}
