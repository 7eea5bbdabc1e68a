//! Dividing a sequence of costs into segments, and devices over segments (paper, equations 2 and 3
//! and Algorithm 3).

use std::ops::Range;

/// Divides `costs` into `num_segments` consecutive segments, none of them empty, so that the
/// largest one's cost is as small as possible.
///
/// Of several best divisions this is the one whose last segment starts earliest, then the one
/// before it, and so on: what does not divide evenly leaves the first segments the lighter ones,
/// and the first device is the one that also holds what lies above.
pub fn segments(costs: &[u64], num_segments: usize) -> Vec<Range<usize>> {
    let len = costs.len();
    let num_segments = num_segments.min(len);
    if num_segments == 0 {
        return Vec::new();
    }
    // `best[end]` is the least possible largest cost of the first `end` in `k` segments.
    let mut best: Vec<u64> = std::iter::once(0)
        .chain(costs.iter().scan(0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }))
        .collect();
    let mut starts = vec![vec![0; len + 1]];
    for k in 2..=num_segments {
        let mut next = vec![u64::MAX; len + 1];
        let mut start_of_last = vec![0; len + 1];
        for end in k..=len {
            let mut last = 0;
            for start in (k - 1..end).rev() {
                last += costs[start];
                if last > next[end] {
                    break;
                }
                let largest = last.max(best[start]);
                if largest <= next[end] {
                    next[end] = largest;
                    start_of_last[end] = start;
                }
            }
        }
        best = next;
        starts.push(start_of_last);
    }
    let mut end = len;
    let mut segments: Vec<Range<usize>> = starts
        .iter()
        .rev()
        .map(|starts| {
            let segment = starts[end]..end;
            end = segment.start;
            segment
        })
        .collect();
    segments.reverse();
    segments
}

/// What takes part in an allotment of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its cost.
    pub cost: u64,
    /// How many devices it can keep busy.
    pub capacity: usize,
}

/// D'Hondt's method: each device in turn goes to the claim with the largest quotient of its cost
/// and the devices it would then have; ties go to the earlier claim.
///
/// A claim never gets more devices than its capacity, nor any when it costs nothing; what nobody
/// can use is not dealt.
pub fn dhondt<Device: Copy>(devices: &[Device], claims: &[Claim]) -> Vec<Vec<Device>> {
    let mut won: Vec<Vec<Device>> = vec![Vec::new(); claims.len()];
    for &device in devices {
        let mut winner: Option<usize> = None;
        for (number, claim) in claims.iter().enumerate() {
            if claim.cost == 0 || won[number].len() >= claim.capacity {
                continue;
            }
            let ahead = |other: usize| {
                let (own, others) = (won[number].len() + 1, won[other].len() + 1);
                u128::from(claim.cost) * others as u128
                    > u128::from(claims[other].cost) * own as u128
            };
            if winner.is_none_or(ahead) {
                winner = Some(number);
            }
        }
        match winner {
            Some(winner) => won[winner].push(device),
            None => break,
        }
    }
    won
}
