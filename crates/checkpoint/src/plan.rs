//! Which bytes of which files make up a wanted region of a tensor. Pure.

use crate::manifest::Tensor;
use crate::region::{Boxed, Region, RegionError, strides};

/// Bytes that lie together in a file and in what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Read {
    /// The file, by its place in the manifest.
    pub file: usize,
    /// Where they begin in the file's data.
    pub source: u64,
    /// Where they begin in what is wanted.
    pub destination: u64,
    /// How many.
    pub bytes: u64,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// There is no such region.
    #[error("{wanted} of tensor {tensor:?} cannot be read: {source}")]
    Region {
        /// The tensor's name.
        tensor: String,
        /// What was wanted.
        wanted: Box<Region>,
        /// What is wrong with it.
        source: RegionError,
    },
    /// The pieces do not hold all of it.
    #[error("no file holds {} of tensor {tensor:?}", shown(.missing))]
    Missing {
        /// The tensor's name.
        tensor: String,
        /// What no piece holds.
        missing: Vec<Region>,
    },
}

/// More regions than this are only counted in an error's text.
const MOST_SHOWN: usize = 4;

fn shown(missing: &[Region]) -> String {
    let first = missing.iter().take(MOST_SHOWN).map(Region::to_string);
    let first = first.collect::<Vec<_>>().join(", ");
    match missing.len().saturating_sub(MOST_SHOWN) {
        0 => first,
        more => format!("{first} and {more} more regions"),
    }
}

/// The reads that make up a wanted region, each byte once, ordered by file and place in it. The tensor's pieces are those
/// of a checked manifest: inside the tensor, and disjoint.
pub fn plan(tensor: &Tensor, wanted: &Region) -> Result<Vec<Read>, PlanError> {
    let count = wanted
        .check(&tensor.shape)
        .map_err(|source| PlanError::Region {
            tensor: tensor.name.clone(),
            wanted: Box::new(wanted.clone()),
            source,
        })?;
    let Some((first, last)) = wanted.hull(&tensor.shape) else {
        return Ok(Vec::new());
    };
    let wanted_boxes = wanted.boxes();
    let item = tensor.item_bytes();
    let mut reads = Vec::new();
    let mut found = 0;
    for piece in &tensor.pieces {
        // Pieces are ordered by their first elements.
        let Some((begin, end)) = piece.region.hull(&tensor.shape) else {
            continue;
        };
        if begin > last {
            break;
        }
        if end < first {
            continue;
        }
        let route = Route {
            file: piece.file,
            start: piece.bytes.begin,
            item,
            from: Layout::of(&piece.region),
            to: Layout::of(wanted),
        };
        for held in piece.region.boxes() {
            for common in wanted_boxes
                .iter()
                .filter_map(|one| one.intersection(&held))
            {
                found += common.count();
                route.reads(&common, &mut reads);
            }
        }
    }
    if found < count {
        return Err(PlanError::Missing {
            tensor: tensor.name.clone(),
            missing: missing(tensor, wanted_boxes),
        });
    }
    reads.sort_unstable();
    Ok(merged(&reads))
}

/// How a region's elements lie in memory or in a file.
struct Layout<'a> {
    offset: &'a [u64],
    size: &'a [u64],
    strides: Vec<u64>,
    first: u64,
}

impl<'a> Layout<'a> {
    fn of(region: &'a Region) -> Self {
        Self {
            offset: &region.offset,
            size: &region.size,
            strides: strides(&region.size),
            first: region.first(),
        }
    }

    /// Where the element is, which the region holds.
    fn place(&self, element: &[u64]) -> u64 {
        let sides = element.iter().zip(self.offset).zip(&self.strides);
        let within: u64 = sides
            .map(|((at, offset), stride)| (at - offset) * stride)
            .sum();
        within - self.first
    }
}

/// From a piece to what is wanted.
struct Route<'a> {
    file: usize,
    start: u64,
    item: u64,
    from: Layout<'a>,
    to: Layout<'a>,
}

impl Route<'_> {
    /// Reads of a box that both hold: a run of elements for each row that lies together on both sides.
    fn reads(&self, common: &Boxed, reads: &mut Vec<Read>) {
        let mut outer = common.size.len();
        let mut run = 1;
        while outer > 0 {
            outer -= 1;
            let side = common.size[outer];
            run *= side;
            if side != self.from.size[outer] || side != self.to.size[outer] {
                break;
            }
        }
        let mut element = common.offset.clone();
        loop {
            reads.push(Read {
                file: self.file,
                source: self.start + self.from.place(&element) * self.item,
                destination: self.to.place(&element) * self.item,
                bytes: run * self.item,
            });
            let mut dimension = outer;
            loop {
                if dimension == 0 {
                    return;
                }
                dimension -= 1;
                element[dimension] += 1;
                if element[dimension] < common.offset[dimension] + common.size[dimension] {
                    break;
                }
                element[dimension] = common.offset[dimension];
            }
        }
    }
}

/// Reads that go on where the one before ends become one with it.
fn merged(reads: &[Read]) -> Vec<Read> {
    let mut merged: Vec<Read> = Vec::with_capacity(reads.len());
    for read in reads {
        match merged.last_mut() {
            Some(last)
                if last.file == read.file
                    && last.source + last.bytes == read.source
                    && last.destination + last.bytes == read.destination =>
            {
                last.bytes += read.bytes;
            }
            _ => merged.push(*read),
        }
    }
    merged
}

fn missing(tensor: &Tensor, wanted: Vec<Boxed>) -> Vec<Region> {
    let mut left = wanted;
    for held in tensor.pieces.iter().flat_map(|piece| piece.region.boxes()) {
        left = left.iter().flat_map(|one| one.without(&held)).collect();
    }
    let regions = left.into_iter();
    regions
        .map(|Boxed { offset, size }| Region::boxed(offset, size))
        .collect()
}
