//! Traces of PyTorch's profiler as parts of one trace of all ranks: a process per rank, on one clock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{Read, Write};

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use crate::timeline::Timeline;
use crate::trace_file::{microseconds, named, place, slice};

/// The threads of the profiler begin here; below are those of timelines.
const FIRST_THREAD: u64 = 100_000;
/// Flows of a rank have numbers of their own below.
const FLOWS_PER_RANK: u64 = 1 << 32;

/// A trace of one rank that cannot become a part of the whole one.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is no Chrome trace, it cannot be read, or the part cannot be written.
    #[error("the profiler's trace cannot be taken over: {0}")]
    Trace(#[from] serde_json::Error),
    /// Its part cannot be written.
    #[error("a part of the trace cannot be written: {0}")]
    Write(#[from] std::io::Error),
}

/// What a rank adds to the profiler's events.
#[derive(Clone, Copy, Debug)]
pub struct RankProfile<'a> {
    /// The global rank, which is the process of its events.
    pub rank: u32,
    /// How the process is called.
    pub name: &'a str,
    /// The process that was profiled.
    pub pid: u64,
    /// The names of its threads.
    pub threads: &'a BTreeMap<u64, String>,
    /// What it did in its steps.
    pub timeline: &'a Timeline,
    /// The first moment of the whole trace, in nanoseconds of the clock that all ranks share.
    pub origin_ns: u64,
}

impl RankProfile<'_> {
    /// Writes the events of a rank, with commas between them, from a trace of `torch.profiler` whose clock begins at
    /// `base_ns` ([`clock_of`]). One event of it at a time is in memory.
    ///
    /// # Errors
    ///
    /// The trace is not what the profiler writes, or the part cannot be written.
    pub fn write(
        &self,
        base_ns: i64,
        trace: impl Read,
        to: impl Write,
    ) -> Result<(), ProfileError> {
        let mut part = Part {
            profile: self,
            base_ns: base_ns.into(),
            to,
            written: 0,
            threads: BTreeMap::new(),
            failed: None,
        };
        part.begin()?;
        let mut from = serde_json::Deserializer::from_reader(trace);
        let read = Trace(&mut part).deserialize(&mut from);
        if let Some(failed) = part.failed {
            return Err(failed.into());
        }
        read?;
        from.end()?;
        part.end()?;
        Ok(())
    }
}

/// When the clock of a trace begins, in nanoseconds since 1970: some versions write it before the events, others behind.
///
/// # Errors
///
/// The trace is not what the profiler writes.
pub fn clock_of(trace: impl Read) -> Result<i64, ProfileError> {
    let mut found = None;
    let read = Base(&mut found).deserialize(&mut serde_json::Deserializer::from_reader(trace));
    match (found, read) {
        (Some(base_ns), _) => Ok(base_ns), // the rest was not read
        (None, Ok(())) => Ok(0),           // old versions count from 1970
        (None, Err(error)) => Err(error.into()),
    }
}

/// What stands before and behind the parts of all ranks, with commas between them, in the whole trace.
pub fn profile_frame(origin_ns: u64) -> (String, &'static str) {
    let head = json!({
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin_ns,
        "otherData": { "shardwright_version": env!("CARGO_PKG_VERSION") },
    });
    let head = head.to_string();
    let head = head.strip_suffix('}').expect("an object ends with a brace");
    (format!("{head},\"traceEvents\":[\n"), "\n]}\n")
}

/// A thread as the profiler tells it: process and thread are numbers, or names of its own.
type Thread = (String, String);

struct Part<'a, W> {
    profile: &'a RankProfile<'a>,
    base_ns: i128,
    to: W,
    written: u64,
    /// Its number here, and whether it has a name.
    threads: BTreeMap<Thread, (u64, bool)>,
    /// Why writing failed, of which a visitor can only tell the text.
    failed: Option<std::io::Error>,
}

impl<W: Write> Part<'_, W> {
    fn put(&mut self, event: &Value) -> std::io::Result<()> {
        if self.written > 0 {
            self.to.write_all(b",\n")?;
        }
        self.written += 1;
        serde_json::to_writer(&mut self.to, event).map_err(std::io::Error::from)
    }

    /// The process, and what its timeline has.
    fn begin(&mut self) -> std::io::Result<()> {
        let profile = self.profile;
        self.put(&named("process_name", profile.rank, 0, profile.name))?;
        self.put(&order(
            "process_sort_index",
            profile.rank,
            0,
            profile.rank.into(),
        ))?;
        let (mut lanes, mut threads) = (BTreeMap::new(), BTreeSet::new());
        for record in profile.timeline.records() {
            let (thread, name) = place(record, &mut lanes);
            if threads.insert(thread) {
                self.name(thread, &format!("tasks: {name}"))?;
            }
            self.put(&slice(record, thread, profile.origin_ns))?;
        }
        Ok(())
    }

    /// The threads that the profiler has not named.
    fn end(&mut self) -> std::io::Result<()> {
        let unnamed: Vec<_> = (self.threads.iter())
            .filter(|(_, (_, is_named))| !is_named)
            .map(|((process, thread), (number, _))| {
                (*number, self.name_of(process, thread, thread))
            })
            .collect();
        for (number, name) in unnamed {
            self.name(number, &name)?;
        }
        self.to.flush()
    }

    /// Names a thread, and puts it in its place among those of the rank.
    fn name(&mut self, thread: u64, name: &str) -> std::io::Result<()> {
        let rank = self.profile.rank;
        self.put(&named("thread_name", rank, thread, name))?;
        self.put(&order("thread_sort_index", rank, thread, thread))
    }

    /// How a thread is called that the profiler calls `given`.
    fn name_of(&self, process: &str, thread: &str, given: &str) -> String {
        if process != self.profile.pid.to_string() {
            return match (process.parse::<u64>(), given) {
                (Ok(device), _) => format!("device {device}, {given}"),
                (Err(_), "") => "profiler".to_owned(),
                (Err(_), _) => given.to_owned(),
            };
        }
        let known = thread
            .parse()
            .ok()
            .and_then(|id: u64| self.profile.threads.get(&id));
        known.map_or_else(|| given.to_owned(), Clone::clone)
    }

    fn number_of(&mut self, process: &str, thread: &str) -> u64 {
        let next = FIRST_THREAD + self.threads.len() as u64;
        let key = (process.to_owned(), thread.to_owned());
        self.threads.entry(key).or_insert((next, false)).0
    }

    /// Writes an event of the profiler as one of this rank.
    fn take_over(&mut self, mut event: Map<String, Value>) -> std::io::Result<()> {
        let process = text_of(event.get("pid"));
        let thread = text_of(event.get("tid"));
        let is_metadata = event.get("ph").is_some_and(|phase| phase == "M");
        let name = event
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        if is_metadata && name != "thread_name" {
            return Ok(()); // the process has a name already, and its threads an order
        }
        let number = self.number_of(&process, &thread);
        if is_metadata {
            let given = event.get("args").and_then(|args| args["name"].as_str());
            let called = self.name_of(&process, &thread, given.unwrap_or(&thread));
            if let Some((_, is_named)) = self.threads.get_mut(&(process, thread)) {
                *is_named = true;
            }
            return self.name(number, &called);
        }
        event.insert("pid".to_owned(), json!(self.profile.rank));
        event.insert("tid".to_owned(), json!(number));
        let ts = event.get("ts").and_then(Value::as_f64).unwrap_or_default();
        event.insert("ts".to_owned(), json!(self.on_the_clock(ts)));
        if let Some(id) = event.get("id").and_then(Value::as_u64) {
            let own = u64::from(self.profile.rank) * FLOWS_PER_RANK + id % FLOWS_PER_RANK;
            event.insert("id".to_owned(), json!(own));
        }
        if event.get("s").is_some_and(|scope| scope == "g") {
            event.insert("s".to_owned(), json!("p")); // a moment of this rank, and not of all
        }
        self.put(&Value::Object(event))
    }

    /// Microseconds since the origin of the whole trace.
    fn on_the_clock(&self, ts: f64) -> f64 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "nanoseconds within a trace have less than 53 bits"
        )]
        let since_base = (ts * 1e3).round() as i128;
        let since = self.base_ns + since_base - i128::from(self.profile.origin_ns);
        let (size, is_before) = (since.unsigned_abs(), since < 0);
        let moment = microseconds(u64::try_from(size).unwrap_or(u64::MAX));
        if is_before { -moment } else { moment }
    }
}

fn text_of(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

fn order(what: &str, process: u32, thread: u64, index: u64) -> Value {
    json!({ "name": what, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": { "sort_index": index } })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Key {
    BaseTimeNanoseconds,
    TraceEvents,
    #[serde(other)]
    Other,
}

/// Reads a trace up to where its clock begins.
struct Base<'a>(&'a mut Option<i64>);

impl<'de> DeserializeSeed<'de> for Base<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Base<'_> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a trace")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Key>()? {
            if matches!(key, Key::BaseTimeNanoseconds) {
                *self.0 = Some(map.next_value()?);
                return Ok(());
            }
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// Reads a whole trace, and writes its events as they come.
struct Trace<'p, 'a, W>(&'p mut Part<'a, W>);

impl<'de, W: Write> DeserializeSeed<'de> for Trace<'_, '_, W> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de, W: Write> Visitor<'de> for Trace<'_, '_, W> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a trace with traceEvents")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_events = false;
        while let Some(key) = map.next_key::<Key>()? {
            if matches!(key, Key::TraceEvents) {
                has_events = true;
                map.next_value_seed(Events(self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if has_events {
            Ok(())
        } else {
            Err(A::Error::missing_field("traceEvents"))
        }
    }
}

struct Events<'p, 'a, W>(&'p mut Part<'a, W>);

impl<'de, W: Write> DeserializeSeed<'de> for Events<'_, '_, W> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de, W: Write> Visitor<'de> for Events<'_, '_, W> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(event) = events.next_element::<Map<String, Value>>()? {
            if let Err(error) = self.0.take_over(event) {
                let text = error.to_string();
                self.0.failed = Some(error);
                return Err(A::Error::custom(text));
            }
        }
        Ok(())
    }
}
