//! Traces of PyTorch's profiler as parts of one.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};

use super::{MS, timeline};
use crate::{ProfileError, RankProfile, Timeline, clock_of, profile_frame};

const BASE_NS: i64 = 1_790_857_026_000_000_000;
const PID: u64 = 4242;

/// What torch writes, with a worker's operator, a flow, a device's kernel and marks of the profiler itself.
fn events() -> Value {
    json!([
        {"ph": "M", "name": "process_name", "ts": 1.5, "pid": PID, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": PID, "tid": 77, "ts": 5_060_660_502_174.641, "dur": 2.5,
         "args": {"External id": 3}},
        {"ph": "M", "name": "thread_name", "ts": 1.5, "pid": PID, "tid": 77, "args": {"name": "thread 77 (python)"}},
        {"ph": "s", "id": 9, "pid": PID, "tid": 77, "ts": 5_060_660_502_175.0, "cat": "fwdbwd", "name": "fwdbwd"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5_060_660_502_180.0, "dur": 1.0},
        {"ph": "M", "name": "thread_name", "ts": 1.5, "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 5_060_660_502_190.0}
    ])
}

fn trace(base_first: bool) -> String {
    let (base, events) = (BASE_NS, events());
    if base_first {
        format!(
            r#"{{"baseTimeNanoseconds": {base}, "other": [{{}}], "traceEvents": {events}, "traceName": "x"}}"#
        )
    } else {
        format!(r#"{{"traceEvents": {events}, "other": [{{}}], "baseTimeNanoseconds": {base}}}"#)
    }
}

fn part(
    rank: u32,
    trace: &str,
    timeline: &Timeline,
    origin_ns: u64,
) -> Result<String, ProfileError> {
    let threads = BTreeMap::from([(77, "shardwright-worker-0".to_owned())]);
    let name = format!("rank {rank} (stage {rank})");
    let profile = RankProfile {
        rank,
        name: &name,
        pid: PID,
        threads: &threads,
        timeline,
        origin_ns,
    };
    let mut written = Vec::new();
    profile.write(clock_of(trace.as_bytes())?, trace.as_bytes(), &mut written)?;
    Ok(String::from_utf8(written).unwrap())
}

fn events_of(parts: &[String], origin_ns: u64) -> Vec<Value> {
    let (head, end) = profile_frame(origin_ns);
    let whole: Value = serde_json::from_str(&format!("{head}{}{end}", parts.join(",\n"))).unwrap();
    assert_eq!(whole["baseTimeNanoseconds"], json!(origin_ns));
    whole["traceEvents"].as_array().unwrap().clone()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|event| event["name"] == name)
        .collect()
}

#[test]
fn events_of_ranks_are_processes_on_one_clock() {
    let origin_ns = 1_795_917_686_000_000_000;
    let parts: Vec<_> = (0..2)
        .map(|rank| part(rank, &trace(rank == 0), &Timeline::default(), origin_ns).unwrap())
        .collect();
    let events = events_of(&parts, origin_ns);
    for event in &events {
        for key in ["ph", "pid", "tid", "ts", "name"] {
            assert!(event.get(key).is_some(), "{key} is missing in {event}");
        }
        assert!(event["pid"].is_u64() && event["tid"].is_u64());
    }
    let operators = named(&events, "aten::addmm");
    assert_eq!(operators.len(), 2);
    for (rank, operator) in operators.iter().enumerate() {
        assert_eq!(operator["pid"], json!(rank));
        assert_eq!(operator["ts"], json!(502_174.641)); // the base and the origin differ by whole microseconds
        assert_eq!(operator["args"]["External id"], 3);
    }
    let flows: Vec<_> = named(&events, "fwdbwd")
        .iter()
        .map(|event| event["id"].clone())
        .collect();
    assert_eq!(flows, [json!(9), json!((1_u64 << 32) + 9)]);
    let names = |what: &str| -> Vec<_> {
        let all = named(&events, what).into_iter();
        all.map(|event| (event["pid"].clone(), event["args"]["name"].clone()))
            .collect()
    };
    assert_eq!(
        names("process_name"),
        [
            (json!(0), json!("rank 0 (stage 0)")),
            (json!(1), json!("rank 1 (stage 1)"))
        ]
    );
    for rank in 0..2 {
        for name in ["shardwright-worker-0", "device 0, stream 7", "profiler"] {
            assert!(
                names("thread_name").contains(&(json!(rank), json!(name))),
                "{rank} {name}"
            );
        }
    }
    assert_eq!(named(&events, "Record Window End")[1]["s"], "p");
}

#[test]
fn what_a_rank_did_stands_beside_its_operators() {
    let origin_ns = 900 * MS;
    let mut own = timeline();
    own = Timeline::new(
        own.records()
            .iter()
            .filter(|record| record.rank == 1)
            .cloned()
            .collect(),
        0,
    );
    let events = events_of(
        &[part(1, &trace(true), &own, origin_ns).unwrap()],
        origin_ns,
    );
    let forward = events
        .iter()
        .find(|event| event["cat"] == "forward")
        .unwrap();
    assert_eq!(
        (&forward["ts"], &forward["dur"], &forward["pid"]),
        (&json!(112_000.0), &json!(10_000.0), &json!(1))
    );
    let operator = named(&events, "aten::addmm")[0];
    assert_ne!(operator["tid"], forward["tid"]);
    let name = events
        .iter()
        .find(|event| event["name"] == "thread_name" && event["tid"] == forward["tid"]);
    assert_eq!(name.unwrap()["args"]["name"], "tasks: worker 0");
}

#[test]
fn events_before_the_origin_keep_their_distance() {
    let origin_ns = 1_795_917_687_000_000_000;
    let events = events_of(
        &[part(0, &trace(false), &Timeline::default(), origin_ns).unwrap()],
        origin_ns,
    );
    assert_eq!(named(&events, "aten::addmm")[0]["ts"], json!(-497_825.359));
}

#[test]
fn what_is_no_trace_is_refused() {
    for (text, why) in [
        ("{\"traceEvents\": [{\"ph\": ", "EOF while parsing"),
        (
            "{\"baseTimeNanoseconds\": 1}",
            "missing field `traceEvents`",
        ),
        ("{\"traceEvents\": [7]}", "invalid type: integer"),
        ("[]", "invalid type: sequence"),
    ] {
        let error = part(0, text, &Timeline::default(), 0)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("the profiler's trace cannot be taken over: "),
            "{error}"
        );
        assert!(error.contains(why), "{error}");
    }
}

/// A disk that is full after so many bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(rest) = self.0.checked_sub(bytes.len()) else {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        };
        self.0 = rest;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_told_apart_from_a_broken_trace() {
    let (threads, timeline) = (BTreeMap::new(), Timeline::default());
    let profile = RankProfile {
        rank: 0,
        name: "rank 0 (stage 0)",
        pid: PID,
        threads: &threads,
        timeline: &timeline,
        origin_ns: 0,
    };
    for room in [0, 300, 500] {
        let written = profile.write(BASE_NS, trace(true).as_bytes(), Full(room));
        assert!(
            matches!(written, Err(ProfileError::Write(_))),
            "{written:?}"
        );
    }
}
