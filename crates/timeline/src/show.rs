//! Timelines as text: tables of sums, and a step drawn with letters.

use std::fmt::Write;

use crate::record::Activity;
use crate::summary::Sums;
use crate::timeline::Timeline;
use crate::units::{milliseconds, percent, size, table};

const HEADING: [&str; 11] = [
    "step", "rank", "length", "forward", "backward", "weight", "other", "idle", "idle %", "sent",
    "received",
];

impl Timeline {
    /// A table of the sums by step and rank, in milliseconds.
    pub fn sums_text(&self) -> String {
        let mut rows = vec![HEADING.map(str::to_owned).to_vec()];
        let mut summaries: Vec<_> = self.steps().into_iter().map(Some).collect();
        if summaries.len() > 1 {
            summaries.push(None);
        }
        for step in summaries {
            let summary = self.summary(step);
            let step = step.map_or_else(|| "all".to_owned(), |step| step.to_string());
            for rank in &summary.ranks {
                rows.push(row(&step, &rank.rank.to_string(), rank.sums));
            }
            rows.push(row(&step, "total", summary.total));
        }
        let mut text = table(&rows, 0);
        if self.lost() > 0 {
            let lost = self.lost();
            writeln!(
                text,
                "{lost} records were lost; the steps that they belonged to are left out"
            )
            .expect("text takes all");
        }
        text
    }

    /// A step in letters, `width` columns wide: what each rank did for the longest part of a column, and below it the
    /// microbatch of each task where it begins.
    pub fn drawing(&self, step: u64, width: usize) -> String {
        let Some(interval) = self.intervals().get(&step).copied() else {
            return String::new();
        };
        let length = (interval.end_ns - interval.start_ns).max(1);
        let width = width.max(1);
        let edge = |column: usize| {
            interval
                .start_ns
                .saturating_add(scaled(length, column, width))
        };
        let column_of = |ns: u64| {
            let column = u128::from(ns - interval.start_ns) * width as u128 / u128::from(length);
            (column as usize).min(width - 1)
        };
        let mut text = format!(
            "step {step}: {} ms, a column is {} ms; F forward, B backward, W weight, o other, . idle; microbatches \
             below\n",
            milliseconds(length),
            milliseconds(length / width as u64),
        );
        let margin = self
            .ranks()
            .last()
            .map_or(0, |rank| rank.to_string().len() + 5);
        for rank in self.ranks() {
            let tasks: Vec<_> = self
                .records()
                .iter()
                .filter(|record| record.rank == rank && record.step == step)
                .filter(|record| record.activity().is_busy())
                .collect();
            let letters: String = (0..width)
                .map(|column| {
                    let (from, to) = (edge(column), edge(column + 1));
                    letter(&tasks, from, to)
                })
                .collect();
            let mut numbers = vec![' '; width];
            let (mut free, mut newest) = (0, None);
            for task in &tasks {
                let begun = column_of(task.start_ns);
                let shown = task.microbatch.map(|number| (number, task.activity()));
                if let Some((number, _)) = shown
                    && begun >= free
                    && shown != newest
                {
                    let digits = number.to_string();
                    if begun + digits.len() <= width {
                        for (offset, digit) in digits.chars().enumerate() {
                            numbers[begun + offset] = digit;
                        }
                        free = begun + digits.len() + 1;
                        newest = shown;
                    }
                }
            }
            let name = format!("rank {rank}");
            let numbers: String = numbers.into_iter().collect();
            writeln!(text, "{name:<margin$} |{letters}|").expect("text takes all");
            writeln!(text, "{:margin$}  {numbers}", "").expect("text takes all");
        }
        text.lines().fold(String::new(), |mut trimmed, line| {
            trimmed.push_str(line.trim_end());
            trimmed.push('\n');
            trimmed
        })
    }
}

fn row(step: &str, rank: &str, sums: Sums) -> Vec<String> {
    vec![
        step.to_owned(),
        rank.to_owned(),
        milliseconds(sums.step_ns),
        milliseconds(sums.forward_ns),
        milliseconds(sums.backward_ns),
        milliseconds(sums.weight_ns),
        milliseconds(sums.other_ns),
        milliseconds(sums.idle_ns),
        percent(sums.idle_share()),
        size(sums.sent_bytes),
        size(sums.received_bytes),
    ]
}

/// So many parts of `width` of a length, which may need all of 64 bits.
fn scaled(length: u64, parts: usize, width: usize) -> u64 {
    (u128::from(length) * parts as u128 / width as u128) as u64
}

/// What took the longest part of an interval; a rank that was busy for a part as long as it was idle counts as busy.
fn letter(tasks: &[&crate::record::Record], from: u64, to: u64) -> char {
    let shown = [
        (Activity::Forward, 'F'),
        (Activity::Backward, 'B'),
        (Activity::Weight, 'W'),
        (Activity::Other, 'o'),
    ];
    let spent = |activity: Activity| -> u64 {
        let within = tasks.iter().filter(|task| task.activity() == activity);
        within
            .map(|task| task.end_ns.min(to).saturating_sub(task.start_ns.max(from)))
            .fold(0, u64::saturating_add)
    };
    let busy: Vec<_> = shown
        .iter()
        .map(|(activity, letter)| (spent(*activity), *letter))
        .collect();
    let total = busy.iter().map(|(spent, _)| *spent);
    let total = total.fold(0, u64::saturating_add);
    let most = busy.into_iter().rev().max_by_key(|(spent, _)| *spent);
    match most {
        Some((spent, letter)) if spent > 0 && total.saturating_mul(2) >= to - from => letter,
        _ => '.',
    }
}
