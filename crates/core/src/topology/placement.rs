//! Placement strategies: how coordinates become global ranks.

use std::fmt;
use std::str::FromStr;

use super::TopologyError;

/// An axis along which ranks are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// `D`: reduced-data-parallel ranks.
    ReducedData,
    /// `P`: stages of a pipeline.
    Pipeline,
    /// `T`: ranks that split the same modules.
    Tensor,
}

impl Axis {
    const fn letter(self) -> char {
        match self {
            Self::ReducedData => 'D',
            Self::Pipeline => 'P',
            Self::Tensor => 'T',
        }
    }

    const fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'D' => Some(Self::ReducedData),
            'P' => Some(Self::Pipeline),
            'T' => Some(Self::Tensor),
            _ => None,
        }
    }
}

/// The order of the three axes; the last one varies fastest over global ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement([Axis; 3]);

impl Placement {
    /// `cluster`: tensor-parallel neighbours closest together, then pipeline neighbours.
    pub const CLUSTER: Self = Self([Axis::ReducedData, Axis::Pipeline, Axis::Tensor]);
    /// `spread`: data-parallel neighbours closest together.
    pub const SPREAD: Self = Self([Axis::Tensor, Axis::Pipeline, Axis::ReducedData]);

    /// The axes from the slowest to the fastest varying one.
    pub const fn axes(self) -> [Axis; 3] {
        self.0
    }
}

impl Default for Placement {
    fn default() -> Self {
        Self::CLUSTER
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters: String = self.0.iter().map(|axis| axis.letter()).collect();
        f.write_str(&letters)
    }
}

impl FromStr for Placement {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        match text {
            "cluster" => return Ok(Self::CLUSTER),
            "spread" => return Ok(Self::SPREAD),
            _ => {}
        }
        let refused = || TopologyError::Placement(text.to_owned());
        let axes: Vec<Axis> = text
            .chars()
            .map(Axis::from_letter)
            .collect::<Option<_>>()
            .ok_or_else(refused)?;
        let axes: [Axis; 3] = axes.try_into().map_err(|_| refused())?;
        let distinct = axes[0] != axes[1] && axes[0] != axes[2] && axes[1] != axes[2];
        distinct.then_some(Self(axes)).ok_or_else(refused)
    }
}
