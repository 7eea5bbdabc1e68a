//! Who reads what UCX brings, over workers and descriptors of the checks ([`super::worker`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Duration;

use shardwright_core::{MicrobatchId, Rank, StepEpoch};
use shardwright_ucx::{Network, Worker};
use shardwright_wire::codec::encode;
use shardwright_wire::{ErrorReport, ForwardOver, Heartbeat, Limits, Message, Value};

use super::engine::{Engine, Reading};
use crate::concurrency::object;
use crate::deadline::Deadline;
use crate::error::CommError;
use crate::exchange::Exchange;
use crate::router::Router;
use crate::transport::{
    CommStats, HeartbeatState, Loss, Observation, PeerInfo, Receiver, Transport,
};
use shardwright_system::sync::thread::ThreadId;
use shardwright_system::sync::{Condvar, Mutex, explore, on_threads, thread, with};

const HERE: Rank = Rank(0);
const THERE: Rank = Rank(1);
/// No check waits so long.
const EVER: Duration = Duration::from_hours(1);

/// Keeps what comes, and wakes the thread that reads until it has come, as the server and the object plane do.
#[derive(Default)]
struct Heard {
    steps: Mutex<Vec<u64>>,
    changed: Condvar,
    reads: Mutex<Option<ThreadId>>,
    engine: OnceLock<Weak<Engine>>,
}

impl Heard {
    fn count(&self) -> usize {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.len()
    }

    fn wait_for(&self, count: usize) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        while steps.len() < count {
            steps = self.changed.wait(steps).unwrap();
        }
    }
}

impl Receiver for Heard {
    fn deliver(&self, _: Rank, message: Message) {
        let Message::ForwardOver(over) = message else {
            panic!("{message:?}");
        };
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.push(over.step.0);
        drop(steps);
        self.changed.notify_all();
        let reads = *self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        if reads.is_some_and(|reads| reads != thread::current().id())
            && let Some(engine) = self.engine.get().and_then(Weak::upgrade)
        {
            engine.wake_reader();
        }
    }

    fn peer_lost(&self, _: Rank, _: Loss) {}

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

/// The engines of two ranks.
struct Pair {
    here: Arc<Engine>,
    there: Arc<Engine>,
}

impl Pair {
    fn hearing(heard: &Arc<Heard>) -> Arc<Self> {
        let pair = Self::new(Arc::<Heard>::clone(heard));
        heard.engine.get_or_init(|| Arc::downgrade(&pair.here));
        pair
    }

    fn new(receiver: Arc<dyn Receiver>) -> Arc<Self> {
        let network = Arc::new(Network::default());
        let engine = |rank, receiver| {
            let worker = Worker::join(&network, rank);
            Arc::new(Engine::new(worker, 2, Duration::ZERO, receiver).unwrap())
        };
        let pair = Self {
            here: engine(HERE, receiver),
            there: engine(THERE, Arc::new(Heard::default())),
        };
        let begin = |engine: &Engine, peer, of: &Engine| {
            let addresses = BTreeMap::from([(peer, of.place().unwrap())]);
            let exchange = Arc::new(Exchange::default());
            engine
                .begin(Limits::default(), exchange, &addresses)
                .unwrap();
        };
        begin(&pair.here, THERE, &pair.there);
        begin(&pair.there, HERE, &pair.here);
        Arc::new(pair)
    }

    fn send_here(&self, message: &Message) {
        let frame = encode(message, &Limits::default()).unwrap();
        self.there.send(HERE, frame, Reading::Elsewhere).unwrap();
    }

    fn send_there(&self, reading: Reading) {
        let frame = encode(&step(0), &Limits::default()).unwrap();
        self.here.send(THERE, frame, reading).unwrap();
    }
}

fn step(number: u64) -> Message {
    Message::ForwardOver(ForwardOver {
        step: StepEpoch(number),
        microbatch: MicrobatchId(0),
    })
}

/// Runs threads beside the library's own reading thread, waits for the last message, and ends that thread.
fn beside_reader(
    pair: &Arc<Pair>,
    heard: &Heard,
    count: usize,
    each: impl IntoIterator<Item = Box<dyn FnOnce() + Send>>,
) {
    let reading = Arc::clone(&pair.here);
    let reader = thread::spawn(move || reading.read_all());
    on_threads(each);
    heard.wait_for(count);
    pair.here.stop();
    reader.join().unwrap();
}

/// Waits as a worker or a receiver of objects does: reads, or sleeps where another reads.
fn wait_reading(pair: &Pair, heard: &Heard, count: usize) {
    let mut look = || {
        if heard.count() >= count {
            Observation::Done
        } else {
            Observation::Idle
        }
    };
    let reads = |thread| *heard.reads.lock().unwrap_or_else(PoisonError::into_inner) = thread;
    reads(Some(thread::current().id()));
    if !pair.here.read_until(EVER, &mut look) {
        heard.wait_for(count);
    }
    reads(None);
    assert!(heard.count() >= count);
}

#[test]
fn a_message_is_read_whoever_waits_and_after_nobody_does() {
    explore(9_000, || {
        let heard = Arc::new(Heard::default());
        let pair = Pair::hearing(&heard);
        let waiting = {
            let heard = Arc::clone(&heard);
            with(&pair, move |pair| wait_reading(pair, &heard, 1))
        };
        let sending = with(&pair, |pair| {
            for number in 0..3 {
                pair.send_here(&step(number));
            }
        });
        // The waiting thread leaves after one message; the reading thread is to have the others.
        beside_reader(&pair, &heard, 3, [waiting, sending]);
        assert_eq!(*heard.steps.lock().unwrap(), [0, 1, 2], "CM-2");
    });
}

#[test]
fn what_a_sending_thread_finds_reaches_those_who_wait() {
    for reading in [Reading::Here, Reading::Elsewhere] {
        let check = match reading {
            Reading::Here => || senders_and_waiters(Reading::Here),
            Reading::Elsewhere => || senders_and_waiters(Reading::Elsewhere),
        };
        explore(6_000, check);
    }
}

fn senders_and_waiters(reading: Reading) {
    let heard = Arc::new(Heard::default());
    let pair = Pair::hearing(&heard);
    let waiting = {
        let heard = Arc::clone(&heard);
        with(&pair, move |pair| wait_reading(pair, &heard, 1))
    };
    let arriving = with(&pair, |pair| {
        for number in 0..2 {
            pair.send_here(&step(number));
        }
    });
    let leaving = with(&pair, move |pair| {
        for _ in 0..2 {
            pair.send_there(reading);
        }
    });
    beside_reader(&pair, &heard, 2, [waiting, arriving, leaving]);
    assert_eq!(*heard.steps.lock().unwrap(), [0, 1], "CM-2");
}

/// A node's transport, as far as a receiver of objects uses it.
struct Reads(Arc<Engine>, Arc<HeartbeatState>);

impl Transport for Reads {
    fn rank(&self) -> Rank {
        HERE
    }

    fn world(&self) -> u32 {
        2
    }

    fn send(&self, _: Rank, _: Message) -> Result<(), CommError> {
        Err(CommError::Closed)
    }

    fn peer(&self, _: Rank) -> Option<&PeerInfo> {
        None
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        &self.1
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        self.0.read_until(slice.max(EVER), look)
    }

    fn wake_reader(&self) {
        self.0.wake_reader();
    }

    fn close(&self, _: Option<ErrorReport>) {}

    fn reached_by(&self, _: Rank) -> Cow<'static, str> {
        "a check".into()
    }

    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

fn receive(router: &Router, transport: &dyn Transport) -> Result<Value, CommError> {
    let mut go_on = || true;
    let mut deadline = Deadline::new(None, &mut go_on).reading(transport);
    let got = router.objects().receive(THERE, "a", &mut deadline)?;
    Ok(got.value)
}

/// A rank whose main thread waits for an object while a worker sends; `end` is what another thread does.
fn receiver_of_objects(
    sends_object: bool,
    end: impl FnOnce(&Router) + Send + 'static,
    expected: impl FnOnce(Result<Value, CommError>) + Send + 'static,
) {
    let router = Arc::new(Router::default());
    let pair = Pair::new(Arc::<Router>::clone(&router));
    let transport: Arc<dyn Transport> = Arc::new(Reads(Arc::clone(&pair.here), Arc::default()));
    router.connect(&transport);
    let reading = Arc::clone(&pair.here);
    let reader = thread::spawn(move || reading.read_all());
    let receiving = {
        let router = Arc::clone(&router);
        let transport = Arc::clone(&transport);
        Box::new(move || expected(receive(&router, &*transport))) as Box<dyn FnOnce() + Send>
    };
    let arriving = with(&pair, move |pair| {
        if sends_object {
            pair.send_here(&Message::Object(Box::new(object("a", 7))));
        }
    });
    let leaving = with(&pair, |pair| pair.send_there(Reading::Here));
    let ending = with(&router, end);
    on_threads([receiving, arriving, leaving, ending]);
    pair.here.stop();
    reader.join().unwrap();
}

#[test]
fn a_receiver_that_reads_is_woken_by_its_object_whoever_delivers_it() {
    explore(9_000, || {
        receiver_of_objects(true, |_| {}, |got| assert_eq!(got.unwrap(), Value::Int(7)));
    });
}

#[test]
fn a_receiver_that_reads_hears_of_the_end_whatever_it_is() {
    explore(9_000, || {
        for end in [
            (|router| router.objects().close()) as fn(&Router),
            |router| router.peer_lost(THERE, Loss::Died),
        ] {
            receiver_of_objects(false, end, |got| {
                got.unwrap_err();
            });
        }
    });
}
