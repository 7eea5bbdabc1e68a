//! `shardwright trace`: timelines from files, as text and as pictures.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use shardwright_timeline::{Comparison, Summary, Timeline};

use crate::Finished;
use crate::input::read_text;
use crate::misuse::line;

/// What a folder of `smp.trace` calls its trace.
const TRACE: &str = "trace.json";

/// What to do with traces.
#[derive(Clone, Debug, Subcommand)]
pub enum TraceVerb {
    /// How each rank spent its time, step by step, and one step drawn with letters.
    Show(ShowArguments),
    /// Write one step as an SVG picture to the standard output.
    Draw(DrawArguments),
    /// Write the order of one step as a program, which `pipeline` takes as a file and other steps are then run by.
    Program(ProgramArguments),
    /// Two traces side by side: steps, ranks, and the modules whose tasks differ most.
    Compare(CompareArguments),
}

/// What `show` looks at.
#[derive(Clone, Debug, Args)]
pub struct ShowArguments {
    /// The trace.json of smp.trace, or its folder.
    pub file: PathBuf,
    /// The step to draw; the newest if none is given.
    #[arg(long, value_name = "NUMBER")]
    pub step: Option<u64>,
    /// How many columns the drawing has.
    #[arg(long, value_name = "COLUMNS", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
    pub width: u16,
    /// Write one JSON object: the sums of each step, and of all.
    #[arg(long)]
    pub json: bool,
}

/// What `draw` draws.
#[derive(Clone, Debug, Args)]
pub struct DrawArguments {
    /// The trace.json of smp.trace, or its folder.
    pub file: PathBuf,
    /// The step; the newest if none is given.
    #[arg(long, value_name = "NUMBER")]
    pub step: Option<u64>,
}

/// What `program` writes.
#[derive(Clone, Debug, Args)]
pub struct ProgramArguments {
    /// The trace.json of smp.trace, or its folder.
    pub file: PathBuf,
    /// The step; the fastest if none is given.
    #[arg(long, value_name = "NUMBER")]
    pub step: Option<u64>,
    /// Write it as the CSV that torch.distributed.pipelining reads.
    #[arg(long)]
    pub csv: bool,
}

/// What `compare` compares.
#[derive(Clone, Debug, Args)]
pub struct CompareArguments {
    /// The first trace.json, or its folder.
    pub a: PathBuf,
    /// The second.
    pub b: PathBuf,
    /// How many modules to list.
    #[arg(long, value_name = "NUMBER", default_value_t = 10)]
    pub modules: usize,
    /// Write one JSON object, with all modules.
    #[arg(long)]
    pub json: bool,
}

#[derive(serde::Serialize)]
struct Shown {
    steps: Vec<Summary>,
    all: Summary,
    records_lost: u64,
}

/// Runs a verb.
pub fn run(verb: &TraceVerb) -> Finished {
    let done = match verb {
        TraceVerb::Show(arguments) => show(arguments),
        TraceVerb::Draw(arguments) => draw(arguments),
        TraceVerb::Program(arguments) => program(arguments),
        TraceVerb::Compare(arguments) => compare(arguments),
    };
    match done {
        Ok(output) => Finished {
            output,
            ..Finished::default()
        },
        Err(complaint) => Finished {
            status: 2,
            output: String::new(),
            complaint: line(&format!("shardwright trace: {complaint}")),
        },
    }
}

fn read(path: &Path) -> Result<Timeline, String> {
    let file = if path.is_dir() {
        path.join(TRACE)
    } else {
        path.to_owned()
    };
    let text =
        read_text(&file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
    Timeline::from_trace(&text).map_err(|error| format!("{}: {error}", file.display()))
}

fn show(arguments: &ShowArguments) -> Result<String, String> {
    let timeline = read(&arguments.file)?;
    if arguments.json {
        let steps = timeline.steps();
        return Ok(json(&Shown {
            steps: steps
                .iter()
                .map(|step| timeline.summary(Some(*step)))
                .collect(),
            all: timeline.summary(None),
            records_lost: timeline.lost(),
        }));
    }
    let mut text = timeline.sums_text();
    if let Some(step) = chosen(&timeline, arguments.step, &arguments.file)? {
        text.push('\n');
        text += &timeline.drawing(step, usize::from(arguments.width));
    }
    Ok(text)
}

fn draw(arguments: &DrawArguments) -> Result<String, String> {
    let timeline = read(&arguments.file)?;
    match chosen(&timeline, arguments.step, &arguments.file)? {
        Some(step) => Ok(timeline.to_svg(step)),
        None => Err(format!("{} has no records", arguments.file.display())),
    }
}

fn program(arguments: &ProgramArguments) -> Result<String, String> {
    let program = read(&arguments.file)?.program(arguments.step);
    let program = program.map_err(|error| format!("{}: {error}", arguments.file.display()))?;
    Ok(if arguments.csv {
        program.to_csv()
    } else {
        program.to_string()
    })
}

fn compare(arguments: &CompareArguments) -> Result<String, String> {
    let comparison = Comparison::new(&read(&arguments.a)?, &read(&arguments.b)?);
    if arguments.json {
        return Ok(json(&comparison));
    }
    let names = format!(
        "A: {}\nB: {}\n\n",
        arguments.a.display(),
        arguments.b.display()
    );
    Ok(names + &comparison.to_text(arguments.modules))
}

fn chosen(timeline: &Timeline, step: Option<u64>, file: &Path) -> Result<Option<u64>, String> {
    timeline
        .step_or_newest(step)
        .map_err(|error| format!("{}: {error}", file.display()))
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).expect("names and numbers are JSON") + "\n"
}
