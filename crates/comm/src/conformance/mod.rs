//! One set of laws for every transport, and what holds for one only.

mod laws;
mod objects;
mod tcp;

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{
    Beat, Body, Buffer, Message, ObjectMessage, StepBegin, TensorMeta, TensorPart, Value,
};

use crate::in_process::in_process;
use crate::tcp::testing;
use crate::transport::{Loss, Receiver, Transport};

/// Longer than anything here takes, so that a failure is not a hang.
pub(crate) const WATCHDOG: Duration = Duration::from_mins(1);

/// What a receiver was told.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Told {
    Message(Rank, Message),
    Lost(Rank, Loss),
    Beat(Rank, Beat),
}

/// A receiver that writes everything down.
#[derive(Default)]
pub(crate) struct Recorder {
    told: Mutex<Vec<Told>>,
    changed: Condvar,
}

impl Recorder {
    fn note(&self, told: Told) {
        self.told.lock().unwrap().push(told);
        self.changed.notify_all();
    }

    /// Waits until what was told satisfies a condition, and returns it.
    pub(crate) fn wait(&self, what: &str, enough: impl Fn(&[Told]) -> bool) -> Vec<Told> {
        let deadline = Instant::now() + WATCHDOG;
        let mut told = self.told.lock().unwrap();
        while !enough(&told) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "no {what} came; told so far: {:.2000}",
                format!("{told:?}")
            );
            told = self.changed.wait_timeout(told, left).unwrap().0;
        }
        told.clone()
    }

    pub(crate) fn wait_messages(&self, count: usize) -> Vec<(Rank, Message)> {
        let messages = |told: &[Told]| {
            let only = |event: &Told| match event {
                Told::Message(from, message) => Some((*from, message.clone())),
                Told::Lost(..) | Told::Beat(..) => None,
            };
            told.iter().filter_map(only).collect::<Vec<_>>()
        };
        messages(&self.wait("message", |told| messages(told).len() >= count))
    }

    pub(crate) fn wait_loss(&self, of: Rank) -> Loss {
        let find = |told: &[Told]| {
            told.iter().find_map(|event| match event {
                Told::Lost(from, loss) if *from == of => Some(loss.clone()),
                _ => None,
            })
        };
        let told = self.wait("loss", |told| find(told).is_some());
        find(&told).unwrap()
    }
}

impl Receiver for Recorder {
    fn deliver(&self, from: Rank, message: Message) {
        self.note(Told::Message(from, message));
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.note(Told::Lost(from, loss));
    }

    fn beat(&self, from: Rank, beat: Beat) {
        self.note(Told::Beat(from, beat));
    }
}

/// A kind of transport, as the laws see it.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    InProcess,
    Tcp,
}

impl Kind {
    /// A job of as many ranks as there are receivers.
    pub(crate) fn connect(self, receivers: Vec<Arc<dyn Receiver>>) -> Vec<Arc<dyn Transport>> {
        match self {
            Self::InProcess => in_process(receivers)
                .unwrap()
                .into_iter()
                .map(|rank| rank as Arc<dyn Transport>)
                .collect(),
            Self::Tcp => {
                let world = u32::try_from(receivers.len()).unwrap();
                let threads: Vec<_> = testing::all_options(world)
                    .into_iter()
                    .zip(receivers)
                    .map(|(options, receiver)| testing::join(options, receiver))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap().unwrap() as Arc<dyn Transport>)
                    .collect()
            }
        }
    }

    /// A job whose receivers write down what they are told.
    pub(crate) fn recorded(self, world: usize) -> Vec<(Arc<dyn Transport>, Arc<Recorder>)> {
        let recorders: Vec<Arc<Recorder>> = (0..world).map(|_| Arc::default()).collect();
        let receivers = recorders
            .iter()
            .map(|recorder| Arc::clone(recorder) as Arc<dyn Receiver>)
            .collect();
        self.connect(receivers).into_iter().zip(recorders).collect()
    }

    /// Rank 0 of a job of two, whose rank 1 dies at once.
    pub(crate) fn survivor(self) -> (Arc<dyn Transport>, Arc<Recorder>) {
        let recorder = Arc::new(Recorder::default());
        let receiver = Arc::clone(&recorder) as Arc<dyn Receiver>;
        match self {
            Self::InProcess => {
                let mut ranks = in_process(vec![receiver, Arc::new(Recorder::default())]).unwrap();
                ranks.pop().unwrap().vanish();
                (ranks.pop().unwrap(), recorder)
            }
            Self::Tcp => {
                let mut all = testing::all_options(2);
                let dying = testing::join_frozen(all.pop().unwrap());
                let survivor = testing::join(all.pop().unwrap(), receiver);
                drop(dying.join().unwrap().unwrap());
                (survivor.join().unwrap().unwrap(), recorder)
            }
        }
    }
}

/// A message told apart by a number.
pub(crate) fn numbered(number: u64) -> Message {
    Message::StepBegin(StepBegin {
        step: StepEpoch(number),
        function: "train".to_owned(),
        num_microbatches: 1,
    })
}

/// The number of such a message.
pub(crate) fn number_of(message: &Message) -> u64 {
    match message {
        Message::StepBegin(begin) => begin.step.0,
        other => panic!("not a numbered message: {other:?}"),
    }
}

/// A message with one tensor of so many bytes.
pub(crate) fn heavy(bytes: usize, fill: u8) -> Message {
    let data = Buffer::filled_by(bytes, |into| {
        into.fill(fill);
        Ok::<_, ()>(())
    });
    let meta = TensorMeta {
        dtype: "uint8".to_owned(),
        shape: vec![bytes as u64],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: false,
    };
    let body = Body {
        value: Value::Tensor(0),
        tensors: vec![TensorPart {
            meta,
            data: data.unwrap(),
        }],
    };
    Message::Object(Box::new(ObjectMessage {
        channel: "heavy".to_owned(),
        body,
    }))
}
