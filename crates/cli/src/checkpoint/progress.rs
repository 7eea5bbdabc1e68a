//! How far a command has come.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on the standard error, if that is a terminal; it goes when this is dropped.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// For so many bytes.
    pub(super) fn new(what: &'static str, bytes: u64) -> Self {
        let style = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(style).expect("its fields are known");
        let bar = ProgressBar::new(bytes).with_style(style);
        Self(bar.with_message(what))
    }

    /// Tells of further bytes.
    pub(super) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
