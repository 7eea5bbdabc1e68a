//! A process of its own, so that its threads and sockets can be counted.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use shardwright_comm::TransportChoice;
use shardwright_comm::{CommOptions, JobOptions, Joining, Node, Rendezvous, Secret};
use shardwright_core::Rank;
use shardwright_wire::Limits;

fn job(world: u32) -> Vec<Node> {
    let (host, secret) = (
        "127.0.0.1".to_owned(),
        Secret::new(b"the secret of the test".to_vec()).unwrap(),
    );
    let listening = Rendezvous::listen(host.clone(), secret.clone()).unwrap();
    let port = listening.port();
    let mut listening = Some(listening);
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let options = JobOptions {
                rank: Rank(rank),
                world,
                place: listening
                    .take()
                    .unwrap_or_else(|| Rendezvous::at(host.clone(), port, secret.clone())),
                bind_address: None,
                host_name: "host".to_owned(),
                version: "1".to_owned(),
                fingerprint: String::new(),
                connect_timeout: Duration::from_secs(30),
                liveness_timeout: Duration::from_secs(30),
                limits: Limits::default(),
                comm: CommOptions {
                    transport: TransportChoice::Tcp,
                    ..CommOptions::default()
                },
                buffer_bytes: 0,
                ucx: true,
                lacks: None,
            };
            let thread = std::thread::Builder::new();
            thread
                .spawn(move || Joining::prepare(options)?.join(&mut || true))
                .unwrap()
        })
        .collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect()
}

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}"))
        .unwrap()
        .count()
}

#[test]
fn a_closed_job_leaves_no_thread_and_no_socket() {
    let before = (count("task"), count("fd"));
    for _ in 0..3 {
        let ranks = job(4);
        assert!(count("task") >= before.0 + 4 * 7);
        let closing: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                std::thread::Builder::new()
                    .spawn(move || rank.close(None))
                    .unwrap()
            })
            .collect();
        for thread in closing {
            thread.join().unwrap();
        }
        assert_eq!((count("task"), count("fd")), before);
    }
}
