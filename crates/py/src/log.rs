//! Warnings of Rust's threads on their way to Python's logger: the threads
//! cannot call Python, so they leave their warnings here, and Python takes them.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Warnings that may wait; older ones go first, since the newest tell the present.
const CAPACITY: usize = 256;

/// Python's numbers for the two levels that are taken over.
const WARNING: u32 = 30;
const ERROR: u32 = 40;

/// Of the process, as is the global subscriber of `tracing`.
static WAITING: Mutex<VecDeque<(u32, String)>> = Mutex::new(VecDeque::new());

/// Collects warnings from now on; a second call does nothing.
pub(crate) fn collect() {
    // It fails where there is a subscriber already: this one, or that of another copy of this very library.
    drop(tracing::subscriber::set_global_default(Collector));
}

/// Take the warnings of Rust's threads since the last call: `logging`'s level, and the text.
#[pyfunction]
pub(crate) fn take_log() -> Vec<(u32, String)> {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.drain(..).collect()
}

struct Collector;

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let level = if *event.metadata().level() == Level::ERROR {
            ERROR
        } else {
            WARNING
        };
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() == CAPACITY {
            waiting.pop_front();
        }
        waiting.push_back((level, text.line()));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event as a line: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn line(self) -> String {
        if self.fields.is_empty() {
            self.message
        } else {
            format!("{} ({})", self.message, self.fields)
        }
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let (into, separator, name) = match field.name() {
            "message" => (&mut self.message, "", ""),
            name if self.fields.is_empty() => (&mut self.fields, "", name),
            name => (&mut self.fields, ", ", name),
        };
        let space = if name.is_empty() { "" } else { " " };
        write!(into, "{separator}{name}{space}{value:?}").expect("writing to a string cannot fail");
    }
}
