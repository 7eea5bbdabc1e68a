//! A timeline as one self-contained page: a row per rank, as in the paper's figure 5.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::summary::Summary;
use crate::timeline::Timeline;
use crate::trace_file::FORMAT;

const TEMPLATE: &str = include_str!("page.html");
const MARK: &str = "{{timeline}}";

#[derive(Serialize)]
struct Data {
    format: u64,
    names: Vec<String>,
    spans: Vec<Value>,
    steps: Vec<(u64, u64, u64)>,
    all: Summary,
    by_step: Vec<Summary>,
    lost: u64,
}

impl Timeline {
    /// A page that needs nothing but a browser; it zooms with the wheel and moves by dragging.
    pub fn to_page(&self) -> String {
        let origin = self.origin_ns();
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut names: Vec<String> = Vec::new();
        let spans = self.records().iter().map(|record| {
            let label = record.label();
            let name = *numbers.entry(label.clone()).or_insert_with(|| {
                names.push(label);
                names.len() - 1
            });
            json!([
                record.rank,
                record.activity(),
                record.start_ns - origin,
                record.length_ns(),
                name,
                record.step,
                record.microbatch,
                record.worker,
                record.bytes,
            ])
        });
        let spans = spans.collect();
        let intervals = self.intervals();
        let steps = intervals
            .iter()
            .map(|(step, it)| (*step, it.start_ns - origin, it.end_ns - origin));
        let data = Data {
            format: FORMAT,
            names,
            spans,
            steps: steps.collect(),
            all: self.summary(None),
            by_step: intervals
                .keys()
                .map(|step| self.summary(Some(*step)))
                .collect(),
            lost: self.lost(),
        };
        // A module's name must not be able to close the script element.
        let data = serde_json::to_string(&data).expect("records are JSON");
        TEMPLATE.replace(MARK, &data.replace("</", "<\\/"))
    }
}
