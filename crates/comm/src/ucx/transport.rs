//! A job whose messages go through UCX, beside the TCP connections over which it was set up.
//!
//! TCP keeps what it does best: the rendezvous, the job's secret, liveness and goodbyes. A pair
//! of ranks uses UCX when both have it; other pairs send through TCP.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Beat, Body, ErrorReport, Message, ObjectMessage, Value};

use super::engine::{Engine, Reading};
use super::error::UcxError;
use super::worker::Worker;
use crate::buffers::Exchange;
use crate::error::CommError;
use crate::owner::Owner;
use crate::start_error::StartError;
use crate::tcp::{CLOSE_DEADLINE, JobOptions, Tcp, connect};
use crate::transport::{CommStats, Loss, PeerInfo, Pulse, Receiver, Sight, Transport};

/// On this channel a rank that leaves says how many messages it sent through UCX.
const FAREWELL: &str = "\0ucx farewell";

/// A rank's connections to all others, through UCX where both ends have it.
pub struct Ucx {
    tcp: Arc<Tcp>,
    engine: Arc<Engine>,
    thread: Mutex<Option<JoinHandle<()>>>,
    owner: Owner,
}

/// What TCP tells, on its way to the receiver.
struct Relay {
    receiver: Arc<dyn Receiver>,
    engine: Arc<Engine>,
    announced: Mutex<BTreeMap<Rank, u64>>,
}

/// Joins the job, with a worker of UCX for its messages; see [`connect`].
///
/// A waiting thread looks for messages without sleeping for `spin`.
pub fn connect_ucx(
    mut options: JobOptions,
    worker: Worker,
    spin: Duration,
    receiver: Arc<dyn Receiver>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Arc<Ucx>, StartError> {
    let limits = options.limits;
    let engine = Engine::new(worker, options.world, spin, Arc::clone(&receiver))
        .map_err(|error| system(&error))?;
    let engine = Arc::new(engine);
    options.ucx_address = engine.place().map_err(|error| system(&error))?;
    let relay = Arc::new(Relay {
        receiver,
        engine: Arc::clone(&engine),
        announced: Mutex::default(),
    });
    let tcp = connect(options, relay, go_on)?;
    engine
        .begin(limits, tcp.exchange(), tcp.ucx_addresses())
        .map_err(|error| system(&error))?;
    let reached = (0..tcp.world())
        .map(Rank)
        .filter(|rank| engine.reaches(*rank));
    tcp.exchange().reached_by_ucx(reached.collect());
    let reading = Arc::clone(&engine);
    let thread = std::thread::Builder::new()
        .name("sw-ucx".to_owned())
        .spawn(move || reading.read_all())
        .map_err(|error| StartError::System {
            what: "cannot start a thread",
            reason: error.to_string(),
        })?;
    Ok(Arc::new(Ucx {
        tcp,
        engine,
        thread: Mutex::new(Some(thread)),
        owner: Owner::this_process(),
    }))
}

fn system(error: &UcxError) -> StartError {
    StartError::System {
        what: "cannot start UCX",
        reason: error.to_string(),
    }
}

impl Receiver for Relay {
    fn deliver(&self, from: Rank, message: Message) {
        if let Message::Object(object) = &message
            && object.channel == FAREWELL
        {
            if let Value::Int(count) = object.body.value {
                let mut announced = self
                    .announced
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                announced.insert(from, count.cast_unsigned());
            }
            return;
        }
        self.receiver.deliver(from, message);
        self.engine.wake_reader();
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        let announced = self
            .announced
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let announced = announced.get(&from).copied();
        self.engine.lose(from, loss, announced);
    }

    fn beat(&self, from: Rank, beat: Beat) {
        self.receiver.beat(from, beat);
    }
}

impl Transport for Ucx {
    fn rank(&self) -> Rank {
        self.tcp.rank()
    }

    fn world(&self) -> u32 {
        self.tcp.world()
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send_reading(to, message, Reading::Elsewhere)
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send_reading(to, message, Reading::Here)
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.tcp.peer(rank)
    }

    fn pulse(&self) -> &Arc<Pulse> {
        self.tcp.pulse()
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        if self.engine.reaches(rank) {
            "UCX".into()
        } else {
            self.tcp.reached_by(rank)
        }
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Sight) -> bool {
        self.owner.is_here() && self.engine.read_until(slice, look)
    }

    fn wake_reader(&self) {
        self.engine.wake_reader();
    }

    fn close(&self, farewell: Option<ErrorReport>) {
        if !self.owner.is_here() {
            return;
        }
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(thread) = thread else {
            return;
        };
        if !self.engine.flush(CLOSE_DEADLINE) {
            tracing::debug!(rank = %self.rank(), "not every message left before the end");
        }
        for rank in (0..self.world()).map(Rank) {
            if self.engine.reaches(rank) {
                self.say_count(rank);
            }
        }
        self.tcp.close(farewell);
        self.engine.stop();
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!(rank = %self.rank(), "the reading thread panicked");
        }
        self.engine.close(Duration::from_millis(500));
    }

    fn stats(&self) -> CommStats {
        let [sent, received, bytes_sent, bytes_received, strangers] = self.engine.counts();
        let tcp = self.tcp.stats();
        CommStats {
            messages_sent: tcp.messages_sent + sent,
            messages_received: tcp.messages_received + received,
            bytes_sent: tcp.bytes_sent + bytes_sent,
            bytes_received: tcp.bytes_received + bytes_received,
            strangers_dropped: tcp.strangers_dropped + strangers,
            ..tcp
        }
    }
}

impl Ucx {
    /// The persistent buffers.
    pub fn exchange(&self) -> Arc<Exchange> {
        self.tcp.exchange()
    }

    /// Disappears as if the process had died.
    #[cfg(test)]
    pub(crate) fn vanish(&self) {
        self.engine.stop();
        self.tcp.vanish();
        if let Some(thread) = self.thread.lock().unwrap().take() {
            thread.join().unwrap();
        }
        self.engine.close(Duration::ZERO);
    }

    fn send_reading(&self, to: Rank, message: Message, reading: Reading) -> Result<(), CommError> {
        self.owner.check()?;
        if !self.engine.reaches(to) {
            return self.tcp.send(to, message);
        }
        // TCP knows first when a peer is gone.
        self.tcp.check(to)?;
        let frame = self.tcp.encode(to, &message)?;
        // Its memory is with the receiver from now on, or in the frame.
        drop(message);
        self.engine.send(to, frame, reading)
    }

    fn say_count(&self, rank: Rank) {
        let count = self.engine.sent_to(rank);
        let object = ObjectMessage {
            channel: FAREWELL.to_owned(),
            body: Body {
                value: Value::Int(count.cast_signed()),
                tensors: Vec::new(),
            },
        };
        if let Err(error) = self.tcp.send(rank, Message::Object(Box::new(object))) {
            tracing::debug!(%rank, %error, "no goodbye for a rank that is gone");
        }
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        self.close(None);
    }
}
