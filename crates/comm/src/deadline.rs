//! How long a caller waits, and what ends its waiting from outside.

use std::time::{Duration, Instant};

use shardwright_core::Rank;

use crate::error::CommError;
use crate::transport::{Observation, Transport};

/// Waits are cut into slices of at most this, so that signals get through.
pub const SLICE: Duration = Duration::from_millis(100);

/// A deadline and a question asked at every slice.
pub struct Deadline<'a> {
    started: Instant,
    until: Option<Instant>,
    go_on: &'a mut dyn FnMut() -> bool,
    reads: Option<&'a dyn Transport>,
}

impl<'a> Deadline<'a> {
    /// Waits for at most `limit` (without one: until the peer is lost), as long as `go_on` says so.
    pub fn new(limit: Option<Duration>, go_on: &'a mut dyn FnMut() -> bool) -> Self {
        let started = Instant::now();
        Self {
            started,
            until: limit.and_then(|limit| started.checked_add(limit)),
            go_on,
            reads: None,
        }
    }

    /// The waiting thread receives by itself where the transport lets it.
    #[must_use]
    pub(crate) fn reading(self, transport: &'a dyn Transport) -> Self {
        Self {
            reads: Some(transport),
            ..self
        }
    }

    /// Receives until it sees what it waits for, or for a slice; `false`, at once, where it has to sleep instead.
    pub(crate) fn read_until(
        &self,
        slice: Duration,
        look: &mut dyn FnMut() -> Observation,
    ) -> bool {
        self.reads
            .is_some_and(|transport| transport.read_until(slice, look))
    }

    /// How long to wait before asking again, or why not to wait.
    pub(crate) fn next_slice(&mut self, rank: Rank, what: &str) -> Result<Duration, CommError> {
        if !(self.go_on)() {
            return Err(CommError::Cancelled);
        }
        let Some(until) = self.until else {
            return Ok(SLICE);
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(CommError::Timeout {
                rank,
                what: what.to_owned(),
                waited: self.started.elapsed(),
            });
        }
        Ok(left.min(SLICE))
    }
}
