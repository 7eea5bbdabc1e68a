//! The schedules of the paper's section 4.3, and orders that a user gives, with a text form.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use shardwright_core::MicrobatchId;

use crate::list::{ListError, RootOrder};
use crate::program::{ActionKind, ParseProgramError, Program};
use crate::ready::{Progress, Ready, ReadyKind};

/// A pipeline schedule. Its text form is `simple`, `interleaved(active=4)`, `looped(active=4)`,
/// `zero_bubble(active=4)`, `list(0F 1F 0B 1B)`, or the text of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The forward of every microbatch before the backward of any.
    Simple,
    /// A ready backward first, else the next forward.
    Interleaved {
        /// How many microbatches may be in flight at once.
        active: NonZeroU32,
    },
    /// For several parts of the model on one rank: forward and backward alternate, and half of the microbatches in
    /// flight go forward through all their parts while the other half goes backward (the interleaved schedule of
    /// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021).
    Looped {
        /// How many microbatches may be in flight at once.
        active: NonZeroU32,
    },
    /// As `Interleaved`, with each backward split: its input gradients are handed on at once, its
    /// weight gradients fill what would be idle time (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
    ZeroBubble {
        /// How many microbatches may be in flight or wait for their weight gradients at once.
        active: NonZeroU32,
    },
    /// The root starts forwards and backwards in this order; everything else goes by the order of `Interleaved`.
    List(Arc<RootOrder>),
    /// Every rank goes by its part of a program. This type only knows the order of what a program does not
    /// name, which is that of `Interleaved`; who follows a program knows which item is which action.
    Program(Arc<Program>),
}

impl Schedule {
    /// The index of the item to run next, or `None` when everything has to wait.
    ///
    /// Backward work goes before forward work already begun, that before a new microbatch, and
    /// that before weight gradients, which nobody waits for; within a class the lowest microbatch
    /// goes first, then the earliest arrival. Weight gradients of as many microbatches as may be
    /// in flight go before any forward, since they hold their activations.
    ///
    /// `Looped` puts forwards before backwards wherever the rank's last turn was a backward, new microbatches among
    /// forwards already begun, and within a class goes by group of microbatches, then by visit of the rank: a
    /// group's next round begins before the next group does.
    pub fn choose<'a>(
        &self,
        ready: impl IntoIterator<Item = &'a Ready>,
        progress: &Progress,
    ) -> Option<usize> {
        ready
            .into_iter()
            .enumerate()
            .filter(|(_, item)| self.allows(item, progress))
            .min_by_key(|(_, item)| {
                (
                    self.class(item.kind, progress),
                    self.round(item),
                    item.microbatch,
                    item.arrival,
                )
            })
            .map(|(index, _)| index)
    }

    /// Whether the schedule splits a backward into input gradients and weight gradients.
    pub fn splits_backward(&self) -> bool {
        match self {
            Self::ZeroBubble { .. } => true,
            Self::Program(program) => program
                .ranks()
                .iter()
                .flatten()
                .any(|action| action.kind == ActionKind::WeightGradient),
            Self::Simple | Self::Interleaved { .. } | Self::Looped { .. } | Self::List(_) => false,
        }
    }

    /// Whether a microbatch's backward that begins on another rank may be asked for now, whatever else is ready: to
    /// ask takes no time, and after an earlier microbatch's turn it would be late there. A list says what comes before
    /// it; where ranks follow a program, the other one has its own part of it.
    pub fn may_begin_elsewhere(&self, microbatch: MicrobatchId, progress: &Progress) -> bool {
        let item = Ready {
            kind: ReadyKind::RootBackward,
            microbatch,
            arrival: 0,
            visit: 0,
        };
        !matches!(self, Self::List(_) | Self::Program(_)) && self.allows(&item, progress)
    }

    /// A few words for messages: the text form, unless that is a whole list or program.
    pub fn summary(&self) -> String {
        match self {
            Self::List(order) => format!("a list of {} entries", order.entries().len()),
            Self::Program(program) => {
                let actions: usize = program.ranks().iter().map(Vec::len).sum();
                let ranks = program.ranks().len();
                format!("a program of {actions} actions on {ranks} ranks")
            }
            _ => self.to_string(),
        }
    }

    /// Whether an item may run now.
    fn allows(&self, item: &Ready, progress: &Progress) -> bool {
        match (self, item.kind) {
            (Self::Simple, ReadyKind::RootBackward) => {
                progress.forwards_done == progress.num_microbatches
            }
            (Self::Interleaved { active } | Self::Looped { active }, ReadyKind::RootForward) => {
                progress.active() < active.get()
            }
            (Self::ZeroBubble { active }, ReadyKind::RootForward) => {
                progress.active() + progress.deferred < active.get()
            }
            (Self::List(order), ReadyKind::RootForward | ReadyKind::RootBackward) => {
                order.allows(item, progress.listed)
            }
            _ => true,
        }
    }

    fn class(&self, kind: ReadyKind, progress: &Progress) -> u8 {
        match (self, kind) {
            // A close takes next to nothing.
            (Self::Looped { .. }, ReadyKind::RequestClose) => 0,
            (Self::Looped { .. }, kind) => {
                1 + u8::from(kind.is_backward() == progress.after_backward)
            }
            (_, kind) if kind.is_backward() => 0,
            (Self::ZeroBubble { active }, ReadyKind::WeightGradient)
                if progress.deferred >= active.get() =>
            {
                1
            }
            (_, ReadyKind::WeightGradient) => 4,
            (_, ReadyKind::RootForward) => 3,
            _ => 2,
        }
    }

    /// What goes before the number of the microbatch: its group, and which visit of this rank it is at.
    fn round(&self, item: &Ready) -> (u32, u32) {
        match self {
            // One group goes forward while the group before it goes backward.
            Self::Looped { active } => {
                let group = active.get().div_ceil(2);
                (item.microbatch.0 / group, item.visit)
            }
            _ => (0, 0),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simple => formatter.write_str("simple"),
            Self::Interleaved { active } => write!(formatter, "interleaved(active={active})"),
            Self::Looped { active } => write!(formatter, "looped(active={active})"),
            Self::ZeroBubble { active } => write!(formatter, "zero_bubble(active={active})"),
            Self::List(order) => write!(formatter, "{order}"),
            Self::Program(program) => write!(formatter, "{program}"),
        }
    }
}

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseScheduleError {
    /// It is of no kind.
    #[error(
        "{text:?} is no schedule; allowed are `simple`, `interleaved(active=N)`, `looped(active=N)` and \
         `zero_bubble(active=N)` with N of at least 1, `list(0F 1F 0B 1B)`, and a program"
    )]
    Unknown {
        /// The text.
        text: String,
    },
    /// It is a list with a mistake.
    #[error(transparent)]
    List(#[from] ListError),
    /// It is a program with a mistake.
    #[error(transparent)]
    Program(#[from] ParseProgramError),
}

impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "simple" {
            return Ok(Self::Simple);
        }
        if Program::is_own_text(text) {
            return Ok(Self::Program(Arc::new(text.parse()?)));
        }
        if text.starts_with("list(") {
            return Ok(Self::List(Arc::new(text.parse()?)));
        }
        let active = |name: &str| {
            text.strip_prefix(name)?
                .strip_prefix("(active=")?
                .strip_suffix(')')
                .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?
                .parse()
                .ok()
        };
        active("interleaved")
            .map(|active| Self::Interleaved { active })
            .or_else(|| active("looped").map(|active| Self::Looped { active }))
            .or_else(|| active("zero_bubble").map(|active| Self::ZeroBubble { active }))
            .ok_or_else(|| ParseScheduleError::Unknown {
                text: text.to_owned(),
            })
    }
}
