//! Tests of UCX itself.

mod library;
mod pairs;
mod processes;
mod sleeping;

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::testing::library;
use super::{EndpointId, Library, Options, Worker, WorkerEvent};

/// Far above what any of the tests takes.
const DEADLINE: Duration = Duration::from_mins(5);

/// Choices of transports that every machine has.
const TRANSPORTS: [&str; 3] = ["posix,self", "posix,tcp,self", "tcp,self"];

fn options(transports: &str) -> Options {
    Options {
        transports: transports.to_owned(),
        ..Options::default()
    }
}

/// Bytes that differ from place to place and from message to message.
fn pattern(seed: usize, length: usize) -> Buffer {
    let byte = |place: usize| (place.wrapping_mul(31) ^ (place >> 8) ^ seed.wrapping_mul(97)) as u8;
    Buffer::copy_of(&(0..length).map(byte).collect::<Vec<_>>())
}

fn thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let named = std::thread::Builder::new().name("test-ucx".to_owned());
    named.spawn(work).unwrap()
}

/// Two workers of one process, connected both ways.
struct Pair {
    workers: [Worker; 2],
    endpoints: [EndpointId; 2],
    events: [Vec<WorkerEvent>; 2],
}

impl Pair {
    fn connected(library: &Library, options: &Options) -> Self {
        let mut workers = [0, 1].map(|rank| Worker::create(library, Rank(rank), options).unwrap());
        let addresses = workers.each_mut().map(|worker| worker.address().unwrap());
        let endpoints = [
            workers[0].connect(Rank(1), &addresses[1]).unwrap(),
            workers[1].connect(Rank(0), &addresses[0]).unwrap(),
        ];
        let events = [Vec::new(), Vec::new()];
        Self {
            workers,
            endpoints,
            events,
        }
    }

    fn send(&mut self, from: usize, header: &[u8], payload: Vec<Buffer>, token: u64) {
        let endpoint = self.endpoints[from];
        self.workers[from]
            .send(endpoint, header, payload, token)
            .unwrap();
    }

    /// Advances both sides a little, without looking at their events.
    fn progress(&mut self) {
        for worker in &mut self.workers {
            worker.progress().unwrap();
        }
    }

    /// Advances both sides until `done` says so of their events.
    fn until(&mut self, mut done: impl FnMut(&[Vec<WorkerEvent>; 2]) -> bool) {
        let start = Instant::now();
        while !done(&self.events) {
            let mut idle = true;
            for (worker, events) in self.workers.iter_mut().zip(&mut self.events) {
                idle &= !worker.progress().unwrap();
                events.extend(worker.take_events().unwrap());
            }
            assert!(start.elapsed() < DEADLINE, "{:?}", self.events);
            if idle {
                std::thread::yield_now();
            }
        }
    }
}

fn received(events: &[WorkerEvent]) -> usize {
    let received = |event: &&WorkerEvent| matches!(event, WorkerEvent::Received { .. });
    events.iter().filter(received).count()
}

fn sent(events: &[WorkerEvent]) -> usize {
    events
        .iter()
        .filter(|event| matches!(event, WorkerEvent::Sent { .. }))
        .count()
}
