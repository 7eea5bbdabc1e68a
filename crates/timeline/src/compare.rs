//! Two timelines side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;

use crate::record::Activity;
use crate::timeline::Timeline;
use crate::units::{milliseconds, percent, table};

/// A figure of both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pair<T> {
    /// Of the first timeline.
    pub a: T,
    /// Of the second.
    pub b: T,
}

/// How a rank's steps differ.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankPair {
    /// The rank.
    pub rank: u32,
    /// The share of its steps in which a task ran.
    pub busy_share: Pair<f64>,
    /// Idle time in a step, on average.
    pub idle_ns: Pair<u64>,
}

/// How the tasks of a module differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModulePair {
    /// The module's global name.
    pub module: String,
    /// What its tasks were.
    pub activity: Activity,
    /// Tasks in a step, on average.
    pub tasks: Pair<f64>,
    /// Time in a step, on average over steps.
    pub time_ns: Pair<u64>,
}

/// Two timelines side by side; steps are compared by their averages, so that their number may differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// How many steps.
    pub num_steps: Pair<usize>,
    /// The median length of a step.
    pub step_ns: Pair<u64>,
    /// By rank.
    pub ranks: Vec<RankPair>,
    /// By module and activity, the largest difference of time first.
    pub modules: Vec<ModulePair>,
}

/// Rank, step, microbatch, requester and request.
type TaskId = (u32, u64, Option<u32>, Option<u32>, Option<u64>);

/// Tasks and time of a module's activity over all steps.
#[derive(Default)]
struct Work {
    tasks: BTreeSet<TaskId>,
    time_ns: u64,
}

impl Comparison {
    /// Puts two timelines side by side.
    pub fn new(a: &Timeline, b: &Timeline) -> Self {
        let num_steps = Pair {
            a: a.steps().len(),
            b: b.steps().len(),
        };
        let (sums_a, sums_b) = (a.summary(None), b.summary(None));
        let of = |summary: &crate::Summary, rank: u32| {
            let found = summary.ranks.iter().find(|own| own.rank == rank);
            found.map(|own| own.sums).unwrap_or_default()
        };
        let ranks: BTreeSet<u32> = a.ranks().into_iter().chain(b.ranks()).collect();
        let ranks = ranks.into_iter().map(|rank| {
            let (own_a, own_b) = (of(&sums_a, rank), of(&sums_b, rank));
            RankPair {
                rank,
                busy_share: Pair {
                    a: own_a.busy_share(),
                    b: own_b.busy_share(),
                },
                idle_ns: Pair {
                    a: own_a.idle_ns / num_steps.a.max(1) as u64,
                    b: own_b.idle_ns / num_steps.b.max(1) as u64,
                },
            }
        });
        Self {
            num_steps,
            step_ns: Pair {
                a: median_step(a),
                b: median_step(b),
            },
            ranks: ranks.collect(),
            modules: modules(a, b, num_steps),
        }
    }

    /// As text, with the so many modules that differ most.
    pub fn to_text(&self, num_modules: usize) -> String {
        let heading = |cells: &[&str]| cells.iter().map(|&cell| cell.to_owned()).collect();
        let mut steps: Vec<Vec<String>> = vec![heading(&["", "A", "B", "B/A"])];
        steps.push(vec![
            "steps".to_owned(),
            self.num_steps.a.to_string(),
            self.num_steps.b.to_string(),
        ]);
        steps.push(vec![
            "median step, ms".to_owned(),
            milliseconds(self.step_ns.a),
            milliseconds(self.step_ns.b),
            ratio(self.step_ns),
        ]);
        for own in &self.ranks {
            steps.push(vec![
                format!("rank {}: busy", own.rank),
                percent(own.busy_share.a),
                percent(own.busy_share.b),
            ]);
            steps.push(vec![
                format!("rank {}: idle in a step, ms", own.rank),
                milliseconds(own.idle_ns.a),
                milliseconds(own.idle_ns.b),
                ratio(own.idle_ns),
            ]);
        }
        let mut tasks: Vec<Vec<String>> = vec![heading(&[
            "module", "task", "A tasks", "B tasks", "A ms", "B ms", "B-A ms", "B/A",
        ])];
        for own in self.modules.iter().take(num_modules) {
            let (more, less) = (own.time_ns.b, own.time_ns.a);
            let sign = if more < less { "-" } else { "+" };
            tasks.push(vec![
                own.module.clone(),
                own.activity.name().to_owned(),
                format!("{:.1}", own.tasks.a),
                format!("{:.1}", own.tasks.b),
                milliseconds(less),
                milliseconds(more),
                format!("{sign}{}", milliseconds(more.abs_diff(less))),
                ratio(own.time_ns),
            ]);
        }
        let mut text = table(&steps, 1);
        let all = self.modules.len();
        let shown = num_modules.min(all);
        writeln!(
            text,
            "\ntasks in a step, on average: the {shown} largest differences of {all}"
        )
        .expect("text takes all");
        text + &table(&tasks, 2)
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to the hundredth")]
fn ratio(pair: Pair<u64>) -> String {
    if pair.a == 0 {
        String::new()
    } else {
        format!("{:.2}", pair.b as f64 / pair.a as f64)
    }
}

fn median_step(timeline: &Timeline) -> u64 {
    let intervals = timeline.intervals();
    let lengths = intervals.values().map(|it| it.end_ns - it.start_ns);
    let mut lengths: Vec<u64> = lengths.collect();
    lengths.sort_unstable();
    match lengths.len() {
        0 => 0,
        count if count % 2 == 1 => lengths[count / 2],
        count => u64::midpoint(lengths[count / 2 - 1], lengths[count / 2]),
    }
}

fn work(timeline: &Timeline) -> BTreeMap<(String, Activity), Work> {
    let mut by_module: BTreeMap<(String, Activity), Work> = BTreeMap::new();
    for record in timeline.records() {
        let activity = record.activity();
        if activity.is_busy() {
            let work = by_module.entry((record.label(), activity)).or_default();
            // A task that was suspended has several records.
            work.tasks.insert((
                record.rank,
                record.step,
                record.microbatch,
                record.peer,
                record.request,
            ));
            work.time_ns = work.time_ns.saturating_add(record.length_ns());
        }
    }
    by_module
}

#[expect(clippy::cast_precision_loss, reason = "an average of counts")]
fn modules(a: &Timeline, b: &Timeline, num_steps: Pair<usize>) -> Vec<ModulePair> {
    let (mut in_a, mut in_b) = (work(a), work(b));
    let keys: BTreeSet<_> = in_a.keys().chain(in_b.keys()).cloned().collect();
    let (steps_a, steps_b) = (num_steps.a.max(1), num_steps.b.max(1));
    let mut modules: Vec<_> = keys
        .into_iter()
        .map(|key| {
            let own_a = in_a.remove(&key).unwrap_or_default();
            let own_b = in_b.remove(&key).unwrap_or_default();
            ModulePair {
                module: key.0,
                activity: key.1,
                tasks: Pair {
                    a: own_a.tasks.len() as f64 / steps_a as f64,
                    b: own_b.tasks.len() as f64 / steps_b as f64,
                },
                time_ns: Pair {
                    a: own_a.time_ns / steps_a as u64,
                    b: own_b.time_ns / steps_b as u64,
                },
            }
        })
        .collect();
    modules.sort_by_key(|own| std::cmp::Reverse(own.time_ns.a.abs_diff(own.time_ns.b)));
    modules
}
