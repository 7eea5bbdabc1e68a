//! The schedules of the paper's section 4.3, with a text form.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::ready::{Ready, ReadyKind, RootProgress};

/// A pipeline schedule. Its text form is `simple` or `interleaved(active=4)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The forward of every microbatch before the backward of any.
    Simple,
    /// A ready backward first, else the next forward.
    Interleaved {
        /// How many microbatches may be in flight at once.
        active: NonZeroU32,
    },
}

impl Schedule {
    /// The index of the item to run next, or `None` when everything has to wait.
    ///
    /// Backward work goes before forward work already begun, and that before a new
    /// microbatch; within a class the lowest microbatch goes first, then the earliest arrival.
    pub fn choose<'a>(
        &self,
        ready: impl IntoIterator<Item = &'a Ready>,
        root: &RootProgress,
    ) -> Option<usize> {
        ready
            .into_iter()
            .enumerate()
            .filter(|(_, item)| self.allows(item.kind, root))
            .min_by_key(|(_, item)| (class(item.kind), item.microbatch, item.arrival))
            .map(|(index, _)| index)
    }

    /// Whether an item of this kind may run now.
    pub fn allows(&self, kind: ReadyKind, root: &RootProgress) -> bool {
        match (self, kind) {
            (Self::Simple, ReadyKind::RootBackward) => root.forwards_done == root.num_microbatches,
            (Self::Interleaved { active }, ReadyKind::RootForward) => root.active() < active.get(),
            _ => true,
        }
    }
}

fn class(kind: ReadyKind) -> u8 {
    match kind {
        kind if kind.is_backward() => 0,
        ReadyKind::RootForward => 2,
        _ => 1,
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simple => formatter.write_str("simple"),
            Self::Interleaved { active } => write!(formatter, "interleaved(active={active})"),
        }
    }
}

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no schedule; allowed are `simple` and `interleaved(active=N)` with N of at least 1"
)]
pub struct ParseScheduleError {
    /// The text.
    pub text: String,
}

impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "simple" {
            return Ok(Self::Simple);
        }
        text.strip_prefix("interleaved(active=")
            .and_then(|rest| rest.strip_suffix(')'))
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .map(|active| Self::Interleaved { active })
            .ok_or_else(|| ParseScheduleError {
                text: text.to_owned(),
            })
    }
}
