//! An order that a user gives: when the root starts the forward and the backward of each microbatch.

use std::fmt;
use std::str::FromStr;

use shardwright_core::{MicrobatchId, Phase};

use crate::ready::{Ready, ReadyKind};

/// The root starts the forward or the backward of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RootStart {
    /// The microbatch.
    pub microbatch: MicrobatchId,
    /// Which of both.
    pub phase: Phase,
}

impl RootStart {
    /// Whether it is a forward.
    pub fn is_forward(&self) -> bool {
        self.phase == Phase::Forward
    }

    /// What a ready item of the root would start; `None` for one that resumes, or was asked for.
    fn of(ready: &Ready) -> Option<Self> {
        let phase = match ready.kind {
            ReadyKind::RootForward => Phase::Forward,
            ReadyKind::RootBackward => Phase::Backward,
            _ => return None,
        };
        Some(Self {
            microbatch: ready.microbatch,
            phase,
        })
    }
}

impl fmt::Display for RootStart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.phase {
            Phase::Forward => 'F',
            Phase::Backward => 'B',
        };
        write!(formatter, "{}{letter}", self.microbatch)
    }
}

/// The order in which the root starts forwards and backwards: every microbatch once in either phase, its
/// forward before its backward. Its text form is `list(0F 1F 0B 1B)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootOrder {
    entries: Vec<RootStart>,
}

/// Entries that are no order. Entries are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// A text that is no entry.
    #[error(
        "entry {index} of the list is {value:?}; allowed are a microbatch and F or B, such as 0F"
    )]
    NotAnEntry {
        /// Its index.
        index: usize,
        /// Its text.
        value: String,
    },
    /// Not closed by a bracket.
    #[error("{text:?} is no list; allowed is list(0F 1F 0B 1B), say")]
    NotAList {
        /// The text.
        text: String,
    },
    /// An order that does not have everything once, in turn.
    #[error("{0}")]
    Order(String),
}

impl RootOrder {
    /// An order of these entries, for as many microbatches as it has forwards.
    pub fn new(entries: Vec<RootStart>) -> Result<Self, ListError> {
        let pairs: Vec<_> = entries
            .iter()
            .map(|start| (start.microbatch.0, start.phase))
            .collect();
        let forwards = pairs.iter().filter(|(_, phase)| *phase == Phase::Forward);
        let microbatches = (forwards.count() as u32).max(1);
        shardwright_core::config::check_list(&pairs, microbatches)
            .map_err(|error| ListError::Order(error.to_string()))?;
        Ok(Self { entries })
    }

    /// The entries.
    pub fn entries(&self) -> &[RootStart] {
        &self.entries
    }

    /// The first entry from `next` on that a microbatch still needs: backwards of microbatches that have
    /// returned are passed over.
    pub fn pass_over(&self, mut next: usize, returned: impl Fn(MicrobatchId) -> bool) -> usize {
        while self
            .entries
            .get(next)
            .is_some_and(|entry| entry.phase == Phase::Backward && returned(entry.microbatch))
        {
            next += 1;
        }
        next
    }

    /// Whether a ready item that starts something is the entry `next`, or one that the list has behind it: a
    /// second backward in one step function.
    pub fn allows(&self, ready: &Ready, next: usize) -> bool {
        let Some(start) = RootStart::of(ready) else {
            return true;
        };
        let rest = self.entries.get(next..).unwrap_or_default();
        rest.first() == Some(&start) || !rest.contains(&start)
    }

    /// The next entry after a ready item has been started.
    pub fn after(&self, ready: &Ready, next: usize) -> usize {
        let starts_next = RootStart::of(ready).as_ref() == self.entries.get(next);
        next + usize::from(starts_next && next < self.entries.len())
    }
}

impl fmt::Display for RootOrder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("list(")?;
        for (index, entry) in self.entries.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(formatter, "{separator}{entry}")?;
        }
        formatter.write_str(")")
    }
}

impl FromStr for RootOrder {
    type Err = ListError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let inner = text
            .strip_prefix("list(")
            .and_then(|rest| rest.strip_suffix(')'))
            .ok_or_else(|| ListError::NotAList {
                text: text.to_owned(),
            })?;
        let entries = inner
            .split_whitespace()
            .enumerate()
            .map(|(index, value)| {
                parse_entry(value).ok_or_else(|| ListError::NotAnEntry {
                    index,
                    value: value.to_owned(),
                })
            })
            .collect::<Result<_, _>>()?;
        Self::new(entries)
    }
}

fn parse_entry(text: &str) -> Option<RootStart> {
    let (digits, phase) = match text.split_at_checked(text.len().checked_sub(1)?)? {
        (digits, "F") => (digits, Phase::Forward),
        (digits, "B") => (digits, Phase::Backward),
        _ => return None,
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(RootStart {
        microbatch: MicrobatchId(digits.parse().ok()?),
        phase,
    })
}
