//! A job whose messages go through UCX, beside the TCP connections over which it was set up.
//!
//! TCP keeps what it does best: the rendezvous, the job's secret, liveness and shutdown notices. A pair
//! of ranks uses UCX when both have it; other pairs send through TCP.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_system::Owner;
use shardwright_ucx::{UcxError, Worker};
use shardwright_wire::{Body, ErrorReport, Heartbeat, Limits, Message, ObjectMessage, Value};

use super::engine::{Engine, Reading};
use super::find::worker;
use crate::error::CommError;
use crate::exchange::Exchange;
use crate::job::{JobOptions, TensorMemory};
use crate::layers::{Layer, Met, Prepared};
use crate::start_error::StartError;
use crate::transport::{
    CommStats, HeartbeatState, Loss, Observation, PeerInfo, Receiver, Transport,
};

/// On this channel a rank that leaves says how many messages it sent through UCX.
const CLOSE_CHANNEL: &str = "\0ucx close";

/// UCX among the transports.
pub(crate) struct UcxLayer;

/// A rank's connections to all others, through UCX where both ends have it.
struct Ucx {
    below: Arc<dyn Transport>,
    engine: Arc<Engine>,
    exchange: Arc<Exchange>,
    limits: Limits,
    /// How long a peer may be silent, and so how long the end waits for one that takes nothing.
    liveness: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
    owner: Owner,
}

/// UCX before the ranks have met.
struct Ready {
    engine: Arc<Engine>,
    relay: Arc<Relay>,
    place: Vec<u8>,
    liveness: Duration,
}

/// What comes from below, on its way to the receiver.
struct Relay {
    receiver: Arc<dyn Receiver>,
    engine: Arc<Engine>,
    announced: Mutex<BTreeMap<Rank, u64>>,
}

impl Layer for UcxLayer {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn prepare(
        &self,
        options: &JobOptions,
        _: &TensorMemory,
        receiver: &Arc<dyn Receiver>,
    ) -> Result<Option<Box<dyn Prepared>>, StartError> {
        let Some(worker) = worker(options)? else {
            return Ok(None);
        };
        ready(worker, options, Arc::clone(receiver)).map(Some)
    }
}

/// A worker that is told to its peers, with a receiver for what it brings.
pub(super) fn ready(
    worker: Worker,
    options: &JobOptions,
    receiver: Arc<dyn Receiver>,
) -> Result<Box<dyn Prepared>, StartError> {
    let spin = options.comm.spin;
    let engine = Engine::new(worker, options.world, spin, Arc::clone(&receiver));
    let engine = Arc::new(engine.map_err(|error| system(&error))?);
    Ok(Box::new(Ready {
        place: engine.place().map_err(|error| system(&error))?,
        relay: Arc::new(Relay {
            receiver,
            engine: Arc::clone(&engine),
            announced: Mutex::default(),
        }),
        engine,
        liveness: options.liveness_timeout,
    }))
}

impl Prepared for Ready {
    fn address(&self) -> Option<Vec<u8>> {
        Some(self.place.clone())
    }

    fn relay(&self) -> Option<Arc<dyn Receiver>> {
        Some(Arc::<Relay>::clone(&self.relay))
    }

    fn join(self: Box<Self>, met: Met) -> Result<Arc<dyn Transport>, StartError> {
        let engine = self.engine;
        engine
            .begin(met.limits, Arc::clone(&met.exchange), &met.addresses)
            .map_err(|error| system(&error))?;
        let reached = (0..met.below.world())
            .map(Rank)
            .filter(|rank| engine.reaches(*rank));
        met.exchange.reached_by_ucx(reached.collect());
        let reading = Arc::clone(&engine);
        let thread = std::thread::Builder::new()
            .name("sw-ucx".to_owned())
            .spawn(move || reading.read_all())
            .map_err(|error| StartError::System {
                what: "cannot start a thread",
                reason: error.to_string(),
            })?;
        Ok(Arc::new(Ucx {
            below: met.below,
            engine,
            exchange: met.exchange,
            limits: met.limits,
            liveness: self.liveness,
            thread: Mutex::new(Some(thread)),
            owner: Owner::this_process(),
        }))
    }
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
            && object.channel == CLOSE_CHANNEL
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

    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat) {
        self.receiver.heartbeat(from, heartbeat);
    }
}

impl Transport for Ucx {
    fn rank(&self) -> Rank {
        self.below.rank()
    }

    fn world(&self) -> u32 {
        self.below.world()
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send_reading(to, message, Reading::Elsewhere)
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.send_reading(to, message, Reading::Here)
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.below.peer(rank)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        self.below.heartbeat_state()
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        if self.engine.reaches(rank) {
            "UCX".into()
        } else {
            self.below.reached_by(rank)
        }
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        self.owner.is_here() && self.engine.read_until(slice, look)
    }

    fn wake_reader(&self) {
        self.engine.wake_reader();
    }

    fn check(&self, to: Rank) -> Result<(), CommError> {
        self.below.check(to)
    }

    #[cfg(test)]
    fn vanish(&self) {
        self.engine.stop();
        self.below.vanish();
        if let Some(thread) = self.thread.lock().unwrap().take() {
            thread.join().unwrap();
        }
        self.engine.close(Duration::ZERO);
    }

    fn close(&self, report: Option<ErrorReport>) {
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
        if !self.engine.flush(self.liveness) {
            tracing::debug!(rank = %self.rank(), "not every message left before the end");
        }
        for rank in (0..self.world()).map(Rank) {
            if self.engine.reaches(rank) {
                self.say_count(rank);
            }
        }
        self.below.close(report);
        self.engine.stop();
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!(rank = %self.rank(), "the reading thread panicked");
        }
        self.engine.close(Duration::from_millis(500));
    }

    fn stats(&self) -> CommStats {
        let [sent, received, bytes_sent, bytes_received, unknown_peers] = self.engine.counts();
        let below = self.below.stats();
        CommStats {
            messages_sent: below.messages_sent + sent,
            messages_received: below.messages_received + received,
            bytes_sent: below.bytes_sent + bytes_sent,
            bytes_received: below.bytes_received + bytes_received,
            unknown_peers_dropped: below.unknown_peers_dropped + unknown_peers,
            ..below
        }
    }
}

impl Ucx {
    fn send_reading(&self, to: Rank, message: Message, reading: Reading) -> Result<(), CommError> {
        self.owner.check()?;
        if !self.engine.reaches(to) {
            return self.below.send(to, message);
        }
        // TCP knows first when a peer is gone.
        self.below.check(to)?;
        let frame = self.exchange.encode(to, &message, &self.limits)?;
        // Its memory is with the receiver from now on, or in the frame.
        drop(message);
        self.engine.send(to, frame, reading)
    }

    fn say_count(&self, rank: Rank) {
        let count = self.engine.sent_to(rank);
        let object = ObjectMessage {
            channel: CLOSE_CHANNEL.to_owned(),
            body: Body {
                value: Value::Int(count.cast_signed()),
                tensors: Vec::new(),
            },
        };
        if let Err(error) = self.below.send(rank, Message::Object(Box::new(object))) {
            tracing::debug!(%rank, %error, "no shutdown notice for a rank that is gone");
        }
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        self.close(None);
    }
}
