//! Timelines as Chrome traces, which Perfetto and `chrome://tracing` open, and back.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::record::{Record, RecordKind};
use crate::timeline::{Timeline, TraceError};

/// The version of what the files hold beyond the Chrome trace format.
pub const FORMAT: u64 = 1;

/// Worker ids stay below; each rank's sends and receives take lanes from here on.
const TRANSFER_LANES: u64 = 1_000;
const LANES_PER_DIRECTION: u64 = 1_000;

/// One record as a complete event. `args` is the record itself, without what stands elsewhere.
#[derive(Serialize, Deserialize)]
struct Event {
    name: String,
    cat: String,
    ph: String,
    pid: u32,
    tid: u64,
    /// Microseconds; with three decimals, so that nanoseconds survive.
    ts: f64,
    dur: f64,
    args: Value,
}

/// What a shardwright wrote about its trace.
#[derive(Serialize, Deserialize)]
struct Head {
    shardwright_format: u64,
    shardwright_version: String,
    #[serde(default)]
    origin_ns: u64,
    #[serde(default)]
    records_lost: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct File {
    display_time_unit: &'static str,
    other_data: Head,
    trace_events: Vec<Value>,
}

impl Timeline {
    /// A trace: a process per rank, a thread per worker, and lanes for messages under way.
    pub fn to_trace(&self) -> String {
        let origin_ns = self.origin_ns();
        let mut lanes: BTreeMap<(u32, RecordKind), Vec<u64>> = BTreeMap::new();
        let mut threads: BTreeMap<(u32, u64), String> = BTreeMap::new();
        let mut slices = Vec::with_capacity(self.records().len());
        for record in self.records() {
            let (thread, name) = place(record, &mut lanes);
            threads.entry((record.rank, thread)).or_insert(name);
            slices.push(slice(record, thread, origin_ns));
        }
        let mut trace_events: Vec<Value> = self
            .ranks()
            .into_iter()
            .map(|rank| named("process_name", rank, 0, &format!("rank {rank}")))
            .collect();
        let names = threads.iter();
        trace_events
            .extend(names.map(|((rank, thread), name)| named("thread_name", *rank, *thread, name)));
        trace_events.append(&mut slices);
        let file = File {
            display_time_unit: "ms",
            other_data: Head {
                shardwright_format: FORMAT,
                shardwright_version: env!("CARGO_PKG_VERSION").to_owned(),
                origin_ns,
                records_lost: self.lost(),
            },
            trace_events,
        };
        serde_json::to_string(&file).expect("records are JSON")
    }

    /// The timeline of a trace that [`Self::to_trace`] made, of this version or an older one.
    pub fn from_trace(text: &str) -> Result<Self, TraceError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Parts {
            #[serde(default)]
            other_data: Value,
            #[serde(default)]
            trace_events: Vec<Value>,
        }
        let file: Parts = serde_json::from_str(text)?;
        let Some(format) = file.other_data["shardwright_format"].as_u64() else {
            return Err(TraceError::Foreign);
        };
        if format > FORMAT {
            let version = file.other_data["shardwright_version"].as_str();
            return Err(TraceError::Newer {
                format,
                version: version.unwrap_or("of an unknown version").to_owned(),
                own: env!("CARGO_PKG_VERSION"),
                known: FORMAT,
            });
        }
        let head: Head = serde_json::from_value(file.other_data)?;
        let mut records = Vec::new();
        for (place, event) in file.trace_events.into_iter().enumerate() {
            if event["ph"] == "X" {
                let record = record_of(event, head.origin_ns);
                records.push(record.map_err(|problem| TraceError::Event { place, problem })?);
            }
        }
        Ok(Self::new(records, head.records_lost))
    }
}

/// The thread of a record, and its name. Slices of one thread must not overlap, but may lie within one another.
pub(crate) fn place(
    record: &Record,
    lanes: &mut BTreeMap<(u32, RecordKind), Vec<u64>>,
) -> (u64, String) {
    let first = match record.kind {
        RecordKind::Send => TRANSFER_LANES,
        RecordKind::Receive => TRANSFER_LANES + LANES_PER_DIRECTION,
        RecordKind::Offload => TRANSFER_LANES + 2 * LANES_PER_DIRECTION,
        RecordKind::Load => TRANSFER_LANES + 3 * LANES_PER_DIRECTION,
        _ => {
            return record.worker.map_or_else(
                || (0, "main thread".to_owned()),
                |worker| (u64::from(worker) + 1, format!("worker {worker}")),
            );
        }
    };
    let ends = lanes.entry((record.rank, record.kind)).or_default();
    let free = ends.iter().position(|end| *end <= record.start_ns);
    let lane = free.unwrap_or(ends.len());
    if free.is_none() {
        ends.push(0);
    }
    ends[lane] = record.end_ns;
    let kind = record.kind.name();
    let name = if lane == 0 {
        kind.to_owned()
    } else {
        format!("{kind} {}", lane + 1)
    };
    (first + lane as u64, name)
}

pub(crate) fn slice(record: &Record, thread: u64, origin_ns: u64) -> Value {
    let mut args = serde_json::to_value(record).expect("records are JSON");
    if let Some(args) = args.as_object_mut() {
        for elsewhere in ["rank", "start_ns", "end_ns"] {
            args.shift_remove(elsewhere);
        }
        if record.bytes == 0 {
            args.shift_remove("bytes");
        }
    }
    let label = record.label();
    let event = Event {
        name: record
            .microbatch
            .map_or_else(|| label.clone(), |number| format!("{label} [{number}]")),
        cat: record.activity().name().to_owned(),
        ph: "X".to_owned(),
        pid: record.rank,
        tid: thread,
        ts: microseconds(record.start_ns.saturating_sub(origin_ns)),
        dur: microseconds(record.length_ns()),
        args,
    };
    serde_json::to_value(event).expect("events are JSON")
}

/// The record of an event, or what is wrong with it.
fn record_of(event: Value, origin_ns: u64) -> Result<Record, String> {
    let event: Event = serde_json::from_value(event).map_err(|error| error.to_string())?;
    let (ts, dur) = (event.ts, event.dur);
    let beyond = || format!("its ts {ts:e} and dur {dur:e} are beyond 64 bits of nanoseconds");
    let start_ns = origin_ns.checked_add(nanoseconds(ts));
    let start_ns = start_ns.ok_or_else(beyond)?;
    let end_ns = start_ns.checked_add(nanoseconds(dur)).ok_or_else(beyond)?;
    let Value::Object(mut args) = event.args else {
        return Err("its args are no object".to_owned());
    };
    args.insert("rank".to_owned(), json!(event.pid));
    args.insert("start_ns".to_owned(), json!(start_ns));
    args.insert("end_ns".to_owned(), json!(end_ns));
    serde_json::from_value(Value::Object(args)).map_err(|error| error.to_string())
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 nanoseconds are a hundred days"
)]
pub(crate) fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[expect(
    clippy::cast_sign_loss,
    reason = "a negative time becomes the first moment"
)]
fn nanoseconds(microseconds: f64) -> u64 {
    (microseconds * 1e3).round() as u64
}

pub(crate) fn named(what: &str, rank: u32, thread: u64, name: &str) -> Value {
    json!({"name": what, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": {"name": name}})
}
