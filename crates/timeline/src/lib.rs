//! Timelines: what every rank did when, as sums, tables, pictures and files. Pure.
//!
//! A [`Timeline`] holds [`Record`]s of any number of ranks on one clock, measured or simulated. It is
//! written as a trace for Perfetto, which is read back, as a page for any browser and as an SVG picture;
//! all figures come from [`Timeline::summary`].
//!
//! ```
//! use shardwright_timeline::{RecordKind, Record, Timeline};
//!
//! let record = Record { start_ns: 0, end_ns: 5_000_000, ..Record::new(0, 1, RecordKind::Forward) };
//! let timeline = Timeline::new(vec![record], 0);
//! let read = Timeline::from_trace(&timeline.to_trace())?;
//! assert_eq!(read.summary(None).total.forward_ns, 5_000_000);
//! # Ok::<(), shardwright_timeline::TraceError>(())
//! ```

mod compare;
mod draw;
mod page;
mod profile;
mod record;
mod recorded;
mod show;
mod summary;
mod timeline;
mod trace_file;
mod units;

#[cfg(test)]
mod tests;

pub use compare::Comparison;
pub use profile::{ProfileError, RankProfile, clock_of, profile_frame};
pub use record::{Activity, Phase, Record, RecordKind};
pub use recorded::RecordedError;
pub use summary::{RankSums, Summary, Sums};
pub use timeline::{Timeline, TraceError};
pub use trace_file::FORMAT;
pub use units::{size, table};
