//! Whether boxes hold each element of a tensor once, in time that grows with their number. Pure.
//!
//! Each coordinate of each dimension has a weight W, and a box the product of W(end) - W(begin) over its dimensions. The
//! products of boxes that hold each element once add up to that of the whole tensor. Of others the difference is a polynomial
//! of the weights that is not zero, of a degree of the number of dimensions. For weights that nobody can choose it is zero once
//! in 2^55 times. They are hashes of all that is given, so that they are the same each time, and nobody can choose.

use crate::region::Boxed;

/// A Mersenne prime, modulo which is counted.
const PRIME: u64 = (1 << 61) - 1;

/// Whether the boxes, which lie inside a tensor of this shape, hold each of its elements once.
pub(crate) fn tile(shape: &[u64], boxes: &[Boxed]) -> bool {
    if let [one] = boxes
        && one.size == shape
    {
        return true;
    }
    let weights = Weights::of(shape, boxes);
    let parts = boxes.iter().map(|one| {
        let sides = one.offset.iter().zip(&one.size);
        weights.product(sides.map(|(offset, size)| (*offset, offset + size)))
    });
    let sum = parts.fold(0, |sum, part| (sum + part) % PRIME);
    sum == weights.product(shape.iter().map(|side| (0, *side)))
}

struct Weights([u8; blake3::KEY_LEN]);

impl Weights {
    fn of(shape: &[u64], boxes: &[Boxed]) -> Self {
        let mut hasher = blake3::Hasher::new();
        let mut take = |numbers: &[u64]| {
            for number in numbers {
                hasher.update(&number.to_le_bytes());
            }
        };
        take(shape);
        for one in boxes {
            take(&one.offset);
            take(&one.size);
        }
        Self(*hasher.finalize().as_bytes())
    }

    fn product(&self, sides: impl Iterator<Item = (u64, u64)>) -> u64 {
        let lengths = sides.enumerate().map(|(dimension, (begin, end))| {
            let (begin, end) = (self.at(dimension, begin), self.at(dimension, end));
            (end + PRIME - begin) % PRIME
        });
        lengths.fold(1, |product, length| {
            let product = u128::from(product) * u128::from(length) % u128::from(PRIME);
            product as u64
        })
    }

    fn at(&self, dimension: usize, coordinate: u64) -> u64 {
        let mut place = [0; 16];
        place[..8].copy_from_slice(&(dimension as u64).to_le_bytes());
        place[8..].copy_from_slice(&coordinate.to_le_bytes());
        let hash = blake3::keyed_hash(&self.0, &place);
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(first) % PRIME
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::tile;
    use crate::region::Boxed;

    /// By counting how often each element is held.
    fn counted(shape: &[u64], boxes: &[Boxed]) -> bool {
        let all: u64 = shape.iter().product();
        (0..all).all(|mut number| {
            let mut at = vec![0; shape.len()];
            for dimension in (0..shape.len()).rev() {
                at[dimension] = number % shape[dimension];
                number /= shape[dimension];
            }
            let holds = |one: &&Boxed| {
                let sides = one.offset.iter().zip(&one.size).zip(&at);
                sides
                    .into_iter()
                    .all(|((offset, size), at)| (*offset..offset + size).contains(at))
            };
            boxes.iter().filter(holds).count() == 1
        })
    }

    /// A tensor divided again and again, and then perhaps changed.
    fn divided() -> impl Strategy<Value = (Vec<u64>, Vec<Boxed>)> {
        let shape = prop::collection::vec(1u64..5, 0..4);
        let cuts = prop::collection::vec((any::<prop::sample::Index>(), 0usize..4, 1u64..5), 0..8);
        let change = prop::option::of((any::<prop::sample::Index>(), 0usize..4, 0u8..3));
        (shape, cuts, change).prop_map(|(shape, cuts, change)| {
            let mut boxes = vec![Boxed {
                offset: vec![0; shape.len()],
                size: shape.clone(),
            }];
            for (which, dimension, at) in cuts {
                let which = which.index(boxes.len());
                if dimension < shape.len() && at < boxes[which].size[dimension] {
                    let mut rest = boxes[which].clone();
                    rest.offset[dimension] += at;
                    rest.size[dimension] -= at;
                    boxes[which].size[dimension] = at;
                    boxes.push(rest);
                }
            }
            if let Some((which, dimension, kind)) = change {
                let which = which.index(boxes.len());
                let one = &mut boxes[which];
                match kind {
                    0 => boxes.push(boxes[which].clone()),
                    1 => drop(boxes.swap_remove(which)),
                    _ if dimension < shape.len() && one.offset[dimension] > 0 => {
                        one.offset[dimension] -= 1;
                    }
                    _ => {}
                }
            }
            (shape, boxes)
        })
    }

    proptest! {
        #[test]
        fn boxes_tile_when_each_element_is_held_once((shape, boxes) in divided()) {
            prop_assert_eq!(tile(&shape, &boxes), counted(&shape, &boxes));
        }
    }
}
