//! What records add up to. Every figure about a timeline comes from here. Records come from files too: sums end at what 64
//! bits hold.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::Serialize;

use crate::record::{Activity, Record, RecordKind};
use crate::timeline::{Interval, Timeline};

/// Times within steps, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// In forward work.
    pub forward_ns: u64,
    /// In backward work.
    pub backward_ns: u64,
    /// In gradients of weights that were run apart.
    pub weight_ns: u64,
    /// In other tasks.
    pub other_ns: u64,
    /// Of these: checkpointed modules were computed again.
    pub recompute_ns: u64,
    /// No task ran. Time between steps does not count.
    pub idle_ns: u64,
    /// The steps' length, each from its first to its last record over all ranks.
    pub step_ns: u64,
    /// Bytes of tensors sent.
    pub sent_bytes: u64,
    /// Bytes of tensors received.
    pub received_bytes: u64,
    /// Bytes of activations that went to the storage of offloaded ones.
    pub offloaded_bytes: u64,
    /// Bytes of them that came back.
    pub loaded_bytes: u64,
}

impl Sums {
    /// Time in which a task ran.
    pub fn busy_ns(&self) -> u64 {
        self.step_ns.saturating_sub(self.idle_ns)
    }

    /// The part of the steps in which no task ran.
    pub fn idle_share(&self) -> f64 {
        share(self.idle_ns, self.step_ns)
    }

    /// The part of the steps in which a task ran.
    pub fn busy_share(&self) -> f64 {
        share(self.busy_ns(), self.step_ns)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a share needs no more than 53 bits"
)]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.forward_ns = self.forward_ns.saturating_add(other.forward_ns);
        self.backward_ns = self.backward_ns.saturating_add(other.backward_ns);
        self.weight_ns = self.weight_ns.saturating_add(other.weight_ns);
        self.other_ns = self.other_ns.saturating_add(other.other_ns);
        self.recompute_ns = self.recompute_ns.saturating_add(other.recompute_ns);
        self.idle_ns = self.idle_ns.saturating_add(other.idle_ns);
        self.step_ns = self.step_ns.saturating_add(other.step_ns);
        self.sent_bytes = self.sent_bytes.saturating_add(other.sent_bytes);
        self.received_bytes = self.received_bytes.saturating_add(other.received_bytes);
        self.offloaded_bytes = self.offloaded_bytes.saturating_add(other.offloaded_bytes);
        self.loaded_bytes = self.loaded_bytes.saturating_add(other.loaded_bytes);
    }
}

/// The sums of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankSums {
    /// The global rank.
    pub rank: u32,
    /// Its sums.
    #[serde(flatten)]
    pub sums: Sums,
}

/// The sums of all ranks, over one step or over all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The step; none for all steps together.
    pub step: Option<u64>,
    /// By rank.
    pub ranks: Vec<RankSums>,
    /// Over all ranks: `step_ns` too is that of every rank added up.
    pub total: Sums,
}

impl Timeline {
    /// The sums of a step, or of all.
    pub fn summary(&self, step: Option<u64>) -> Summary {
        let intervals = self.intervals();
        let mut places: BTreeMap<(u32, u64), Vec<&Record>> = BTreeMap::new();
        for record in self.records() {
            let place = (record.rank, record.step);
            places.entry(place).or_default().push(record);
        }
        let mut by_rank: BTreeMap<u32, Sums> = BTreeMap::new();
        for rank in self.ranks() {
            let sums = by_rank.entry(rank).or_default();
            for (own, interval) in &intervals {
                if step.is_none_or(|step| step == *own) {
                    let records = places.get(&(rank, *own)).map_or(&[][..], Vec::as_slice);
                    *sums += sums_of(*interval, records);
                }
            }
        }
        let mut total = Sums::default();
        for sums in by_rank.values() {
            total += *sums;
        }
        Summary {
            step,
            ranks: by_rank
                .into_iter()
                .map(|(rank, sums)| RankSums { rank, sums })
                .collect(),
            total,
        }
    }
}

/// The sums of one rank in one step. Its records are in the order of starts.
fn sums_of(interval: Interval, records: &[&Record]) -> Sums {
    let mut sums = Sums {
        step_ns: interval.end_ns - interval.start_ns,
        ..Sums::default()
    };
    let (mut busy, mut reached) = (0_u64, interval.start_ns);
    for record in records {
        let activity = record.activity();
        let time = match activity {
            Activity::Forward => Some(&mut sums.forward_ns),
            Activity::Backward => Some(&mut sums.backward_ns),
            Activity::Weight => Some(&mut sums.weight_ns),
            Activity::Other => Some(&mut sums.other_ns),
            Activity::Recompute => Some(&mut sums.recompute_ns),
            Activity::Wait | Activity::Transfer | Activity::Offload => None,
        };
        if let Some(time) = time {
            *time = time.saturating_add(record.length_ns());
        }
        if activity.is_busy() {
            let more = record.end_ns.saturating_sub(record.start_ns.max(reached));
            busy = busy.saturating_add(more);
            reached = reached.max(record.end_ns);
        }
        let bytes = match record.kind {
            RecordKind::Send => Some(&mut sums.sent_bytes),
            RecordKind::Receive => Some(&mut sums.received_bytes),
            RecordKind::Offload => Some(&mut sums.offloaded_bytes),
            RecordKind::Load => Some(&mut sums.loaded_bytes),
            _ => None,
        };
        if let Some(bytes) = bytes {
            *bytes = bytes.saturating_add(record.bytes);
        }
    }
    sums.idle_ns = sums.step_ns.saturating_sub(busy);
    sums
}
