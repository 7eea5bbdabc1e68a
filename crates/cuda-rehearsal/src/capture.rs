//! Streams that are being captured into a graph, and what that forbids to whom.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use crate::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, ILLEGAL_STATE};

/// Whom a capture forbids calls that could spoil it, and which a thread is held to (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every thread.
    #[default]
    Global,
    /// The thread that captures.
    ThreadLocal,
    /// Nobody.
    Relaxed,
}

impl Mode {
    pub(crate) fn of(number: i32) -> Option<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed]
            .into_iter()
            .nth(usize::try_from(number).ok()?)
    }
}

struct Capture {
    mode: Mode,
    by: ThreadId,
    spoiled: bool,
}

/// The captures under way, by stream.
#[derive(Default)]
pub(crate) struct Captures(BTreeMap<u64, Capture>);

impl Captures {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn begin(&mut self, stream: u64, mode: Mode, by: ThreadId) -> Result<(), i32> {
        if self.0.contains_key(&stream) {
            return Err(ILLEGAL_STATE);
        }
        let spoiled = false;
        self.0.insert(stream, Capture { mode, by, spoiled });
        Ok(())
    }

    pub(crate) fn end(&mut self, stream: u64) -> Result<(), i32> {
        let capture = self.0.remove(&stream).ok_or(ILLEGAL_STATE)?;
        (!capture.spoiled).then_some(()).ok_or(CAPTURE_INVALIDATED)
    }

    pub(crate) fn has(&self, stream: u64) -> bool {
        self.0.contains_key(&stream)
    }

    /// A thread that is held to `mode` makes a call that could spoil a capture; one that may not spoils it.
    pub(crate) fn unsafe_call(&mut self, mode: Mode, by: ThreadId) -> Result<(), i32> {
        let mut outcome = Ok(());
        for capture in self.0.values_mut() {
            let forbidden = match mode {
                Mode::Relaxed => false,
                Mode::ThreadLocal => capture.by == by && capture.mode != Mode::Relaxed,
                Mode::Global => {
                    capture.mode == Mode::Global
                        || (capture.by == by && capture.mode != Mode::Relaxed)
                }
            };
            if forbidden {
                capture.spoiled = true;
                outcome = Err(CAPTURE_UNSUPPORTED);
            }
        }
        outcome
    }
}
