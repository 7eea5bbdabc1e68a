//! Two processes.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::super::{EndpointId, Options, Worker, WorkerEvent};

use super::{DEADLINE, TRANSPORTS, library, options, pattern, received, sent};

/// What the other process does, and over which transports.
const ROLE_VARIABLE: &str = "SHARDWRIGHT_UCX_TEST_ROLE";
const TRANSPORTS_VARIABLE: &str = "SHARDWRIGHT_UCX_TEST_TRANSPORTS";
/// Whether its endpoints report errors; both sides have to agree.
const REPORT_VARIABLE: &str = "SHARDWRIGHT_UCX_TEST_REPORT";
/// What precedes the other process's own lines, among those of the test harness.
const MARK: &str = "shardwright-ucx-test:";

/// The other process.
struct Other {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(role: &str, transports: &str, report_errors: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::processes::the_other_process"])
            .args(["--ignored", "--nocapture", "--quiet"])
            .env(ROLE_VARIABLE, role)
            .env(TRANSPORTS_VARIABLE, transports)
            .env(REPORT_VARIABLE, report_errors.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// The next line that the other process wrote itself.
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "the other process ended"
            );
            if let Some((_, own)) = line.split_once(MARK) {
                return own.trim().to_owned();
            }
        }
    }

    /// Connects a worker with the other process's.
    fn connect(&mut self, worker: &mut Worker) -> EndpointId {
        let address = from_text(&self.line());
        let own = to_text(&worker.address().unwrap());
        writeln!(self.child.stdin.as_mut().unwrap(), "{own}").unwrap();
        worker.connect(Rank(1), &address).unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn to_text(address: &[u8]) -> String {
    let bytes: Vec<String> = address.iter().map(u8::to_string).collect();
    bytes.join(" ")
}

fn from_text(line: &str) -> Vec<u8> {
    line.split_whitespace()
        .map(|byte| byte.parse().unwrap())
        .collect()
}

#[expect(
    clippy::print_stdout,
    reason = "the standard output is the way to the test"
)]
fn tell(line: &str) {
    println!("{MARK}{line}");
}

/// Advances a worker until `done` says so of its events.
fn until(
    worker: &mut Worker,
    events: &mut Vec<WorkerEvent>,
    done: impl Fn(&[WorkerEvent]) -> bool,
) {
    let start = Instant::now();
    while !done(events) {
        let busy = worker.progress().unwrap();
        events.extend(worker.take_events().unwrap());
        assert!(start.elapsed() < DEADLINE, "{events:?}");
        if !busy {
            std::thread::yield_now();
        }
    }
}

#[test]
#[ignore = "the other process of the tests below"]
fn the_other_process() {
    let text = |name| std::env::var_os(name).map(|value| value.into_string().unwrap());
    let Some(role) = text(ROLE_VARIABLE) else {
        return;
    };
    if role == "loads" {
        return load_and_compare();
    }
    let transports = text(TRANSPORTS_VARIABLE).unwrap();
    let library = library();
    let options = Options {
        report_errors: text(REPORT_VARIABLE).unwrap() == "true",
        ..options(&transports)
    };
    let mut worker = Worker::create(&library, Rank(1), &options).unwrap();
    tell(&to_text(&worker.address().unwrap()));
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    let endpoint = worker.connect(Rank(0), &from_text(&line)).unwrap();
    match role.as_str() {
        "echoes" => loop {
            let mut events = Vec::new();
            until(&mut worker, &mut events, |events| received(events) > 0);
            for event in events {
                let WorkerEvent::Received {
                    header, payload, ..
                } = event
                else {
                    continue;
                };
                if header == b"end" {
                    worker.close(DEADLINE);
                    return;
                }
                worker.send(endpoint, &header, vec![payload], 0).unwrap();
            }
        },
        "floods" => {
            let payload = pattern(0, 4 << 20);
            loop {
                for size in [100, 100_000] {
                    worker
                        .send(endpoint, b"", vec![pattern(0, size)], 0)
                        .unwrap();
                }
                worker
                    .send(endpoint, b"", vec![payload.clone()], 0)
                    .unwrap();
                let mut events = Vec::new();
                until(&mut worker, &mut events, |events| sent(events) >= 3);
            }
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn two_processes_echo_every_size() {
    let library = library();
    for transports in TRANSPORTS {
        let mut other = Other::start("echoes", transports, true);
        let mut worker = Worker::create(&library, Rank(0), &options(transports)).unwrap();
        let endpoint = other.connect(&mut worker);
        for size in [0, 1, 64, 4 << 10, 8 << 10, 64 << 10, 1 << 20, 64 << 20] {
            let payload = pattern(size, size);
            worker
                .send(endpoint, b"ping", vec![payload.clone()], 3)
                .unwrap();
            let mut events = Vec::new();
            until(&mut worker, &mut events, |events| {
                received(events) == 1 && sent(events) == 1
            });
            let header = b"ping".to_vec();
            let from = Rank(1);
            let answer = WorkerEvent::Received {
                from,
                header,
                payload,
            };
            assert!(events.contains(&answer), "{size} over {transports}");
        }
        let used = worker.transports(endpoint).unwrap().join(" ");
        let expected = transports.split(',').next().unwrap();
        assert!(used.contains(expected), "{used} over {transports}");
        worker.send(endpoint, b"end", Vec::new(), 0).unwrap();
        worker.close(DEADLINE);
        assert!(other.child.wait().unwrap().success());
    }
}

/// UCX's files in shared memory.
fn shared_files() -> Vec<String> {
    let entries = std::fs::read_dir("/dev/shm").unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("ucx")).collect()
}

#[test]
fn a_peer_that_is_killed_leaves_nothing_behind_and_delays_nobody() {
    let library = library();
    let before = shared_files();
    for transports in TRANSPORTS {
        for report_errors in [true, false] {
            let options = Options {
                report_errors,
                ..options(transports)
            };
            let mut other = Other::start("floods", transports, report_errors);
            let mut worker = Worker::create(&library, Rank(0), &options).unwrap();
            let endpoint = other.connect(&mut worker);
            let mut events = Vec::new();
            until(&mut worker, &mut events, |events| received(events) >= 10);
            let payload: Buffer = pattern(0, 8 << 20);
            for token in 0..4 {
                worker
                    .send(endpoint, b"", vec![payload.clone()], token)
                    .unwrap();
            }
            other.child.kill().unwrap();
            other.child.wait().unwrap();
            // As the liveness link does when it sees the death.
            for _ in 0..1_000 {
                worker.progress().unwrap();
                events.extend(worker.take_events().unwrap());
            }
            worker.abandon(endpoint).unwrap();
            events.extend(worker.take_events().unwrap());
            let ended = events.iter().filter(|event| {
                matches!(
                    event,
                    WorkerEvent::Sent { .. } | WorkerEvent::SendFailed { .. }
                )
            });
            assert_eq!(ended.count(), 4, "over {transports}");
            let start = Instant::now();
            for _ in 0..1_000 {
                worker.progress().unwrap();
                assert_eq!(worker.take_events().unwrap(), [], "over {transports}");
            }
            assert_eq!(worker.close(Duration::from_secs(2)), []);
            assert!(start.elapsed() < DEADLINE, "over {transports}");
        }
    }
    // Workers of tests that run meanwhile have files for a moment, until they unlink them.
    let start = Instant::now();
    while shared_files().iter().any(|name| !before.contains(name)) {
        assert!(start.elapsed() < DEADLINE, "{:?}", shared_files());
        std::thread::yield_now();
    }
}

#[test]
fn loading_takes_no_signals_and_changes_no_functions_of_libc() {
    let mut other = Other::start("loads", "", true);
    assert_eq!(other.line(), "unchanged");
    assert!(other.child.wait().unwrap().success());
}

/// In a fresh process: what a load might change, before and after.
fn load_and_compare() {
    let caught = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("SigCgt"))
            .unwrap();
        let mask = u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap();
        mask & 0x7FFF_FFFF // libc uses some above for itself
    };
    let environment = || std::env::vars_os().collect::<Vec<_>>();
    let before = (caught(), environment());
    let library = library();
    assert!(!library.found().loaded_before);
    let mut worker = Worker::create(&library, Rank(0), &options("posix,tcp,self")).unwrap();
    worker.progress().unwrap();
    assert!(before == (caught(), environment()));
    // A function that was replaced has its code written to, which makes the page a private one.
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut in_libc = false;
    let mut looked_at = 0;
    for line in maps.lines() {
        if line.contains('/') {
            in_libc = line.contains(" r-xp ") && line.contains("/libc.so");
        }
        if in_libc && line.starts_with("Private_Dirty:") {
            assert_eq!(
                line.split_whitespace().nth(1),
                Some("0"),
                "libc's code was written to"
            );
            looked_at += 1;
        }
    }
    assert!(looked_at > 0, "libc was not found");
    tell("unchanged");
}
