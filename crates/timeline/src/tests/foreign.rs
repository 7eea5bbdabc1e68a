//! Files that others wrote: whatever stands in them, they are read or refused.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::timeline;
use crate::{Comparison, Record, RecordKind, Timeline};

/// Everything that is made of a timeline.
fn use_all(read: &Timeline) {
    for step in read.steps() {
        for width in [1, 7, 200] {
            read.drawing(step, width);
        }
        read.to_svg(step);
        read.program(Some(step)).map_err(one_line).ok();
    }
    read.program(None).map_err(one_line).ok();
    read.step_or_newest(Some(u64::MAX)).map_err(one_line).ok();
    read.sums_text();
    read.to_page();
    let again = Timeline::from_trace(&read.to_trace());
    again.map_err(one_line).ok();
    let joined = Timeline::join([
        read.clone(),
        Timeline::new(read.records().to_vec(), u64::MAX),
    ]);
    joined.summary(None);
    Comparison::new(read, &timeline()).to_text(usize::MAX);
}

fn one_line(error: impl std::fmt::Display) {
    let told = shardwright_core::one_line(&error.to_string());
    assert!(!told.contains('\n'), "{told}");
}

/// Values of every kind, and numbers at every edge.
fn any_value() -> impl Strategy<Value = Value> {
    let numbers = prop::sample::select(vec![
        json!(0),
        json!(-1),
        json!(1e300),
        json!(-1e300),
        json!(1.8e16),
        json!(u32::MAX),
        json!(u64::from(u32::MAX) + 1),
        json!(u64::MAX),
        json!(u64::MAX - 1),
        json!(i64::MIN),
        json!(9e18),
    ]);
    let names = RecordKind::ALL.map(|kind| json!(kind.name()));
    let leaf = prop_oneof![
        4 => numbers,
        2 => prop::sample::select(names.to_vec()),
        1 => any::<u64>().prop_map(|number| json!(number)),
        1 => any::<f64>().prop_map(|number| json!(number)),
        1 => any::<bool>().prop_map(Value::Bool),
        1 => Just(Value::Null),
        1 => ".{0,5}".prop_map(Value::String),
        1 => Just(json!("X")),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
            prop::collection::hash_map("[a-z]{1,4}", inner, 0..3).prop_map(|all| json!(all)),
        ]
    })
}

/// The pointers to every place of a value.
fn places(value: &Value, here: &str, found: &mut Vec<String>) {
    found.push(here.to_owned());
    match value {
        Value::Array(all) => {
            for (index, one) in all.iter().enumerate() {
                places(one, &format!("{here}/{index}"), found);
            }
        }
        Value::Object(all) => {
            for (key, one) in all {
                places(one, &format!("{here}/{key}"), found);
            }
        }
        _ => {}
    }
}

fn replaced(mut file: Value, changes: &[(prop::sample::Index, Value)]) -> String {
    let mut all = Vec::new();
    places(&file, "", &mut all);
    for (place, value) in changes {
        let place: &String = place.get(&all);
        if let Some(found) = file.pointer_mut(place) {
            found.clone_from(value);
        }
    }
    file.to_string()
}

proptest! {
    #[test]
    fn any_value_at_any_place_of_a_trace_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..6),
    ) {
        let trace = serde_json::from_str(&timeline().to_trace()).unwrap();
        match Timeline::from_trace(&replaced(trace, &changes)) {
            Ok(read) => use_all(&read),
            Err(error) => one_line(error),
        }
    }

    #[test]
    fn any_value_at_any_place_of_records_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..6),
    ) {
        let records = serde_json::from_str(&timeline().to_json()).unwrap();
        match Timeline::from_json(&replaced(records, &changes)) {
            Ok(read) => use_all(&read),
            Err(error) => one_line(error),
        }
    }

    #[test]
    fn records_at_the_edges_of_time_are_used(
        times in prop::collection::vec(
            (0..2_u32, edge(), edge(), edge(), edge(), prop::sample::select(RecordKind::ALL.to_vec()), 0..3_u32), 1..12,
        ),
    ) {
        let records = times.into_iter().map(|(rank, step, start_ns, end_ns, bytes, kind, microbatch)| Record {
            start_ns,
            end_ns,
            bytes,
            microbatch: Some(microbatch),
            peer: Some(1 - rank),
            ..Record::new(rank, step, kind)
        });
        use_all(&Timeline::new(records.collect(), 0));
    }
}

fn edge() -> impl Strategy<Value = u64> {
    prop::sample::select(vec![0, 1, 1 << 53, u64::MAX / 2, u64::MAX - 1, u64::MAX])
}

#[test]
fn an_event_that_is_none_is_named() {
    let refusal = |key: &str, value: Value| {
        let mut trace: Value = serde_json::from_str(&timeline().to_trace()).unwrap();
        let events = trace["traceEvents"].as_array_mut().unwrap();
        let place = events.iter().position(|event| event["ph"] == "X").unwrap();
        events[place][key] = value;
        let error = Timeline::from_trace(&trace.to_string()).unwrap_err();
        error.to_string().replace(&place.to_string(), "N")
    };
    assert_eq!(
        refusal("args", json!(0)),
        "traceEvents[N] is no record: its args are no object"
    );
    let error = refusal("ts", json!(2_f64.powi(64)));
    assert!(
        error.ends_with("are beyond 64 bits of nanoseconds"),
        "{error}"
    );
}

#[test]
fn ranks_that_begin_with_different_microbatches_are_no_program() {
    let task = |rank, kind, microbatch| Record {
        microbatch: Some(microbatch),
        ..Record::new(rank, 0, kind)
    };
    let records = vec![
        task(0, RecordKind::Root, 0),
        task(1, RecordKind::Forward, 1),
    ];
    let error = Timeline::new(records, 0).program(None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1 ran 0 forwards for microbatch 0 and 1 for microbatch 1; a program needs the same stages for every \
         microbatch"
    );
}
