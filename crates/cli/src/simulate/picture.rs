//! A simulated step as a table and a drawing of characters.

use std::fmt::Write;

use shardwright_schedule::ActionKind;
use shardwright_simulate::{SimulatedStep, TaskKind};

/// How many characters wide the drawing is, without the names of the ranks.
const WIDTH: usize = 100;
const IDLE: char = '.';
const LEGEND: &str = "
F forward, B backward, I input gradient, W weight gradient, with its microbatch (and before it the
stage, where a rank has several); . idle
";

/// The makespan, a row for each rank, and what it does when.
pub(crate) fn outcome(outcome: &SimulatedStep) -> String {
    let mut text = format!(
        "makespan {:.2?}, bubble {:.1}%\n\n{:>4} {:>12} {:>12} {:>7}\n",
        outcome.makespan,
        outcome.bubble() * 100.0,
        "rank",
        "busy",
        "idle",
        "bubble",
    );
    for (rank, used) in outcome.ranks.iter().enumerate() {
        let busy = format!("{:.2?}", used.busy);
        let idle = format!("{:.2?}", used.idle);
        let bubble = used.bubble() * 100.0;
        writeln!(text, "{rank:>4} {busy:>12} {idle:>12} {bubble:>6.1}%").expect("text takes all");
    }
    text.push('\n');
    for (rank, line) in draw(outcome).into_iter().enumerate() {
        let line: String = line.into_iter().collect();
        writeln!(text, "{rank:>4} {line}").expect("text takes all");
    }
    text.push_str(LEGEND);
    text
}

fn draw(outcome: &SimulatedStep) -> Vec<Vec<char>> {
    let mut lines = vec![vec![IDLE; WIDTH]; outcome.ranks.len()];
    let makespan = outcome.makespan.as_nanos().max(1);
    let column = |time: std::time::Duration| (time.as_nanos() * WIDTH as u128 / makespan) as usize;
    let num_stages = outcome.tasks.iter().map(|task| task.stage.0 + 1).max();
    let names_stages = num_stages.is_some_and(|stages| stages as usize > outcome.ranks.len());
    for task in &outcome.tasks {
        // Empty where the task is narrower than a character.
        let columns = column(task.start)..column(task.end);
        let slots = &mut lines[task.rank.0 as usize][columns];
        let (letter, fill) = characters(task.kind);
        let (stage, microbatch) = (task.stage, task.microbatch);
        let stage = if names_stages {
            stage.to_string()
        } else {
            String::new()
        };
        let names = [
            format!("{stage}{letter}{microbatch}"),
            format!("{letter}{microbatch}"),
            letter.to_string(),
        ];
        slots.fill(fill);
        if let Some(name) = names.into_iter().find(|name| name.len() <= slots.len()) {
            for (slot, character) in slots.iter_mut().zip(name.chars()) {
                *slot = character;
            }
        }
    }
    lines
}

/// The letter of a task, and what fills the rest of its time.
fn characters(kind: TaskKind) -> (char, char) {
    match kind {
        TaskKind::Action(kind) => {
            let fill = match kind {
                ActionKind::Forward => '-',
                ActionKind::FullBackward | ActionKind::InputGradient => '=',
                ActionKind::WeightGradient => '~',
            };
            (kind.letter(), fill)
        }
        TaskKind::Turn => ('+', '+'),
    }
}
