//! The decision as text.

use shardwright_core::ModuleId;

use crate::cost::Computation;
use crate::crossing::Crossing;
use crate::decision::{DeviceLoad, PartitionDecision};

/// Crossings beyond this many lines are only counted.
const MOST_LINES: usize = 40;

pub(crate) fn render(decision: &PartitionDecision) -> String {
    let model = decision.modules.first().map_or("", |root| &root.class_name);
    let how = if decision.auto {
        let computation = match decision.computation {
            Computation::MeasuredTime => "measured time",
            Computation::NumberOfModules => "number of modules",
        };
        format!(
            "by cost, memory_weight {}, computation by {computation}",
            decision.alpha
        )
    } else {
        "by hand".to_owned()
    };
    let num_devices = decision.num_devices;
    let mut lines = vec![format!(
        "partition of {model} over {num_devices} devices {how}"
    )];
    lines.extend(aligned(&load_rows(decision)));
    if !decision.unused_devices.is_empty() {
        let ranks: Vec<String> = decision
            .unused_devices
            .iter()
            .map(ToString::to_string)
            .collect();
        lines.push(format!("without a module: pp_rank {}", ranks.join(", ")));
    }
    lines.push(format!(
        "boundary crossings per microbatch: {} forward, as many backward",
        decision.boundary_crossings_per_microbatch
    ));
    let crossings = crossing_lines(decision);
    lines.extend(
        crossings
            .iter()
            .take(MOST_LINES)
            .map(|line| format!("  {line}")),
    );
    if crossings.len() > MOST_LINES {
        lines.push(format!("  and {} more", crossings.len() - MOST_LINES));
    }
    lines.join("\n") + "\n"
}

fn load_rows(decision: &PartitionDecision) -> Vec<[String; 6]> {
    let header = [
        "pp_rank",
        "cost",
        "parameters",
        "parameter bytes",
        "buffer bytes",
        "modules",
    ];
    let row = |first: String, load: &DeviceLoad| {
        [
            first,
            format!("{:.3}", load.cost),
            grouped(load.parameters),
            grouped(load.parameter_bytes),
            grouped(load.buffer_bytes),
            grouped(load.modules),
        ]
    };
    let mut all = DeviceLoad::default();
    let mut rows = vec![header.map(str::to_owned)];
    for load in &decision.devices {
        all.cost += load.cost;
        all.parameters += load.parameters;
        all.parameter_bytes += load.parameter_bytes;
        all.buffer_bytes += load.buffer_bytes;
        all.modules += load.modules;
        rows.push(row(load.pp_rank.to_string(), load));
    }
    rows.push(row("all".to_owned(), &all));
    rows
}

fn aligned(rows: &[[String; 6]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |row: &[String; 6]| {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        cells.join("  ")
    };
    rows.iter().map(line).collect()
}

/// `transformer.h[2:4] on 1, called by transformer on 0`: consecutive numbers are one line.
fn crossing_lines(decision: &PartitionDecision) -> Vec<String> {
    let name = |crossing: &Crossing| shown_name(decision, crossing.callee);
    let mut lines = Vec::new();
    let mut rest = decision.crossings.as_slice();
    while let Some(first) = rest.first() {
        let mut shown = name(first).to_owned();
        let mut taken = 1;
        if let Some((stem, start)) = numbered(name(first)) {
            let alike = |&(offset, next): &(usize, &Crossing)| {
                (next.caller, next.caller_rank, next.callee_rank)
                    == (first.caller, first.caller_rank, first.callee_rank)
                    && numbered(name(next)) == Some((stem, start + offset as u64))
            };
            taken = rest.iter().enumerate().take_while(alike).count();
            if taken > 1 {
                shown = format!("{stem}[{start}:{}]", start + taken as u64);
            }
        }
        let caller = match first.caller {
            Some(caller) => shown_name(decision, caller),
            None => "the step function",
        };
        lines.push(format!(
            "{shown} on {}, called by {caller} on {}",
            first.callee_rank, first.caller_rank
        ));
        rest = &rest[taken..];
    }
    lines
}

fn shown_name(decision: &PartitionDecision, module: ModuleId) -> &str {
    let place = &decision.modules[module.0 as usize];
    if place.name.is_empty() {
        &place.class_name
    } else {
        &place.name
    }
}

fn numbered(name: &str) -> Option<(&str, u64)> {
    let (stem, number) = name.rsplit_once('.')?;
    Some((stem, number.parse().ok()?))
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
