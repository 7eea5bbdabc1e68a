//! A step as an SVG picture, for documents.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::record::{Activity, Record};
use crate::timeline::{Interval, Timeline};
use crate::units::{milliseconds, percent};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 86.0;
const TOP: f64 = 44.0;
const ROW: f64 = 54.0;
const TASK: f64 = 34.0;
const TRANSFER: f64 = 7.0;
const BOTTOM: f64 = 30.0;
/// The width of a digit on a bar.
const DIGIT: f64 = 6.3;
/// What is narrower would not be seen.
const NARROWEST: f64 = 0.12;

/// The colours of `page.html`.
const COLOURS: [(Activity, &str, &str); 8] = [
    (Activity::Forward, "forward", "#3b7dd8"),
    (Activity::Backward, "backward", "#e08a2c"),
    (Activity::Weight, "weight gradients", "#b8405e"),
    (Activity::Other, "other task", "#8a63b8"),
    (Activity::Wait, "waiting", "#e3e6ea"),
    (Activity::Transfer, "transfer", "#2a9d6f"),
    (Activity::Recompute, "recomputation", "#c9b458"),
    (Activity::Offload, "offloading", "#4f5d75"),
];

struct Canvas {
    text: String,
    interval: Interval,
}

impl Timeline {
    /// A step as a picture: a row per rank, bars with their microbatches, and idle time at the right.
    pub fn to_svg(&self, step: u64) -> String {
        let Some(interval) = self.intervals().get(&step).copied() else {
            return String::new();
        };
        let summary = self.summary(Some(step));
        let height = TOP + ROW * precise(summary.ranks.len() as u64) + BOTTOM;
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
        );
        let mut canvas = Canvas { text, interval };
        let of_step = self.records().iter().filter(|record| record.step == step);
        canvas.legend(&of_step.map(Record::activity).collect());
        canvas.ticks(height);
        for (row, own) in summary.ranks.iter().enumerate() {
            let top = TOP + ROW * precise(row as u64);
            canvas.words(
                8.0,
                top + TASK / 2.0 + 4.0,
                "start",
                &format!("rank {}", own.rank),
            );
            let idle = format!("idle {}", percent(own.sums.idle_share()));
            canvas.words(WIDTH - 6.0, top + TASK / 2.0 + 4.0, "end", &idle);
            let records = self
                .records()
                .iter()
                .filter(|record| record.rank == own.rank && record.step == step);
            let (mut tasks, mut waits, mut transfers) = (Vec::new(), Vec::new(), Vec::new());
            for record in records {
                match record.activity() {
                    Activity::Wait => waits.push(record),
                    Activity::Transfer | Activity::Offload => transfers.push(record),
                    _ => tasks.push(record),
                }
            }
            canvas.background(&waits, top);
            for task in tasks {
                // Inside the bar of its backward, which has the number.
                canvas.bar(task, top, TASK, task.activity() != Activity::Recompute);
            }
            for transfer in transfers {
                canvas.bar(transfer, top + TASK + 2.0, TRANSFER, false);
            }
        }
        let total = format!(
            "step {step}: {} ms; idle {} over all ranks",
            milliseconds(interval.end_ns - interval.start_ns),
            percent(summary.total.idle_share()),
        );
        canvas.words(WIDTH - 6.0, 16.0, "end", &total);
        canvas.text + "</svg>\n"
    }
}

impl Canvas {
    fn x(&self, ns: u64) -> f64 {
        let length = precise((self.interval.end_ns - self.interval.start_ns).max(1));
        LEFT + precise(ns - self.interval.start_ns) / length * (WIDTH - LEFT - RIGHT)
    }

    fn words(&mut self, x: f64, y: f64, anchor: &str, words: &str) {
        writeln!(
            self.text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#1c2430\">{}</text>",
            escaped(words)
        )
        .expect("text takes all");
    }

    fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str) {
        writeln!(
            self.text,
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" fill=\"{fill}\"/>"
        )
        .expect("text takes all");
    }

    fn legend(&mut self, present: &BTreeSet<Activity>) {
        let mut x = 8.0;
        let shown = COLOURS.iter();
        for (_, name, colour) in shown.filter(|(own, _, _)| present.contains(own)) {
            self.rectangle(x, 6.0, 11.0, 11.0, colour);
            self.words(x + 16.0, 16.0, "start", name);
            x += 34.0 + 6.6 * precise(name.len() as u64);
        }
    }

    fn ticks(&mut self, height: f64) {
        let length = self.interval.end_ns - self.interval.start_ns;
        let mut gap = 1;
        while length / gap > 12 {
            let leading = gap / 10_u64.pow(gap.ilog10());
            gap = if leading == 2 { gap / 2 * 5 } else { gap * 2 };
        }
        let mut ns: u64 = 0;
        while ns <= length {
            let x = self.x(self.interval.start_ns + ns);
            self.rectangle(x, TOP - 8.0, 1.0, height - TOP - BOTTOM + 8.0, "#edf0f3");
            self.words(
                x,
                height - 10.0,
                "middle",
                &format!("{} ms", precise(ns) / 1e6),
            );
            let Some(next) = ns.checked_add(gap) else {
                break;
            };
            ns = next;
        }
    }

    /// One bar for waits that overlap: several workers wait at once.
    fn background(&mut self, waits: &[&Record], top: f64) {
        let mut reached = self.interval.start_ns;
        for wait in waits {
            let start = wait.start_ns.max(reached);
            if wait.end_ns > start {
                let (from, to) = (self.x(start), self.x(wait.end_ns));
                self.rectangle(from, top, to - from, TASK, colour(Activity::Wait));
                reached = wait.end_ns;
            }
        }
    }

    fn bar(&mut self, record: &Record, top: f64, height: f64, numbered: bool) {
        let (from, to) = (self.x(record.start_ns), self.x(record.end_ns));
        let width = to - from;
        if width < NARROWEST {
            return;
        }
        // A gap tells neighbours of one colour apart.
        let shown = if width > 3.0 { width - 0.8 } else { width };
        self.rectangle(from, top, shown, height, colour(record.activity()));
        let Some(number) = record.microbatch.filter(|_| numbered) else {
            return;
        };
        let digits = number.to_string();
        if width > DIGIT * precise(digits.len() as u64) + 1.0 {
            writeln!(
                self.text,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10.5\" fill=\"#fff\">{digits}</text>",
                from + width / 2.0,
                top + height / 2.0 + 4.0,
            )
            .expect("text takes all");
        }
    }
}

fn colour(activity: Activity) -> &'static str {
    let found = COLOURS.iter().find(|(own, _, _)| *own == activity);
    found.map_or("#000", |(_, _, colour)| colour)
}

fn escaped(words: &str) -> String {
    words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[expect(
    clippy::cast_precision_loss,
    reason = "pixels need no more than 53 bits"
)]
fn precise(number: u64) -> f64 {
    number as f64
}
