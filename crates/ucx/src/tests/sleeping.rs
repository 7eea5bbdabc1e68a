//! Sleeping on the event descriptor.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::super::{Armed, Worker, WorkerEvent};
use super::{DEADLINE, Pair, TRANSPORTS, library, options, pattern, thread};

/// Sleeps until there are events, as a waiting thread does.
fn next_events(worker: &mut Worker) -> Vec<WorkerEvent> {
    let handle = worker.event_handle().unwrap();
    loop {
        while worker.progress().unwrap() {}
        let events = worker.take_events().unwrap();
        if !events.is_empty() {
            return events;
        }
        if worker.arm().unwrap() == Armed::Ready {
            assert!(handle.wait(DEADLINE).unwrap(), "nothing woke the sleeper");
        }
    }
}

#[test]
fn a_sleeper_is_woken_by_every_message() {
    let library = library();
    for transports in TRANSPORTS {
        let pair = Pair::connected(&library, &options(transports));
        let [mut one, mut other] = pair.workers;
        let [to_other, to_one] = pair.endpoints;
        let echoing = thread(move || {
            let mut answered = 0;
            while answered < 100 {
                for event in next_events(&mut other) {
                    if let WorkerEvent::Received { payload, .. } = event {
                        other.send(to_one, b"", vec![payload], 0).unwrap();
                        answered += 1;
                    }
                }
            }
            other.close(DEADLINE);
        });
        for number in 0..100 {
            let payload = pattern(number, if number % 10 == 0 { 2_000_000 } else { 100 });
            one.send(to_other, b"", vec![payload.clone()], 0).unwrap();
            let mut answered = false;
            while !answered {
                for event in next_events(&mut one) {
                    if let WorkerEvent::Received {
                        payload: answer, ..
                    } = event
                    {
                        assert!(answer == payload);
                        answered = true;
                    }
                }
            }
        }
        one.close(DEADLINE);
        echoing.join().unwrap();
    }
}

#[test]
fn a_signal_of_another_thread_wakes_a_sleeper() {
    let library = library();
    let mut pair = Pair::connected(&library, &options("posix,self"));
    let worker = &mut pair.workers[0];
    let handle = worker.event_handle().unwrap();
    let (armed, is_armed) = mpsc::channel();
    let signalling = thread({
        let handle = handle.clone();
        move || {
            for () in is_armed {
                handle.signal();
            }
        }
    });
    for _ in 0..100 {
        while worker.progress().unwrap() || worker.arm().unwrap() == Armed::Busy {}
        armed.send(()).unwrap();
        assert!(handle.wait(DEADLINE).unwrap());
    }
    drop(armed);
    signalling.join().unwrap();
    while worker.progress().unwrap() || worker.arm().unwrap() == Armed::Busy {}
    let start = Instant::now();
    assert!(
        !handle.wait(Duration::from_millis(50)).unwrap(),
        "nobody signalled"
    );
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[test]
fn an_idle_worker_uses_no_processor_time() {
    let library = library();
    for transports in TRANSPORTS {
        let mut pair = Pair::connected(&library, &options(transports));
        pair.send(0, b"", vec![pattern(0, 10)], 0);
        pair.until(|[_, receiver]| !receiver.is_empty());
        let worker = &mut pair.workers[1];
        let handle = worker.event_handle().unwrap();
        while worker.progress().unwrap() || worker.arm().unwrap() == Armed::Busy {}
        let mut wakes = 0;
        let start = Instant::now();
        while let Some(left) = Duration::from_millis(300).checked_sub(start.elapsed()) {
            if handle.wait(left).unwrap() {
                wakes += 1;
                while worker.progress().unwrap() || worker.arm().unwrap() == Armed::Busy {}
            }
        }
        assert!(wakes < 20, "woken {wakes} times over {transports}");
    }
}
