//! Records of all ranks together.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::record::{Record, RecordKind};

/// Records of any number of ranks, in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timeline {
    records: Vec<Record>,
    /// Records that were overwritten before they were taken.
    lost: u64,
}

/// Why something is no timeline, or has not what was asked of it.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Text that is not what it should be.
    #[error("this is no JSON of a timeline: {0}")]
    Json(#[from] serde_json::Error),
    /// A trace of another program.
    #[error("this is no trace of shardwright: it has no otherData.shardwright_format")]
    Foreign,
    /// A trace of a newer version.
    #[error(
        "this trace has format {format}, written by shardwright {version}; shardwright {own} reads formats up to \
         {known}"
    )]
    Newer {
        /// The file's format.
        format: u64,
        /// The version that wrote it.
        version: String,
        /// This version.
        own: &'static str,
        /// The newest format known here.
        known: u64,
    },
    /// An event of a trace whose record cannot be read.
    #[error("traceEvents[{place}] is no record: {problem}")]
    Event {
        /// Which event, counted from 0.
        place: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A step that was not recorded.
    #[error("step {step} is not in this trace; it has {has}")]
    NoStep {
        /// The step.
        step: u64,
        /// Those that are.
        has: String,
    },
}

/// First start and last end of a step, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
}

impl Timeline {
    /// A timeline of these records, of which so many more were lost. None ends before it begins: one that does is as long
    /// as a moment.
    pub fn new(mut records: Vec<Record>, lost: u64) -> Self {
        for record in &mut records {
            record.end_ns = record.end_ns.max(record.start_ns);
        }
        records.sort_by_key(|record| (record.start_ns, record.end_ns, record.rank));
        Self { records, lost }
    }

    /// One timeline of the ranks' parts: messages last until they arrive, and steps of which a rank has lost records
    /// are left out.
    pub fn join(parts: impl IntoIterator<Item = Self>) -> Self {
        let (mut records, mut lost, mut first_whole) = (Vec::new(), 0_u64, 0);
        for part in parts {
            if let Some(oldest) = part.records.iter().map(|record| record.step).min()
                && part.lost > 0
            {
                first_whole = first_whole.max(oldest.saturating_add(1));
            }
            lost = lost.saturating_add(part.lost);
            records.extend(part.records);
        }
        records.retain(|record: &Record| record.step >= first_whole);
        let mut joined = Self::new(records, lost);
        joined.follow_messages();
        joined
    }

    /// What [`Self::to_json`] made, or records from elsewhere.
    pub fn from_json(text: &str) -> Result<Self, TraceError> {
        let read: Self = serde_json::from_str(text)?;
        Ok(Self::new(read.records, read.lost))
    }

    /// All of it as JSON: `{"records": [...], "lost": 0}`.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("records are JSON")
    }

    /// The records, by start.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// How many records were overwritten before they were taken.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The ranks that have records.
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks: Vec<_> = self.records.iter().map(|record| record.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The steps that have records, ascending.
    pub fn steps(&self) -> Vec<u64> {
        self.intervals().into_keys().collect()
    }

    /// A step that is there: this one, or without one the newest.
    pub fn step_or_newest(&self, step: Option<u64>) -> Result<Option<u64>, TraceError> {
        let steps = self.steps();
        match step {
            None => Ok(steps.last().copied()),
            Some(step) if steps.contains(&step) => Ok(Some(step)),
            Some(step) => Err(TraceError::NoStep {
                step,
                has: match (steps.first(), steps.last()) {
                    (Some(first), Some(last)) if first < last => {
                        format!("{} steps from {first} to {last}", steps.len())
                    }
                    (Some(only), _) => format!("step {only}"),
                    (None, _) => "no step".to_owned(),
                },
            }),
        }
    }

    /// When the first record began; zero without one.
    pub(crate) fn origin_ns(&self) -> u64 {
        self.records.first().map_or(0, |record| record.start_ns)
    }

    pub(crate) fn intervals(&self) -> BTreeMap<u64, Interval> {
        let mut intervals: BTreeMap<u64, Interval> = BTreeMap::new();
        for record in &self.records {
            let own = Interval {
                start_ns: record.start_ns,
                end_ns: record.end_ns,
            };
            let interval = intervals.entry(record.step).or_insert(own);
            interval.start_ns = interval.start_ns.min(own.start_ns);
            interval.end_ns = interval.end_ns.max(own.end_ns);
        }
        intervals
    }

    /// Ends each send when its message was received. Messages between two ranks arrive in the order of sending, so of
    /// a request and the answer to another of the same number the first sent is the first received.
    fn follow_messages(&mut self) {
        type Way = (u32, u32, Option<u64>, u64);
        let mut arrivals: BTreeMap<Way, VecDeque<u64>> = BTreeMap::new();
        for record in &self.records {
            if let (RecordKind::Receive, Some(peer)) = (record.kind, record.peer) {
                let way = (peer, record.rank, record.request, record.step);
                arrivals.entry(way).or_default().push_back(record.start_ns);
            }
        }
        for record in &mut self.records {
            if let (RecordKind::Send, Some(peer)) = (record.kind, record.peer) {
                let way = (record.rank, peer, record.request, record.step);
                let arrival = arrivals.get_mut(&way).and_then(VecDeque::pop_front);
                record.end_ns = record.end_ns.max(arrival.unwrap_or_default());
            }
        }
        self.records
            .sort_by_key(|record| (record.start_ns, record.end_ns, record.rank));
    }
}
