//! The `shardwright` command, as a library: the Python package has the entry
//! point, so one build serves both.
//!
//! Nothing here prints: [`run`] returns what is to be written. Only how far a long command has come is drawn on the terminal
//! meanwhile, if there is one.

pub mod checkpoint;
pub mod doctor;
pub mod facts;
mod input;
mod misuse;
pub mod report;
pub mod simulate;
pub mod trace;
pub mod ucx;

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};

pub use facts::PythonFacts;
pub use ucx::UcxReport;

/// What a run of the command wants written, and its exit status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// 0 for success, 1 for a finding, 2 for a misuse.
    pub status: u8,
    /// For the standard output.
    pub output: String,
    /// For the standard error.
    pub complaint: String,
}

/// Model parallelism for PyTorch with a Rust core.
#[derive(Debug, Parser)]
#[command(name = "shardwright", version, arg_required_else_help = true)]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a script as the ranks of a job: run --ranks 2 SCRIPT.
    #[command(disable_help_flag = true)]
    Run(RunArguments),
    /// Print what the file of `accelerate config` becomes here: convert FILE.
    #[command(disable_help_flag = true)]
    Convert(RunArguments),
    /// Look at what this machine has of what a job needs, and say what to do.
    Doctor(DoctorArguments),
    /// Tell how long a step takes under a schedule, and which rank idles when.
    Simulate(simulate::SimulateArguments),
    /// Look at checkpoints that jobs saved, and write them in other forms.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointVerb),
    /// Look at timelines that smp.trace wrote.
    #[command(subcommand)]
    Trace(trace::TraceVerb),
}

/// What `run` and `convert` are given, which the Python package reads.
#[derive(Clone, Debug, Default, Args)]
pub struct RunArguments {
    /// Options, the script or the file, and arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

/// What `doctor` looks at.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorArguments {
    /// Also look up this host's address, such as those of the job's other hosts.
    #[arg(long = "host", value_name = "NAME")]
    pub hosts: Vec<String>,
    /// Write one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command with its arguments, the program's name not among them.
pub fn run<A: Into<OsString> + Clone>(
    arguments: impl IntoIterator<Item = A>,
    python: &PythonFacts,
    ucx: Option<&UcxReport>,
) -> Finished {
    let name = OsString::from("shardwright");
    let arguments = std::iter::once(name).chain(arguments.into_iter().map(Into::into));
    match Command::try_parse_from(arguments) {
        // The Python package runs it, and asks for all others here.
        Ok(Command {
            verb: Verb::Run(_) | Verb::Convert(_),
        }) => Finished {
            status: 2,
            output: String::new(),
            complaint: "run and convert are commands of the Python package\n".to_owned(),
        },
        Ok(Command {
            verb: Verb::Doctor(arguments),
        }) => {
            let report = doctor::examine(&arguments, python, ucx);
            let output = if arguments.json {
                report.to_json()
            } else {
                report.to_text()
            };
            Finished {
                status: u8::from(!report.is_well()),
                output,
                complaint: String::new(),
            }
        }
        Ok(Command {
            verb: Verb::Simulate(arguments),
        }) => simulate::simulate(&arguments, input::read_text),
        Ok(Command {
            verb: Verb::Trace(verb),
        }) => trace::run(&verb),
        Ok(Command {
            verb: Verb::Checkpoint(verb),
        }) => checkpoint::run(&verb),
        // Help and version come as errors too.
        Err(error) if error.use_stderr() => Finished {
            status: 2,
            output: String::new(),
            complaint: misuse::told(&error),
        },
        Err(told) => Finished {
            output: told.to_string(),
            ..Finished::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{Finished, PythonFacts, run};

    fn run_with(arguments: &[&str]) -> Finished {
        run(arguments, &PythonFacts::default(), None)
    }

    #[test]
    fn the_version_is_that_of_the_library() {
        let finished = run_with(&["--version"]);
        let expected = concat!("shardwright ", env!("CARGO_PKG_VERSION"), "\n");
        assert_eq!((finished.status, finished.output.as_str()), (0, expected));
    }

    #[test]
    fn help_names_the_verbs() {
        let finished = run_with(&["--help"]);
        for verb in ["run --ranks 2 SCRIPT", "convert FILE", "doctor", "trace"] {
            assert!(finished.output.contains(verb), "{verb}");
        }
        assert!(finished.complaint.is_empty());
    }

    #[test]
    fn a_misuse_is_told_as_such() {
        let finished = run_with(&["docter"]);
        assert_eq!((finished.status, finished.output.as_str()), (2, ""));
        assert!(finished.complaint.contains("doctor"), "{finished:?}");
        assert_eq!(run_with(&[]).status, 2);
    }
}
