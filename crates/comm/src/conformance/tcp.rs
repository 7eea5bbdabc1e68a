//! What only sockets can show: silence, unknown peers, and jobs that do not start.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::codec::{encode, heartbeat_frame};
use shardwright_wire::{FORMAT_VERSION, Heartbeat, Limits};

use super::{Delivered, Recorder, WATCHDOG, heavy, numbered};
use crate::error::CommError;
use crate::job::JobOptions;
use crate::tcp::Tcp;
use crate::tcp::testing::{Frozen, all_options, join, join_frozen};
use crate::transport::{Loss, Transport};

/// A rank, and another one that does nothing by itself.
fn beside_a_frozen_rank(mut all: Vec<JobOptions>, recorder: &Arc<Recorder>) -> (Arc<Tcp>, Frozen) {
    let frozen = join_frozen(all.pop().expect("two ranks"));
    let rank = join(all.pop().expect("two ranks"), Arc::clone(recorder) as _);
    let rank = rank.join().unwrap().unwrap();
    (rank, frozen.join().unwrap().unwrap())
}

#[test]
fn a_frozen_peer_is_noticed_although_it_takes_nothing() {
    let recorder = Arc::new(Recorder::default());
    let mut all = all_options(2);
    all[0].liveness_timeout = Duration::from_secs(1);
    let (rank, frozen) = beside_a_frozen_rank(all, &recorder);
    let began = Instant::now();
    // More than the socket takes; on a busy machine the loss may come before the last of them.
    for _ in 0..64 {
        match rank.send(Rank(1), heavy(1 << 20, 0)) {
            Ok(()) | Err(CommError::PeerLost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(recorder.wait_loss(Rank(1)), Loss::Silent { seconds: 1 });
    rank.close(None);
    assert!(began.elapsed() < WATCHDOG);
    drop(frozen);
}

#[test]
fn a_frame_that_trickles_is_silence() {
    let recorder = Arc::new(Recorder::default());
    let mut all = all_options(2);
    all[0].liveness_timeout = Duration::from_secs(1);
    let (rank, frozen) = beside_a_frozen_rank(all, &recorder);
    let mut head = encode(&heavy(1 << 20, 0), &Limits::default()).unwrap().head;
    head.resize(head.len() + 4096, 0);
    // Within the timeout each time, and never enough.
    for bytes in head.chunks(head.len() / 20) {
        frozen.inject(Rank(0), bytes);
        std::thread::sleep(Duration::from_millis(200));
        if recorder
            .delivered()
            .iter()
            .any(|delivered| matches!(delivered, Delivered::Lost(..)))
        {
            break;
        }
    }
    assert_eq!(recorder.wait_loss(Rank(1)), Loss::Silent { seconds: 1 });
    rank.close(None);
}

#[test]
fn a_rank_that_sends_nonsense_is_lost_with_the_reason() {
    let mut oversized = heartbeat_frame(Heartbeat::default()).head;
    oversized[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut newer = heartbeat_frame(Heartbeat::default()).head;
    newer[4] = FORMAT_VERSION.to_le_bytes()[0] + 1;
    let version = format!(
        "format version {} where this library reads version {FORMAT_VERSION}",
        FORMAT_VERSION + 1
    );
    let nonsense = [
        (
            oversized,
            "18446744073709551615 bytes of control, at most 268435456 are allowed",
        ),
        (newer, version.as_str()),
        (
            vec![b'x'; 64],
            "not a shardwright frame: it begins with [78, 78, 78, 78]",
        ),
    ];
    for (bytes, expected) in nonsense {
        let recorder = Arc::new(Recorder::default());
        let mut all = all_options(2);
        let frozen = join_frozen(all.pop().unwrap());
        let rank = join(all.pop().unwrap(), Arc::clone(&recorder) as _)
            .join()
            .unwrap()
            .unwrap();
        frozen.join().unwrap().unwrap().write(Rank(0), &bytes);
        let reason = expected.to_owned();
        assert_eq!(recorder.wait_loss(Rank(1)), Loss::Broken { reason });
        rank.close(None);
    }
}

#[test]
fn bytes_from_between_two_ranks_that_encrypt_end_their_connection_with_the_reason() {
    let recorder = Arc::new(Recorder::default());
    let mut all = all_options(2);
    for options in &mut all {
        options.comm.encrypt = true;
    }
    let (rank, frozen) = beside_a_frozen_rank(all, &recorder);
    frozen.inject(Rank(0), &[40, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    frozen.inject(Rank(0), &[9; 32]);
    let reason = "bytes that the rank did not seal for this connection".to_owned();
    assert_eq!(recorder.wait_loss(Rank(1)), Loss::Broken { reason });
    rank.close(None);
}

#[test]
#[ignore = "a measurement: cargo test --release -p shardwright-comm -- --ignored --nocapture encryption_costs"]
fn encryption_costs() {
    for kind in [super::TransportKind::Tcp, super::TransportKind::Encrypted] {
        let job = kind.recorded(2);
        let began = Instant::now();
        for _ in 0..64 {
            job[0].0.send(Rank(1), heavy(16 << 20, 1)).unwrap();
            job[1].1.wait_messages(1);
            job[1].1.clear();
        }
        let rate = 64.0 * 16.0 / 1024.0 / began.elapsed().as_secs_f64();
        let name = if matches!(kind, super::TransportKind::Tcp) {
            "plain"
        } else {
            "encrypted"
        };
        assert!(rate > 0.0, "{name}: {rate:.2} GiB/s");
        std::io::Write::write_all(
            &mut std::io::stderr(),
            format!("{name}: {rate:.2} GiB/s\n").as_bytes(),
        )
        .unwrap();
    }
}

#[test]
fn a_tensor_that_no_memory_holds_ends_its_sender_only() {
    const SIZE: u64 = 12_345;
    let limits = Limits {
        tensor_bytes: u64::MAX >> 8,
        ..Limits::default()
    };
    let frame = encode(&heavy(SIZE as usize, 0), &limits).unwrap();
    // Every mention of the size becomes one beyond any address space.
    let mut head = frame.head;
    for at in 0..head.len() - 7 {
        if head[at..at + 8] == SIZE.to_le_bytes() {
            head[at..at + 8].copy_from_slice(&(1_u64 << 55).to_le_bytes());
        }
    }
    let recorder = Arc::new(Recorder::default());
    let mut all = all_options(2);
    all[0].limits = limits;
    let frozen = join_frozen(all.pop().unwrap());
    let rank = join(all.pop().unwrap(), Arc::clone(&recorder) as _)
        .join()
        .unwrap()
        .unwrap();
    frozen.join().unwrap().unwrap().write(Rank(0), &head);
    let reason = "there is no memory for a tensor of 36028797018963968 bytes".to_owned();
    assert_eq!(recorder.wait_loss(Rank(1)), Loss::Broken { reason });
    rank.close(None);
}

#[test]
fn an_idle_job_is_not_silent() {
    // On a machine that has much else to do, a heartbeat may itself come later than the shortest of these.
    let timeouts = [400, 4_000, 40_000].map(Duration::from_millis);
    assert!(timeouts.into_iter().any(idles_for_five_timeouts));
}

/// Whether two ranks that send nothing hear each other for five times the timeout, and then what is sent.
fn idles_for_five_timeouts(liveness_timeout: Duration) -> bool {
    let recorders: Vec<Arc<Recorder>> = (0..2).map(|_| Arc::default()).collect();
    let threads: Vec<_> = all_options(2)
        .into_iter()
        .zip(&recorders)
        .map(|(mut options, recorder)| {
            options.liveness_timeout = liveness_timeout;
            join(options, Arc::clone(recorder) as _)
        })
        .collect();
    let ranks: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect();
    let is_lost = |event: &Delivered| matches!(event, Delivered::Lost(..));
    for recorder in &recorders {
        // Twenty heartbeats take five times the timeout.
        let delivered = recorder.wait("heartbeats", |delivered| {
            delivered.len() >= 20 || delivered.iter().any(is_lost)
        });
        if delivered.iter().any(is_lost) {
            return false;
        }
        assert!(
            delivered
                .iter()
                .all(|event| matches!(event, Delivered::Heartbeat(..))),
            "{delivered:?}"
        );
    }
    ranks[0].send(Rank(1), numbered(3)).unwrap();
    assert_eq!(recorders[1].wait_messages(1), vec![(Rank(0), numbered(3))]);
    true
}

/// Everything until the other side hangs up.
pub(super) fn read_to_end(mut stream: &TcpStream) -> Vec<u8> {
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "the unknown peer was kept"
        ),
    }
    bytes
}

#[test]
fn unknown_peers_are_dropped_and_counted_and_the_job_goes_on() {
    let mut all = all_options(2);
    let port = all[0].place.port;
    let recorder = Arc::new(Recorder::default());
    let other = all.pop().unwrap();
    let leader = join(all.pop().unwrap(), Arc::clone(&recorder) as _);
    let unknown_peer = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(bytes).unwrap();
        read_to_end(&stream)
    };
    // Before the job is complete ...
    assert!(unknown_peer(b"GET / HTTP/1.1\r\nHost: shardwright\r\n\r\n").is_empty());
    assert!(unknown_peer(&[0xff; 4096]).is_empty());
    let follower = join(other, Arc::new(Recorder::default()));
    let leader = leader.join().unwrap().unwrap();
    let follower = follower.join().unwrap().unwrap();
    // ... and while it runs.
    assert!(unknown_peer(&vec![0; 1 << 16]).is_empty());
    let mut hello = b"SHARDWRT\x03\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00".to_vec();
    hello.resize(52 + 32, 7);
    let answer = unknown_peer(&hello);
    assert_eq!(answer.len(), 48 + 33, "a challenge and a refusal");
    follower.send(Rank(0), numbered(1)).unwrap();
    assert_eq!(recorder.wait_messages(1), vec![(Rank(1), numbered(1))]);
    assert_eq!(leader.stats().unknown_peers_dropped, 4);
}

#[test]
fn a_silent_unknown_peer_keeps_nobody_out() {
    let alone = start(all_options(3));
    let all = all_options(3);
    let silent: Vec<TcpStream> = (0..8)
        .map(|_| TcpStream::connect(("127.0.0.1", all[0].place.port)).unwrap())
        .collect();
    // None of them is waited for until its time is over.
    assert!(start(all) < Duration::from_secs(9) + alone * 10);
    drop(silent);
}

/// How long a job takes to start.
pub(super) fn start(all: Vec<JobOptions>) -> Duration {
    let began = Instant::now();
    let threads: Vec<_> = all
        .into_iter()
        .map(|options| join(options, Arc::new(Recorder::default())))
        .collect();
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
    began.elapsed()
}
