//! Regions of tensors: a box of it, or a run of a box's elements.

use std::fmt;

use serde::{Deserialize, Serialize};

/// More dimensions than this no tensor has.
pub(crate) const MAX_DIMENSIONS: usize = 64;

/// Consecutive elements of a box, in the order in which a contiguous tensor stores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The first one.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// What a piece holds of a tensor, or what is wanted of it: a box, or a run of the box's elements, as the
/// share of an optimizer's state is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// Where the box begins in each dimension.
    pub offset: Vec<u64>,
    /// How many elements the box has in each dimension.
    pub size: Vec<u64>,
    /// The run; `None` for the whole box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elements: Option<Run>,
}

/// Why a region is none of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The numbers of dimensions differ.
    #[error("the region has {region} dimensions and the tensor {tensor}")]
    Dimensions {
        /// Of the region: of its offset, or of its size where that differs.
        region: usize,
        /// Of the tensor.
        tensor: usize,
    },
    /// It ends behind the tensor.
    #[error(
        "the region has {size} elements from {offset} on in dimension {dimension}, the tensor {extent}"
    )]
    Outside {
        /// Which dimension.
        dimension: usize,
        /// Where the region begins.
        offset: u64,
        /// Its size.
        size: u64,
        /// The tensor's size.
        extent: u64,
    },
    /// The run ends behind the box.
    #[error("the run of {count} elements from {first} on leaves the box of {elements}")]
    Run {
        /// Its first element.
        first: u64,
        /// Its number of elements.
        count: u64,
        /// How many the box has.
        elements: u64,
    },
    /// More elements than can be counted.
    #[error("the number of elements is beyond 64 bits")]
    TooLarge,
}

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self::boxed(vec![0; shape.len()], shape.to_vec())
    }

    /// A box.
    pub fn boxed(offset: Vec<u64>, size: Vec<u64>) -> Self {
        Self {
            offset,
            size,
            elements: None,
        }
    }

    /// A run of the elements of this box.
    #[must_use]
    pub fn run(self, first: u64, count: u64) -> Self {
        Self {
            elements: Some(Run { first, count }),
            ..self
        }
    }

    /// How many elements it has of a tensor with this shape, if it lies inside.
    pub fn check(&self, shape: &[u64]) -> Result<u64, RegionError> {
        for region in [self.offset.len(), self.size.len()] {
            if region != shape.len() {
                let tensor = shape.len();
                return Err(RegionError::Dimensions { region, tensor });
            }
        }
        let sides = self.offset.iter().zip(&self.size).zip(shape);
        for (dimension, ((&offset, &size), &extent)) in sides.enumerate() {
            if offset.checked_add(size).is_none_or(|end| end > extent) {
                return Err(RegionError::Outside {
                    dimension,
                    offset,
                    size,
                    extent,
                });
            }
        }
        let elements = num_elements(&self.size).ok_or(RegionError::TooLarge)?;
        let Some(Run { first, count }) = self.elements else {
            return Ok(elements);
        };
        if first.checked_add(count).is_none_or(|end| end > elements) {
            return Err(RegionError::Run {
                first,
                count,
                elements,
            });
        }
        Ok(count)
    }

    /// Its shape where it is stored or read: the box's, or one dimension.
    pub fn shape(&self) -> Vec<u64> {
        match self.elements {
            None => self.size.clone(),
            Some(run) => vec![run.count],
        }
    }

    /// The first element that it holds of its box.
    pub(crate) fn first(&self) -> u64 {
        self.elements.map_or(0, |run| run.first)
    }

    /// It as disjoint boxes, in the order of the elements; none if it is empty. It lies inside its tensor.
    pub(crate) fn boxes(&self) -> Vec<Boxed> {
        let all = num_elements(&self.size).expect("a region inside a tensor can be counted");
        let (first, count) = self.elements.map_or((0, all), |run| (run.first, run.count));
        let mut boxes = Vec::new();
        if count > 0 {
            let mut whole = Boxed {
                offset: self.offset.clone(),
                size: self.size.clone(),
            };
            divide(&mut whole, 0, first, first + count, &mut boxes);
        }
        boxes
    }

    /// The first and the last of its elements, counted in the whole tensor; `None` if it is empty.
    pub(crate) fn hull(&self, shape: &[u64]) -> Option<(u64, u64)> {
        let boxes = self.boxes();
        let (first, last) = (boxes.first()?, boxes.last()?);
        let strides = strides(shape);
        let corner = |at: &mut dyn Iterator<Item = u64>| -> u64 {
            at.zip(&strides).map(|(index, stride)| index * stride).sum()
        };
        let ends = last.offset.iter().zip(&last.size);
        Some((
            corner(&mut first.offset.iter().copied()),
            corner(&mut ends.map(|(offset, size)| offset + size - 1)),
        ))
    }
}

/// `[0:4, 8:16]`, and `[0:4, 8:16] elements 3:9` for a run.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides = self.offset.iter().zip(&self.size);
        let sides: Vec<String> = sides
            .map(|(offset, size)| format!("{offset}:{}", offset.saturating_add(*size)))
            .collect();
        write!(f, "[{}]", sides.join(", "))?;
        if let Some(run) = self.elements {
            let end = run.first.saturating_add(run.count);
            write!(f, " elements {}:{end}", run.first)?;
        }
        Ok(())
    }
}

/// A box in a tensor, not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Boxed {
    pub(crate) offset: Vec<u64>,
    pub(crate) size: Vec<u64>,
}

impl Boxed {
    pub(crate) fn intersection(&self, other: &Self) -> Option<Self> {
        let mut offset = Vec::with_capacity(self.offset.len());
        let mut size = Vec::with_capacity(self.offset.len());
        for dimension in 0..self.offset.len() {
            let begin = self.offset[dimension].max(other.offset[dimension]);
            let end = self.end(dimension).min(other.end(dimension));
            if begin >= end {
                return None;
            }
            offset.push(begin);
            size.push(end - begin);
        }
        Some(Self { offset, size })
    }

    /// What is left of it without the other one.
    pub(crate) fn without(&self, other: &Self) -> Vec<Self> {
        let Some(common) = self.intersection(other) else {
            return vec![self.clone()];
        };
        let mut left = Vec::new();
        let mut rest = self.clone();
        for dimension in 0..self.offset.len() {
            let sides = [
                (rest.offset[dimension], common.offset[dimension]),
                (common.end(dimension), rest.end(dimension)),
            ];
            for (begin, end) in sides {
                if begin < end {
                    let mut side = rest.clone();
                    side.offset[dimension] = begin;
                    side.size[dimension] = end - begin;
                    left.push(side);
                }
            }
            rest.offset[dimension] = common.offset[dimension];
            rest.size[dimension] = common.size[dimension];
        }
        left
    }

    pub(crate) fn count(&self) -> u64 {
        self.size.iter().product()
    }

    fn end(&self, dimension: usize) -> u64 {
        self.offset[dimension] + self.size[dimension]
    }
}

/// How many elements a tensor of this shape has, if they can be counted.
pub fn num_elements(shape: &[u64]) -> Option<u64> {
    shape
        .iter()
        .try_fold(1u64, |all, &side| all.checked_mul(side))
}

/// How many elements lie between neighbours in each dimension of a contiguous tensor.
pub(crate) fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension];
    }
    strides
}

/// The boxes of the elements from `begin` to `end` of a box, of whose dimensions those before `dimension` have size 1.
fn divide(within: &mut Boxed, dimension: usize, begin: u64, end: u64, boxes: &mut Vec<Boxed>) {
    if dimension == within.size.len() {
        boxes.push(within.clone());
        return;
    }
    let row: u64 = within.size[dimension + 1..].iter().product();
    let (offset, size) = (within.offset[dimension], within.size[dimension]);
    let mut rows = |first: u64, count: u64, begin: u64, end: u64| {
        if count > 0 {
            within.offset[dimension] = offset + first;
            within.size[dimension] = count;
            if count * row == end - begin {
                boxes.push(within.clone());
            } else {
                divide(within, dimension + 1, begin, end, boxes);
            }
        }
    };
    let (first, last) = (begin / row, (end - 1) / row);
    if first == last {
        rows(first, 1, begin % row, begin % row + (end - begin));
    } else {
        let whole_from = begin.div_ceil(row);
        let whole_to = end / row;
        rows(first, whole_from - first, begin % row, row);
        let whole = whole_to - whole_from;
        rows(whole_from, whole, 0, whole * row);
        rows(whole_to, last + 1 - whole_to, 0, end - whole_to * row);
    }
    within.offset[dimension] = offset;
    within.size[dimension] = size;
}

#[cfg(test)]
mod tests {
    use super::{Boxed, Region, RegionError};

    fn boxes(region: &Region) -> Vec<(Vec<u64>, Vec<u64>)> {
        let boxes = region.boxes().into_iter();
        boxes.map(|Boxed { offset, size }| (offset, size)).collect()
    }

    #[test]
    fn a_run_is_its_partial_rows_and_the_whole_ones_between() {
        let region = Region::boxed(vec![1, 0], vec![4, 3]).run(2, 8);
        let expected = vec![
            (vec![1, 2], vec![1, 1]),
            (vec![2, 0], vec![2, 3]),
            (vec![4, 0], vec![1, 1]),
        ];
        assert_eq!(boxes(&region), expected);
        assert_eq!(region.hull(&[5, 3]), Some((5, 12)));
        assert_eq!(region.to_string(), "[1:5, 0:3] elements 2:10");
    }

    #[test]
    fn a_scalar_is_one_element() {
        let region = Region::whole(&[]);
        assert_eq!(region.check(&[]), Ok(1));
        assert_eq!(boxes(&region), vec![(vec![], vec![])]);
    }

    #[test]
    fn an_empty_region_has_no_boxes() {
        assert_eq!(boxes(&Region::whole(&[3, 0])), vec![]);
        assert_eq!(boxes(&Region::whole(&[3]).run(2, 0)), vec![]);
        assert_eq!(Region::whole(&[3, 0]).hull(&[3, 0]), None);
    }

    #[test]
    fn a_region_outside_its_tensor_is_refused() {
        let outside = Region::boxed(vec![2], vec![2]).check(&[3]);
        assert!(matches!(
            outside,
            Err(RegionError::Outside { dimension: 0, .. })
        ));
        let overflowing = Region::boxed(vec![u64::MAX], vec![2]).check(&[3]);
        assert!(matches!(overflowing, Err(RegionError::Outside { .. })));
        let run = Region::whole(&[3]).run(u64::MAX, 2).check(&[3]);
        assert!(matches!(run, Err(RegionError::Run { elements: 3, .. })));
        let flat = Region::whole(&[3]).check(&[3, 1]);
        assert!(matches!(flat, Err(RegionError::Dimensions { .. })));
        let huge = [1 << 40, 1 << 40];
        assert_eq!(
            Region::whole(&huge).check(&huge),
            Err(RegionError::TooLarge)
        );
    }
}
