//! Traces and pages.

use serde_json::{Value, json};

use super::{later, records, timeline};
use crate::{FORMAT, Timeline, TraceError};

fn trace() -> Value {
    serde_json::from_str(&timeline().to_trace()).unwrap()
}

#[test]
fn the_trace_holds_every_record_with_its_place() {
    let trace = trace();
    let events = trace["traceEvents"].as_array().unwrap();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(slices.len(), records().len());
    let forward = slices
        .iter()
        .find(|event| event["cat"] == "forward" && event["pid"] == 1);
    let forward = forward.unwrap();
    assert_eq!(forward["name"], "transformer.h.2 [0]");
    assert_eq!(
        (&forward["ts"], &forward["dur"]),
        (&json!(12_000.0), &json!(10_000.0))
    );
    assert_eq!(forward["args"]["module"], "transformer.h.2");
    let names: Vec<_> = events
        .iter()
        .filter(|event| event["ph"] == "M")
        .map(|event| (event["pid"].clone(), event["args"]["name"].clone()))
        .collect();
    for (rank, name) in [
        (0, "rank 0"),
        (1, "rank 1"),
        (0, "worker 0"),
        (0, "send"),
        (0, "send 2"),
    ] {
        assert!(names.contains(&(json!(rank), json!(name))), "{rank} {name}");
    }
}

#[test]
fn slices_of_one_thread_never_overlap() {
    let mut ends = std::collections::BTreeMap::new();
    for event in trace()["traceEvents"].as_array().unwrap() {
        if event["ph"] == "X" {
            let thread = (event["pid"].as_u64(), event["tid"].as_u64());
            let start = event["ts"].as_f64().unwrap();
            let end = ends.insert(thread, start + event["dur"].as_f64().unwrap());
            assert!(end.is_none_or(|end| end <= start));
        }
    }
}

#[test]
fn a_trace_of_a_newer_format_is_refused_by_name() {
    let mut newer = trace();
    newer["otherData"]["shardwright_format"] = json!(FORMAT + 1);
    newer["otherData"]["shardwright_version"] = json!("9.9.9");
    let error = Timeline::from_trace(&newer.to_string()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "this trace has format 2, written by shardwright 9.9.9; shardwright {} reads formats up to 1",
            env!("CARGO_PKG_VERSION")
        )
    );
}

#[test]
fn a_trace_of_another_program_is_refused() {
    for text in ["{\"traceEvents\": []}", "{\"otherData\": \"none\"}", "[]"] {
        assert!(matches!(
            Timeline::from_trace(text),
            Err(TraceError::Foreign)
        ));
    }
    for text in ["", "3", "{\"traceEvents\": 3}"] {
        assert!(
            matches!(Timeline::from_trace(text), Err(TraceError::Json(_))),
            "{text}"
        );
    }
}

#[test]
fn a_damaged_record_is_refused() {
    let mut damaged = trace();
    for event in damaged["traceEvents"].as_array_mut().unwrap() {
        if event["ph"] == "X" {
            event["args"]["kind"] = json!("sideways");
        }
    }
    let error = Timeline::from_trace(&damaged.to_string()).unwrap_err();
    assert!(error.to_string().contains("sideways"), "{error}");
}

#[test]
fn a_step_that_is_not_there_is_named_with_those_that_are() {
    let both = Timeline::new([records(), later(2)].concat(), 0);
    assert_eq!(both.step_or_newest(None).unwrap(), Some(2));
    assert_eq!(both.step_or_newest(Some(0)).unwrap(), Some(0));
    let error = both.step_or_newest(Some(1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "step 1 is not in this trace; it has 2 steps from 0 to 2"
    );
    assert_eq!(Timeline::default().step_or_newest(None).unwrap(), None);
}

#[test]
fn the_page_is_self_contained_and_holds_every_record() {
    let mut records = records();
    records[5].module = Some("</script><b>odd".to_owned());
    let page = Timeline::new(records.clone(), 0).to_page();
    for outside in ["src=", "href=", "http://", "https://", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let (_, rest) = page
        .split_once("<script type=\"application/json\" id=\"data\">")
        .unwrap();
    let (embedded, _) = rest.split_once("</script>").unwrap();
    let data: Value = serde_json::from_str(embedded).unwrap();
    assert_eq!(data["format"], FORMAT);
    assert_eq!(data["spans"].as_array().unwrap().len(), records.len());
    assert_eq!(data["steps"], json!([[0, 0, 40_000_000]]));
    assert_eq!(data["by_step"][0]["ranks"][1]["idle_ns"], 20_000_000);
    assert_eq!(data["all"]["total"]["idle_ns"], 40_000_000);
    let names = data["names"].as_array().unwrap();
    assert!(names.contains(&json!("</script><b>odd")));
}

#[test]
fn nothing_recorded_gives_empty_files() {
    let nothing = Timeline::default();
    assert_eq!(Timeline::from_trace(&nothing.to_trace()).unwrap(), nothing);
    assert!(nothing.to_page().contains("\"spans\":[]"));
    assert_eq!(nothing.to_svg(0), "");
}
