//! One set of laws for every transport, and what holds for one only.

/// The transports under test: a line for each. Hands `$laws` to `$instantiate` for every one.
macro_rules! for_every_kind {
    ($instantiate:ident $laws:tt) => {
        $instantiate!(in_process TransportKind::InProcess, $laws);
        $instantiate!(in_process_with_faults_1 TransportKind::Faulty(1), $laws);
        $instantiate!(in_process_with_faults_2 TransportKind::Faulty(2), $laws);
        $instantiate!(in_process_with_faults_3 TransportKind::Faulty(3), $laws);
        $instantiate!(tcp TransportKind::Tcp, $laws);
        $instantiate!(tcp_encrypted TransportKind::Encrypted, $laws);
        $instantiate!(tcp_with_shared_memory TransportKind::Shared, $laws);
        $instantiate!(tcp_with_a_rehearsed_device TransportKind::Device, $laws);
        $instantiate!(ucx_over_shared_memory TransportKind::UcxShared, $laws);
        $instantiate!(ucx_over_tcp TransportKind::UcxTcp, $laws);
    };
}

/// Makes a module of tests of a list of laws, for one kind of transport.
macro_rules! laws_of_kind {
    ($module:ident $kind:expr, { $($law:ident)* }) => {
        mod $module {
            use crate::conformance::TransportKind;
            $(#[test] fn $law() { super::$law($kind); })*
        }
    };
}

mod faults;
mod kinds;
mod laws;
mod objects;
mod starts;
mod tcp;
mod traffic;

pub(crate) use kinds::TransportKind;

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{
    Body, Buffer, Heartbeat, Message, NoMemory, ObjectMessage, StepBegin, TensorMeta, TensorPart,
    Value,
};

use crate::transport::{Loss, Receiver};

/// Longer than anything here takes, so that a failure is not a hang.
pub(crate) const WATCHDOG: Duration = Duration::from_mins(5);

/// What a receiver was told.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delivered {
    Message(Rank, Message),
    Lost(Rank, Loss),
    Heartbeat(Rank, Heartbeat),
}

/// A receiver that writes everything down.
#[derive(Default)]
pub(crate) struct Recorder {
    delivered: Mutex<Vec<Delivered>>,
    changed: Condvar,
}

impl Recorder {
    /// As many as there are ranks.
    pub(crate) fn several(count: usize) -> Vec<Arc<Self>> {
        (0..count).map(|_| Arc::default()).collect()
    }

    /// This one, as a transport takes it.
    pub(crate) fn receiver(self: &Arc<Self>) -> Arc<dyn Receiver> {
        Arc::<Self>::clone(self)
    }

    /// All that was told so far.
    pub(crate) fn delivered(&self) -> Vec<Delivered> {
        self.delivered.lock().unwrap().clone()
    }

    /// Forgets what was told so far, with its tensors.
    pub(crate) fn clear(&self) {
        self.delivered.lock().unwrap().clear();
    }

    fn note(&self, delivered: Delivered) {
        self.delivered.lock().unwrap().push(delivered);
        self.changed.notify_all();
    }

    /// Waits until what was told satisfies a condition, and returns it.
    pub(crate) fn wait(&self, what: &str, enough: impl Fn(&[Delivered]) -> bool) -> Vec<Delivered> {
        let deadline = Instant::now() + WATCHDOG;
        let mut delivered = self.delivered.lock().unwrap();
        while !enough(&delivered) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "no {what} came; told so far: {:.2000}",
                format!("{delivered:?}")
            );
            delivered = self.changed.wait_timeout(delivered, left).unwrap().0;
        }
        delivered.clone()
    }

    pub(crate) fn wait_messages(&self, count: usize) -> Vec<(Rank, Message)> {
        let messages = |delivered: &[Delivered]| {
            let only = |event: &Delivered| match event {
                Delivered::Message(from, message) => Some((*from, message.clone())),
                Delivered::Lost(..) | Delivered::Heartbeat(..) => None,
            };
            delivered.iter().filter_map(only).collect::<Vec<_>>()
        };
        messages(&self.wait("message", |delivered| messages(delivered).len() >= count))
    }

    pub(crate) fn wait_loss(&self, of: Rank) -> Loss {
        let find = |delivered: &[Delivered]| {
            delivered.iter().find_map(|event| match event {
                Delivered::Lost(from, loss) if *from == of => Some(loss.clone()),
                _ => None,
            })
        };
        let delivered = self.wait("loss", |delivered| find(delivered).is_some());
        find(&delivered).unwrap()
    }
}

/// The numbers of a peer's messages, in the order in which they came.
pub(crate) fn numbers_from(delivered: &[Delivered], from: Rank) -> Vec<u64> {
    let number = |event: &Delivered| match event {
        Delivered::Message(rank, message) if *rank == from => Some(number_of(message)),
        _ => None,
    };
    delivered.iter().filter_map(number).collect()
}

/// A peer's loss, which was told once and last of all that was told of it.
pub(crate) fn only_loss(delivered: &[Delivered], of: Rank) -> Loss {
    let mut of_peer = delivered.iter().filter(|event| match event {
        Delivered::Message(from, _) | Delivered::Lost(from, _) | Delivered::Heartbeat(from, _) => {
            *from == of
        }
    });
    let is_loss = |event: &&Delivered| matches!(event, Delivered::Lost(..));
    let Some(Delivered::Lost(_, loss)) = of_peer.find(is_loss) else {
        panic!("rank {of} was not lost");
    };
    assert_eq!(of_peer.next(), None, "after the loss of rank {of}");
    loss.clone()
}

impl Receiver for Recorder {
    fn deliver(&self, from: Rank, message: Message) {
        self.note(Delivered::Message(from, message));
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.note(Delivered::Lost(from, loss));
    }

    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat) {
        self.note(Delivered::Heartbeat(from, heartbeat));
    }
}

/// A message told apart by a number.
pub(crate) fn numbered(number: u64) -> Message {
    Message::StepBegin(StepBegin {
        step: StepEpoch(number),
        function: "train".to_owned(),
        num_microbatches: 1,
        one_at_a_time: false,
    })
}

/// The number of such a message.
pub(crate) fn number_of(message: &Message) -> u64 {
    match message {
        Message::StepBegin(begin) => begin.step.0,
        other => panic!("not a numbered message: {other:?}"),
    }
}

/// A tensor of so many bytes, described.
pub(crate) fn meta_of_bytes(bytes: u64) -> TensorMeta {
    TensorMeta {
        dtype: "uint8".to_owned(),
        shape: vec![bytes],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: false,
    }
}

/// A message with one tensor of so many bytes.
pub(crate) fn heavy(bytes: usize, fill: u8) -> Message {
    let data = Buffer::filled_by(bytes, |into| {
        into.fill(fill);
        Ok::<_, NoMemory>(())
    });
    let meta = meta_of_bytes(bytes as u64);
    let body = Body {
        value: Value::Tensor(0),
        tensors: vec![TensorPart::new(meta, data.unwrap())],
    };
    Message::Object(Box::new(ObjectMessage {
        channel: "heavy".to_owned(),
        body,
    }))
}
