//! Orders that a user gives: lists, a rank's part of a program, and what a configuration asks for.

use shardwright_core::{Config, MicrobatchId, PipelineRank};

use crate::{
    Part, Program, Progress, RankOrder, Ready, ReadyKind, Schedule, StagePart, configured,
};

fn ready(kind: ReadyKind, microbatch: u32) -> Ready {
    Ready {
        kind,
        microbatch: MicrobatchId(microbatch),
        arrival: 1,
        visit: 0,
    }
}

#[test]
fn every_schedule_reads_back_as_itself() {
    for text in [
        "simple",
        "interleaved(active=3)",
        "looped(active=3)",
        "zero_bubble(active=1)",
        "list(0F 1F 1B 0B)",
        "shardwright program 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0\n",
    ] {
        let schedule: Schedule = text.parse().expect(text);
        assert_eq!(schedule.to_string(), text);
    }
}

#[test]
fn a_list_with_a_mistake_is_refused() {
    let refused = |text: &str| text.parse::<Schedule>().expect_err(text).to_string();
    assert!(refused("list(0F 0X)").contains("entry 1 of the list is \"0X\""));
    assert!(refused("list(0F 0B").contains("is no list"));
    assert!(refused("list(0F F)").contains("entry 1 of the list is \"F\""));
    assert!(refused("list(0B 0F)").contains("a backward only behind"));
    assert!(refused("list()").contains("without [0, \"forward\"]"));
    assert!(refused("list(0F 1F 0B)").contains("without [1, \"backward\"]"));
}

#[test]
fn a_list_lets_the_root_start_its_next_entry_only_and_leaves_the_rest_alone() {
    let schedule: Schedule = "list(1F 0F 1B 0B)".parse().expect("a list");
    let choose = |items: &[Ready], listed| {
        let progress = Progress {
            listed,
            ..Progress::default()
        };
        schedule.choose(items, &progress)
    };
    let starts = [
        ready(ReadyKind::RootForward, 0),
        ready(ReadyKind::RootForward, 1),
    ];
    assert_eq!(choose(&starts, 0), Some(1));
    assert_eq!(choose(&starts[..1], 0), None);
    let backward = [ready(ReadyKind::RootBackward, 0)];
    assert_eq!(choose(&backward, 2), None);
    assert_eq!(choose(&backward, 3), Some(0));
    // A second backward of a step function is behind the list.
    assert_eq!(choose(&backward, 4), Some(0));
    assert_eq!(choose(&[ready(ReadyKind::RequestForward, 0)], 0), Some(0));
}

#[test]
fn a_rank_knows_its_own_stages_and_how_many_calls_come_before_them() {
    let text = "0F0,3F0,3B0,0B0\n1F0,4F0,4I0,1I0,1W0,4W0\n2F0,5F0,5B0,2B0\n";
    let program = Program::from_csv(text).expect("a program");
    let root = RankOrder::new(&program, PipelineRank(0));
    assert_eq!((root.num_stages(), root.num_actions()), (2, 4));
    let before = [0, 1, 2].map(|stage| root.calls_before(stage));
    assert_eq!(before, [Some(0), Some(2), None]);
    let stages = [0, 1, 2].map(|calls| root.stage_after(calls));
    assert_eq!(stages, [Some(0), None, Some(1)]);
    // Where any backward is split, a whole one is its parts in a row.
    let parts = root.units().iter().map(|unit| (unit.stage, unit.part));
    let parts: Vec<_> = parts.collect();
    let whole = |stage| [(stage, Part::Backward), (stage, Part::WeightGradient)];
    assert_eq!(parts[2..], [whole(1), whole(0)].concat());
    let unit = StagePart {
        stage: 0,
        part: Part::WeightGradient,
        microbatch: MicrobatchId(0),
    };
    let place = root.place(unit).expect("it is in the program");
    let (action, number) = root.action(place).expect("it is in the program");
    assert_eq!((action.to_string().as_str(), number), ("0B0", 4));
}

fn asked(more: &str) -> Result<String, String> {
    let text = format!("{{\"partitions\": 2, \"microbatches\": 2{more}}}");
    let config = Config::parse(&text).expect("it has the form");
    configured(&config)
        .map(|schedule| schedule.to_string())
        .map_err(|error| error.to_string())
}

fn refused(ranks: &str, more: &str) -> String {
    let program = format!("shardwright program 1\n{ranks}");
    asked(&format!("{more}, \"pipeline\": {program:?}")).expect_err("to be refused")
}

#[test]
fn a_configuration_says_which_schedule() {
    let interleaved = || Ok("interleaved(active=4)".to_owned());
    assert_eq!(asked(""), interleaved());
    assert_eq!(asked(", \"pipeline\": \"auto\""), interleaved());
    assert_eq!(
        asked(", \"pipeline\": \"looped\", \"active_microbatches\": 3"),
        Ok("looped(active=3)".to_owned())
    );
    let good = "shardwright program 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n";
    assert_eq!(
        asked(&format!(", \"pipeline\": {good:?}")),
        Ok(good.to_owned())
    );
}

#[test]
fn a_program_that_cannot_be_run_or_does_not_fit_the_job_is_refused_by_name() {
    let circle = refused("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n", "");
    assert!(circle.contains("the ranks wait for each other"), "{circle}");
    let idle = refused("rank 0: 0F0 0F1 0B0 0B1\nrank 1:\n", "");
    assert!(idle.contains("rank 1 has no actions"), "{idle}");
    let in_flight = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n";
    let narrow = refused(in_flight, ", \"active_microbatches\": 1");
    assert!(narrow.contains("allowed: 2 or more"), "{narrow}");
    let short = refused("rank 0: 0F0 0B0\nrank 1: 1F0 1B0\n", "");
    assert!(
        short.contains("it has 1 microbatches; allowed: 2"),
        "{short}"
    );
    let few = refused("rank 0: 0F0 0F1 0B0 0B1\n", "");
    assert!(few.contains("it has 1 ranks; allowed: 2"), "{few}");
    let turned = refused("rank 0: 1F0 1F1 1B0 1B1\nrank 1: 0F0 0F1 0B0 0B1\n", "");
    assert!(
        turned.contains("stage 0 is on rank 1; allowed: rank 0"),
        "{turned}"
    );
}
