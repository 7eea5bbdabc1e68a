//! The schedules of the paper's section 4.3 and others, a file each, and orders that a user gives; with a text form.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use shardwright_core::MicrobatchId;

use crate::list::ListError;
use crate::program::{ActionKind, ParseProgramError, Program};
use crate::ready::{Progress, Ready, ReadyKind};

mod interleaved;
mod looped;
mod registry;
mod rules;
mod simple;
mod zero_bubble;

pub use registry::Schedule;
pub(crate) use rules::Rules;

impl Schedule {
    /// The index of the item to run next, or `None` when everything has to wait.
    ///
    /// Backward work goes before forward work already begun, that before a new microbatch, and
    /// that before weight gradients, which nobody waits for; within a class the lowest microbatch
    /// goes first, then the earliest arrival. Weight gradients of as many microbatches as may be
    /// in flight go before any forward, since they hold their activations. A policy may have another order (`Looped`).
    pub fn choose<'a>(
        &self,
        ready: impl IntoIterator<Item = &'a Ready>,
        progress: &Progress,
    ) -> Option<usize> {
        let (rules, active) = self.rules();
        ready
            .into_iter()
            .enumerate()
            .filter(|(_, item)| self.allows(item, progress))
            .min_by_key(|(_, item)| {
                (
                    rules.class(item.kind, progress, active),
                    rules.round(item, active),
                    item.microbatch,
                    item.arrival,
                )
            })
            .map(|(index, _)| index)
    }

    /// Whether the schedule splits a backward into input gradients and weight gradients.
    pub fn splits_backward(&self) -> bool {
        match self {
            Self::Program(program) => program
                .ranks()
                .iter()
                .flatten()
                .any(|action| action.kind == ActionKind::WeightGradient),
            _ => self.rules().0.splits_backward(),
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

    /// Microbatches one after another, whatever else is asked for.
    pub fn one_at_a_time() -> Self {
        Self::Interleaved {
            active: NonZeroU32::MIN,
        }
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

    /// Whether it asks for the turns that a rank has begun.
    pub(crate) fn counts_turns(&self) -> bool {
        self.rules().0.counts_turns()
    }

    /// Whether an item may run now.
    fn allows(&self, item: &Ready, progress: &Progress) -> bool {
        match (self, item.kind) {
            (Self::List(order), ReadyKind::RootForward | ReadyKind::RootBackward) => {
                order.allows(item, progress.listed)
            }
            (Self::List(_) | Self::Program(_), _) => true,
            _ => {
                let (rules, active) = self.rules();
                rules.allows(item, progress, active)
            }
        }
    }
}

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseScheduleError {
    /// It is of no kind.
    #[error(
        "{text:?} is no schedule; allowed are {} with N of at least 1, `list(0F 1F 0B 1B)`, and a program",
        Schedule::forms()
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
        if Program::is_own_text(text) {
            return Ok(Self::Program(Arc::new(text.parse()?)));
        }
        if text.starts_with("list(") {
            return Ok(Self::List(Arc::new(text.parse()?)));
        }
        let (name, active) = match text
            .strip_suffix(')')
            .map(|text| text.split_once("(active="))
        {
            Some(Some((name, digits))) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                (name, digits.parse().ok())
            }
            _ => (text, None),
        };
        let found = Self::of_text(name, active);
        found.ok_or_else(|| ParseScheduleError::Unknown {
            text: text.to_owned(),
        })
    }
}
