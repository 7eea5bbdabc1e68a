//! The bytes of tensors in other files, whose sizes are equal: no byte moves relative to the one before it, so that all are
//! read once and in order. Pure.

use std::cmp::Reverse;

use crate::manifest::Tensor;
use crate::part::PieceSpec;
use crate::region::{Region, num_elements};

/// Bytes of a file's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) file: usize,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// A piece of a new file, and where its bytes are.
#[derive(Clone, Debug)]
pub(crate) struct Cut<'a> {
    pub(crate) tensor: &'a Tensor,
    pub(crate) region: Region,
    pub(crate) from: Vec<Range>,
}

impl Cut<'_> {
    pub(crate) fn spec(&self) -> PieceSpec<'_> {
        PieceSpec {
            name: &self.tensor.name,
            dtype: self.tensor.dtype,
            shape: &self.tensor.shape,
            region: self.region.clone(),
        }
    }

    /// Makes the next elements of the same box part of this piece, if that is what the other one has.
    fn extend(&mut self, tensor: &Tensor, region: &Region, from: Range) -> bool {
        let (mine, other) = (&self.region, region);
        let end = mine.first() + mine.count();
        let follows = self.tensor.name == tensor.name
            && (&mine.offset, &mine.size) == (&other.offset, &other.size)
            && end == other.first();
        if follows {
            self.region = mine.part(0, mine.count() + other.count());
            match self.from.last_mut() {
                Some(last) if last.file == from.file && last.at + last.bytes == from.at => {
                    last.bytes += from.bytes;
                }
                _ => self.from.push(from),
            }
        }
        follows
    }
}

/// What each of so many files gets: about the same number of bytes, the strictest alignment first. Tensors without
/// elements are in the first one.
pub(crate) fn recut(tensors: &[Tensor], parts: usize) -> Vec<Vec<Cut<'_>>> {
    let mut pieces: Vec<_> = tensors
        .iter()
        .flat_map(|tensor| tensor.pieces.iter().map(move |piece| (tensor, piece)))
        .collect();
    pieces.sort_by_key(|(tensor, piece)| {
        (Reverse(tensor.item_bytes()), piece.file, piece.bytes.begin)
    });
    let total: u64 = tensors.iter().map(Tensor::num_bytes).sum();
    let end_of = |part: usize| {
        let end = u128::from(total) * (part as u128 + 1) / parts as u128;
        u64::try_from(end).expect("no more than the total")
    };
    let mut cuts: Vec<Vec<Cut<'_>>> = vec![Vec::new(); parts];
    let empty = tensors.iter().filter(|tensor| tensor.num_elements() == 0);
    cuts[0].extend(empty.map(|tensor| Cut {
        tensor,
        region: Region::whole(&tensor.shape),
        from: Vec::new(),
    }));
    let (mut part, mut at) = (0, 0);
    for (tensor, piece) in pieces {
        let item = tensor.item_bytes();
        let count = piece.region.count();
        let mut first = 0;
        while first < count {
            let room = end_of(part).saturating_sub(at) / item;
            let now = room.min(count - first);
            if now == 0 {
                part += 1; // an element that two files would share is the next one's
                continue;
            }
            let region = piece.region.part(first, now);
            let from = Range {
                file: piece.file,
                at: piece.bytes.begin + first * item,
                bytes: now * item,
            };
            let before = cuts[part].last_mut();
            if !before.is_some_and(|before| before.extend(tensor, &region, from)) {
                cuts[part].push(Cut {
                    tensor,
                    region,
                    from: vec![from],
                });
            }
            first += now;
            at += now * item;
        }
    }
    cuts
}

impl Region {
    /// How many elements it has. It lies inside its tensor.
    fn count(&self) -> u64 {
        let all = num_elements(&self.size).expect("a region inside a tensor can be counted");
        self.elements.map_or(all, |run| run.count)
    }

    /// So many of its elements, or of those behind them in its box, from one on.
    fn part(&self, first: u64, count: u64) -> Self {
        let whole = Self::boxed(self.offset.clone(), self.size.clone());
        if count == whole.count() {
            whole
        } else {
            whole.run(self.first() + first, count)
        }
    }
}
