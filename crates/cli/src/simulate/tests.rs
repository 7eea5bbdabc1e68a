use std::io;

use clap::Parser;

use super::{SimulateArguments, simulate};
use crate::Finished;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    arguments: SimulateArguments,
}

const DEADLOCK: &str = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n";

fn run(line: &str) -> Finished {
    let words = std::iter::once("simulate").chain(line.split_whitespace());
    let arguments = match Command::try_parse_from(words) {
        Ok(command) => command.arguments,
        Err(error) => {
            return Finished {
                status: 2,
                complaint: error.to_string(),
                ..Finished::default()
            };
        }
    };
    simulate(&arguments, |path| match path.to_str() {
        Some("good.csv") => Ok("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n".to_owned()),
        Some("good.txt") => Ok(
            "shardwright program 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n".to_owned(),
        ),
        Some("deadlock.csv") => Ok(DEADLOCK.to_owned()),
        Some("missing.csv") => Ok("0F0\n".to_owned()),
        Some("bad.csv") => Ok("0F0,0X0\n".to_owned()),
        _ => Err(io::Error::from(io::ErrorKind::NotFound)),
    })
}

fn makespan(line: &str) -> u64 {
    let finished = run(&format!("{line} --json"));
    assert_eq!(finished.status, 0, "{}", finished.complaint);
    let json: serde_json::Value = serde_json::from_str(&finished.output).expect("to be JSON");
    json["makespan_ns"].as_u64().expect("to be a number")
}

#[test]
fn a_schedule_is_a_table_and_a_drawing() {
    let finished = run(
        "--schedule interleaved --ranks 2 --microbatches 3 --forward 10ms --backward 15ms --latency 0",
    );
    let expected = "\
makespan 100.00ms, bubble 25.0%

rank         busy         idle  bubble
   0      75.00ms      25.00ms   25.0%
   1      75.00ms      25.00ms   25.0%

   0 F0--------F1--------...............B0=============F2--------B1=============..........B2=============
   1 ..........F0--------B0=============F1--------B1=============F2--------B2=============...............

F forward, B backward, I input gradient, W weight gradient, with its microbatch (and before it the
stage, where a rank has several); . idle
";
    assert_eq!((finished.status, finished.output.as_str()), (0, expected));
}

#[test]
fn the_textbook_schedules_have_their_makespans() {
    let shape = "--ranks 4 --microbatches 8 --forward 1ms --backward 2ms";
    for (name, milliseconds) in [("simple", 33), ("interleaved", 33), ("zero_bubble", 27)] {
        let makespan = makespan(&format!("--schedule {name} {shape}"));
        assert_eq!(makespan, milliseconds * 1_000_000, "{name}");
    }
    let looped = format!("--schedule interleaved {shape} --stages-per-rank 2");
    assert_eq!(makespan(&looped), 57_000_000);
    let small = "--schedule interleaved --ranks 2 --microbatches 2 --stages-per-rank 2";
    assert!(run(small).output.contains(" 0F0-"));
    assert!(run(small).output.contains("3B1="));
}

#[test]
fn programs_are_read_in_both_forms_and_costs_may_differ_by_stage() {
    let costs = "--forward 10,10 --backward 20ns,20ns --latency 3";
    assert_eq!(makespan(&format!("--program good.csv {costs}")), 96);
    assert_eq!(makespan(&format!("--program good.txt {costs}")), 96);
}

#[test]
fn a_policy_runs_as_in_the_server() {
    let line = "--segments 0,1,2,3 --microbatches 8 --forward 1ms --backward 2ms";
    let direct = format!("{line} --control direct");
    assert_eq!(
        makespan(&format!("--policy zero_bubble(active=8) {direct}")),
        27_000_000
    );
    assert_eq!(
        makespan(&format!("--policy interleaved(active=4) {direct}")),
        41_000_000
    );
    assert_eq!(
        makespan(&format!("--policy interleaved(active=4) {line}")),
        46_000_000
    );
    // The textbook's makespan, as above.
    let rounds = "--segments 0,1,2,3,0,1,2,3 --microbatches 8 --control predicted";
    assert_eq!(
        makespan(&format!("--policy looped(active=8) {rounds}")),
        57_000_000
    );
}

#[test]
fn a_step_is_one_json_object() {
    let finished = run("--program good.csv --forward 10 --backward 20 --json");
    let json: serde_json::Value = serde_json::from_str(&finished.output).expect("to be JSON");
    assert_eq!(json["ranks"].as_array().map(Vec::len), Some(2));
    assert_eq!(json["ranks"][1]["busy_ns"], 60);
    assert_eq!(json["tasks"].as_array().map(Vec::len), Some(8));
    let first = serde_json::json!({
        "rank": 0, "stage": 0, "kind": "forward", "microbatch": 0, "start_ns": 0, "end_ns": 10
    });
    assert_eq!(json["tasks"][0], first);
}

#[test]
fn a_deadlock_is_a_finding_told_in_words() {
    let finished = run("--program deadlock.csv");
    let expected = "the ranks wait for each other: \
                    rank 0 stands at 0B0, which needs 1B0 of rank 1, where 1F1 comes first; \
                    rank 1 stands at 1F1, which needs 0F1 of rank 0, where 0B0 comes first\n";
    assert_eq!((finished.status, finished.output.as_str()), (1, expected));
    let json = run("--program deadlock.csv --json").output;
    let json: serde_json::Value = serde_json::from_str(&json).expect("to be JSON");
    assert_eq!(json["deadlock"][1]["action"], "1F1");
    assert_eq!(run("--program missing.csv").status, 1);
}

#[test]
fn misuse_is_told_with_the_value_and_what_is_allowed() {
    let good = "--schedule simple --ranks 2 --microbatches 2";
    for (line, complaint) in [
        ("", "--program <FILE>|--schedule <NAME>|--policy <SCHEDULE>"),
        ("--schedule simple --ranks 2", "--microbatches <NUMBER>"),
        (
            "--schedule gpipe --ranks 2 --microbatches 2",
            "allowed are `simple`, `interleaved` and `zero_bubble`",
        ),
        ("--program good.csv --ranks 3", "cannot be used with"),
        ("--program good.csv --policy simple", "cannot be used with"),
        ("--program nowhere.csv", "cannot read \"nowhere.csv\""),
        (
            "--program bad.csv",
            "\"bad.csv\": row 1 (rank 0), cell 2: \"0X0\" is no action",
        ),
        (
            &format!("{good} --forward 1,2,3"),
            "--forward has 3 times; allowed are one, or one for each of the 2 stages",
        ),
        (
            &format!("{good} --backward 1 --weight 2"),
            "--weight 2ns is more than --backward 1ns",
        ),
        (&format!("{good} --latency soon"), "\"soon\" is no time"),
        (
            "--policy simple --segments 1,0 --microbatches 2",
            "the first one has to be on rank 0",
        ),
        (
            "--schedule interleaved --ranks 2 --microbatches 5 --stages-per-rank 2",
            "multiples of 2",
        ),
    ] {
        let finished = run(line);
        assert_eq!(
            (finished.status, finished.output.as_str()),
            (2, ""),
            "{line}"
        );
        assert!(
            finished.complaint.contains(complaint),
            "{line}: {}",
            finished.complaint
        );
    }
}
