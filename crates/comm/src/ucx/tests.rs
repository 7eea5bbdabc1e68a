use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_ucx::testing::library;
use shardwright_ucx::{KEY_BYTES, Options, Worker};
use shardwright_wire::Limits;

use super::engine::Engine;
use crate::conformance::{Recorder, only_loss};
use crate::transport::Loss;

/// Set for the other process.
const OTHER_VARIABLE: &str = "SHARDWRIGHT_COMM_TEST_OTHER";
/// What precedes its address, among the lines of the test harness.
const MARK: &str = "shardwright-comm-test:";

fn over_shared_memory() -> Options {
    Options {
        transports: "posix,self".to_owned(),
        ..Options::default()
    }
}

#[test]
#[ignore = "the other process of the test below"]
#[expect(
    clippy::print_stdout,
    reason = "the standard output is the way to the test"
)]
fn the_other_process() {
    if std::env::var_os(OTHER_VARIABLE).is_some() {
        let mut worker = Worker::create(&library(), Rank(1), &over_shared_memory()).unwrap();
        let address = worker.address().unwrap();
        let address: Vec<String> = address.iter().map(u8::to_string).collect();
        println!("{MARK} {} end", address.join(" "));
        // Without its destructors, as one that is killed.
        std::process::exit(0);
    }
}

#[test]
fn a_peer_that_is_gone_before_one_connects_is_left_to_tcp() {
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ucx::tests::the_other_process"])
        .args(["--ignored", "--nocapture", "--quiet"])
        .env(OTHER_VARIABLE, "")
        .output()
        .unwrap();
    let output = String::from_utf8(ended.stdout).unwrap();
    let address = output.split(MARK).nth(1).unwrap().split_whitespace();
    let address = address.map_while(|byte| byte.parse().ok()).collect();
    let place = [vec![0; KEY_BYTES], address].concat();
    let addresses = BTreeMap::from([(Rank(1), place)]);
    let engine = |recorder: &Arc<Recorder>| {
        let worker = Worker::create(&library(), Rank(0), &over_shared_memory()).unwrap();
        Engine::new(worker, 2, Duration::ZERO, recorder.receiver()).unwrap()
    };

    let recorder = Arc::default();
    let knowing = engine(&recorder);
    knowing.lose(Rank(1), Loss::Left(None), None);
    knowing
        .begin(Limits::default(), Arc::default(), &addresses)
        .unwrap();
    assert!(!knowing.reaches(Rank(1)));
    assert_eq!(only_loss(&recorder.delivered(), Rank(1)), Loss::Left(None));

    // Nothing tells it from a rank to which UCX has no way: TCP says what became of it.
    let unknowing = engine(&Arc::default());
    unknowing
        .begin(Limits::default(), Arc::default(), &addresses)
        .unwrap();
    assert!(!unknowing.reaches(Rank(1)));
}
