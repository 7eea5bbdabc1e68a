//! Jobs that do not start, and those that start although somebody is in their way.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_core::Rank;

use super::tcp::{read_to_end, start};
use super::{Recorder, TransportKind};
use crate::job::{Brought, JobOptions};
use crate::secret::Secret;
use crate::start_error::StartError;
use crate::tcp::Listener;
use crate::tcp::testing::{all_options, join, options};
use crate::transport::Transport;

fn fail(all: Vec<JobOptions>) -> Vec<StartError> {
    let threads: Vec<_> = all
        .into_iter()
        .map(|options| join(options, Arc::new(Recorder::default())))
        .collect();
    let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
    outcomes
        .map(|outcome| outcome.err().expect("the job must not start"))
        .collect()
}

#[test]
fn a_rank_that_comes_late_is_told_so() {
    let mut all = all_options(2);
    let port = all[0].place.port;
    let ranks: Vec<_> = all
        .drain(..)
        .map(|options| join(options, Arc::new(Recorder::default())))
        .collect();
    let ranks: Vec<_> = ranks
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect();
    let late = fail(vec![options(1, 2, port)]).pop().unwrap();
    assert!(late.to_string().contains("has already started"), "{late}");
    drop(ranks);
}

#[test]
fn a_rank_with_a_wrong_secret_hears_so_at_once_and_the_others_when_their_time_is_over() {
    let mut all = all_options(3);
    all[1].place.secret = Secret::new(b"another secret than theirs".to_vec()).unwrap();
    for options in &mut all {
        options.connect_timeout = Duration::from_secs(2);
    }
    let errors: Vec<String> = fail(all).iter().map(ToString::to_string).collect();
    assert!(
        errors[0].starts_with("rank 1 did not join the job within 2"),
        "{}",
        errors[0]
    );
    assert!(
        errors[0].ends_with("; a connection was dropped: it presented a wrong secret as rank 1"),
        "{}",
        errors[0]
    );
    assert_eq!(
        errors[1],
        "rank 0 did not prove the job's secret to rank 1: the two were started with different secrets"
    );
    assert_eq!(errors[2], errors[0]);
}

#[test]
fn unknown_peers_who_say_to_be_a_late_rank_do_not_end_the_start() {
    let mut all = all_options(2);
    let port = all[0].place.port;
    let late = all.pop().unwrap();
    let leader = join(all.pop().unwrap(), Arc::new(Recorder::default()));
    for version in [3, 2] {
        let mut hello = b"SHARDWRT".to_vec();
        hello.extend([version, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        hello.resize(52 + 32, 7);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(&hello).unwrap();
        assert!(!read_to_end(&stream).is_empty());
    }
    let follower = join(late, Arc::new(Recorder::default()));
    assert_eq!(
        leader
            .join()
            .unwrap()
            .unwrap()
            .stats()
            .unknown_peers_dropped,
        2
    );
    follower.join().unwrap().unwrap();
}

#[test]
fn hundreds_of_idle_and_slow_unknown_peers_at_every_listener_keep_no_job_from_starting() {
    let alone = start(all_options(4));
    let all = all_options(4);
    let port = all[0].place.port;
    let began = Instant::now();
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut held: Vec<TcpStream> = (0..600).map(|_| connect()).collect();
    let connecting = began.elapsed();
    for stream in held.iter_mut().step_by(2) {
        // Dropped already, where there were too many.
        drop(stream.write_all(b"SHARDWRT\x03\0\0\0\x01\0\0\0"));
    }
    let threads: Vec<_> = all
        .into_iter()
        .map(|options| join(options, Arc::new(Recorder::default())))
        .collect();
    // More of them while the job starts.
    held.extend((0..600).map(|_| connect()));
    let ranks: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect();
    assert!(
        began.elapsed() < Duration::from_secs(5) + (alone + connecting) * 10,
        "{:?}",
        began.elapsed()
    );
    drop((held, ranks));
}

#[test]
fn a_genuine_rank_takes_the_place_of_an_impostor() {
    let mut all = all_options(2);
    let mut impostor = options(1, 2, all[0].place.port);
    impostor.place.secret = Secret::new(b"another secret than theirs".to_vec()).unwrap();
    let genuine = all.pop().unwrap();
    let leader = join(all.pop().unwrap(), Arc::new(Recorder::default()));
    assert!(matches!(
        fail(vec![impostor])[0],
        StartError::WrongSecret { .. }
    ));
    let follower = join(genuine, Arc::new(Recorder::default()));
    assert_eq!(
        leader
            .join()
            .unwrap()
            .unwrap()
            .stats()
            .unknown_peers_dropped,
        1
    );
    follower.join().unwrap().unwrap();
}

#[test]
fn a_rank_that_encrypts_among_others_that_do_not_is_named() {
    for encrypts in [1, 2] {
        let mut all = all_options(3);
        for options in &mut all {
            options.comm.encrypt = options.rank.0 == encrypts;
        }
        for error in fail(all) {
            assert_eq!(
                error.to_string(),
                format!(
                    "rank 0 and rank {encrypts} differ in configuration: rank 0 has encrypt=false, rank {encrypts} has encrypt=true"
                )
            );
        }
    }
}

#[test]
fn ranks_that_differ_all_hear_in_what() {
    let mut all = all_options(3);
    all[2].fingerprint = "seed=2".to_owned();
    for error in fail(all) {
        assert_eq!(
            error.to_string(),
            "rank 0 and rank 2 differ in configuration: rank 0 has seed=1, rank 2 has seed=2"
        );
    }
    let mut all = all_options(2);
    all[1].version = "0.2.0".to_owned();
    for error in fail(all) {
        assert_eq!(
            error.to_string(),
            "rank 0 and rank 1 differ in library version: rank 0 has 0.1.0, rank 1 has 0.2.0"
        );
    }
    let mut all = all_options(2);
    all[1].world = 3;
    for error in fail(all) {
        assert_eq!(
            error.to_string(),
            "rank 0 and rank 1 differ in number of ranks: rank 0 has 2, rank 1 has 3"
        );
    }
}

#[test]
fn two_processes_of_one_rank_are_refused() {
    let mut all = all_options(3);
    let twin = options(1, 3, all[0].place.port);
    all.pop();
    all.push(twin);
    for error in fail(all) {
        assert!(
            error
                .to_string()
                .starts_with("two processes joined as rank 1: process "),
            "{error}"
        );
    }
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    let mut all = all_options(4);
    all.truncate(3);
    all.remove(1);
    for options in &mut all {
        options.connect_timeout = Duration::from_secs(2);
    }
    for error in fail(all) {
        assert!(
            error
                .to_string()
                .starts_with("ranks 1, 3 did not join the job within 2"),
            "{error}"
        );
    }
}

#[test]
fn nobody_at_the_rendezvous_is_an_error_with_its_address() {
    let port = Listener::bind("127.0.0.1", 0).unwrap().port();
    let mut alone = options(1, 2, port);
    alone.connect_timeout = Duration::from_millis(300);
    let error = fail(vec![alone]).pop().unwrap().to_string();
    assert!(
        error.starts_with(&format!(
            "rank 1 did not reach rank 0 at 127.0.0.1:{port} within 0.3"
        )),
        "{error}"
    );
}

#[test]
fn a_port_in_use_is_named() {
    let taken = Listener::bind("127.0.0.1", 0).unwrap();
    let error = fail(vec![options(0, 2, taken.port())])
        .pop()
        .unwrap()
        .to_string();
    let address = taken.address();
    assert_eq!(
        error,
        format!("rank 0 cannot listen on {address}: the port is in use by another process")
    );
}

#[test]
fn a_start_can_be_cancelled() {
    let mut all = all_options(2);
    let mut asked = 0;
    let receiver = Arc::new(Recorder::default());
    let outcome = crate::tcp::connect(all.remove(0), Brought::default(), receiver, &mut || {
        asked += 1;
        asked < 3
    });
    assert!(matches!(outcome.err(), Some(StartError::Cancelled)));
}

#[test]
fn peers_know_where_the_others_live() {
    let job = TransportKind::Tcp.recorded(3);
    for (transport, _) in &job {
        for rank in 0..3 {
            let peer = transport.peer(Rank(rank)).unwrap();
            assert_eq!(
                (peer.host.as_str(), peer.pid),
                (format!("host-{rank}").as_str(), std::process::id())
            );
        }
    }
}
