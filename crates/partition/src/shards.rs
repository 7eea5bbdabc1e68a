//! Dividing parameters over the ranks that hold all of them, so that each updates a share.

use std::cmp::Reverse;

/// Cuts lie at multiples of this many elements where that is precise enough: vectorized kernels compute the elements
/// before the cut as they would without it.
const ALIGNMENT: u64 = 64;
/// How far a cut may be from the even one, as a fraction of a rank's share: a share has two ends, and so is within 2%,
/// and two shares differ by at most 4%.
const TOLERANCE: u128 = 100;

/// A parameter to be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardItem {
    /// Its number of elements.
    pub numel: u64,
    /// The bytes of each.
    pub element_bytes: u64,
    /// Whether several ranks may have parts of it.
    pub splittable: bool,
}

impl ShardItem {
    fn bytes(&self) -> u128 {
        u128::from(self.numel) * u128::from(self.element_bytes)
    }
}

/// A range of a parameter's elements that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The index of the parameter.
    pub item: usize,
    /// The first element.
    pub start: u64,
    /// The element after the last.
    pub stop: u64,
    /// The index of the rank.
    pub owner: usize,
}

/// Divides parameters over ranks that have so many bytes already, one number for each rank.
///
/// Whole parameters go, the largest first, to the rank that has least. Then those that can be split fill the ranks up
/// to one level, in their order, so that at most one parameter is cut between two ranks, and none where its end is near
/// enough.
///
/// Returns the shards in the order of parameters, and of elements within each. There is at least one of every
/// parameter, and none without ranks.
///
/// ```
/// use shardwright_partition::{Shard, ShardItem, shards};
///
/// let item = ShardItem { numel: 1024, element_bytes: 4, splittable: true };
/// let halves = shards(&[item], &[0, 0]);
/// assert_eq!(halves[0], Shard { item: 0, start: 0, stop: 512, owner: 0 });
/// assert_eq!(halves[1], Shard { item: 0, start: 512, stop: 1024, owner: 1 });
/// ```
pub fn shards(items: &[ShardItem], loads: &[u64]) -> Vec<Shard> {
    if loads.is_empty() {
        return Vec::new();
    }
    let mut loads: Vec<u128> = loads.iter().map(|&load| load.into()).collect();
    let mut found = whole(items, &mut loads);
    split(items, &loads, &mut found);
    found.sort_by_key(|shard| (shard.item, shard.start));
    found
}

/// Places the parameters that cannot be split, and adds them to the loads.
fn whole(items: &[ShardItem], loads: &mut [u128]) -> Vec<Shard> {
    let mut order: Vec<usize> = (0..items.len())
        .filter(|&item| !items[item].splittable)
        .collect();
    order.sort_by_key(|&item| (Reverse(items[item].bytes()), item));
    order
        .into_iter()
        .map(|item| {
            let owner = (0..loads.len())
                .min_by_key(|&rank| loads[rank])
                .unwrap_or_default();
            loads[owner] += items[item].bytes();
            Shard {
                item,
                start: 0,
                stop: items[item].numel,
                owner,
            }
        })
        .collect()
}

/// Fills the ranks up to one level with the parameters that can be split.
fn split(items: &[ShardItem], loads: &[u128], found: &mut Vec<Shard>) {
    let total = items
        .iter()
        .filter(|item| item.splittable)
        .map(ShardItem::bytes)
        .sum();
    let (level, rooms) = rooms(loads, total);
    let tolerance = level / TOLERANCE;
    let mut ends = rooms.iter().scan(0, |end, room| {
        *end += room;
        Some(*end)
    });
    let (mut owner, mut end) = (0, ends.next().unwrap_or_default());
    let mut position: u128 = 0;
    for (index, item) in items.iter().enumerate().filter(|(_, item)| item.splittable) {
        let mut start = 0;
        while owner + 1 < loads.len() && position + item.bytes() > end {
            let cut = cut(item, end.saturating_sub(position), tolerance).max(start);
            if cut == item.numel && start < item.numel {
                break; // all of it, a little more than the rank's share
            }
            if cut > start {
                found.push(Shard {
                    item: index,
                    start,
                    stop: cut,
                    owner,
                });
                start = cut;
            }
            owner += 1;
            end = ends.next().unwrap_or_default();
        }
        found.push(Shard {
            item: index,
            start,
            stop: item.numel,
            owner,
        });
        position += item.bytes();
    }
}

/// The level to which `total` bytes fill the ranks, and how many of them each gets.
fn rooms(loads: &[u128], total: u128) -> (u128, Vec<u128>) {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&rank| (loads[rank], rank));
    let mut sum = total;
    let mut filled = 0;
    for &rank in &order {
        if filled > 0 && loads[rank] * filled as u128 >= sum {
            break; // above the level
        }
        sum += loads[rank];
        filled += 1;
    }
    let (level, mut rest) = (sum / filled as u128, sum % filled as u128);
    let mut rooms = vec![0; loads.len()];
    order.truncate(filled);
    order.sort_unstable();
    for rank in order {
        let one = u128::from(rest > 0);
        rest -= one;
        rooms[rank] = level + one - loads[rank];
    }
    (level, rooms)
}

/// Where to cut a parameter that is to be cut after so many bytes, in elements: at one of its ends where that is near.
fn cut(item: &ShardItem, bytes: u128, tolerance: u128) -> u64 {
    let rest = item.bytes() - bytes;
    if bytes.min(rest) <= tolerance {
        return if bytes <= rest { 0 } else { item.numel };
    }
    let size = u128::from(item.element_bytes.max(1));
    let mut alignment = u128::from(ALIGNMENT);
    while alignment > 1 && alignment * size > tolerance {
        alignment /= 2;
    }
    let step = alignment * size;
    let cut = (bytes + step / 2) / step * alignment;
    u64::try_from(cut).map_or(item.numel, |cut| cut.min(item.numel))
}
