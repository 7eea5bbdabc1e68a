//! The kinds of transports, and how a job of each is made.

use std::sync::Arc;

use shardwright_core::Rank;
use shardwright_wire::codec::encode;
use shardwright_wire::{Limits, Message};

use super::{Recorder, WATCHDOG};
use crate::device::testing as device;
use crate::in_process::faults::in_process_with_faults;
use crate::job::JobOptions;
use crate::layers::{Layer, Stack};
use crate::tcp::testing;
use crate::transport::{Receiver, Transport};
use crate::ucx;
use crate::{Faults, InProcess, in_process};

/// A kind of transport, as the laws see it.
#[derive(Clone, Copy)]
pub(crate) enum TransportKind {
    InProcess,
    /// In one process with harmless faults of this seed.
    Faulty(u64),
    Tcp,
    /// TCP, encrypted.
    Encrypted,
    /// TCP, with tensors in persistent buffers that the ranks share.
    Shared,
    /// The same, with tensors of a device that is rehearsed.
    Device,
    /// UCX over shared memory, with persistent buffers.
    UcxShared,
    /// UCX over TCP, without.
    UcxTcp,
}

/// A rank, and the receiver that writes down what it is told.
pub(crate) type RecordedRank = (Arc<dyn Transport>, Arc<Recorder>);

/// A rank that will die.
pub(crate) trait Doomed: Send {
    fn send(&self, to: Rank, message: Message);

    /// Ends without a shutdown notice.
    fn die(self: Box<Self>);
}

impl Doomed for Arc<InProcess> {
    fn send(&self, to: Rank, message: Message) {
        Transport::send(&**self, to, message).unwrap();
    }

    fn die(self: Box<Self>) {
        self.vanish();
    }
}

impl Doomed for Arc<dyn Transport> {
    fn send(&self, to: Rank, message: Message) {
        Transport::send(&**self, to, message).unwrap();
    }

    fn die(self: Box<Self>) {
        self.vanish();
    }
}

impl Doomed for testing::Frozen {
    fn send(&self, to: Rank, message: Message) {
        let frame = encode(&message, &Limits::default()).unwrap();
        self.write(to, &frame.head);
        for tensor in &frame.tensors {
            self.write(to, tensor.as_bytes());
        }
    }

    fn die(self: Box<Self>) {}
}

impl TransportKind {
    /// A job of as many ranks as there are receivers.
    pub(crate) fn connect(self, receivers: Vec<Arc<dyn Receiver>>) -> Vec<Arc<dyn Transport>> {
        match self {
            Self::InProcess | Self::Faulty(_) => self
                .in_process(receivers)
                .into_iter()
                .map(|rank| rank as Arc<dyn Transport>)
                .collect(),
            Self::UcxShared | Self::UcxTcp => self.ucx(receivers),
            Self::Device => {
                let threads: Vec<_> = self
                    .options(receivers.len())
                    .into_iter()
                    .zip(receivers)
                    .map(|(options, receiver)| device::join(options, receiver))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap() as Arc<dyn Transport>)
                    .collect()
            }
            Self::Tcp | Self::Encrypted | Self::Shared => {
                let threads: Vec<_> = self
                    .options(receivers.len())
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

    /// A job with one rank more than there are receivers: the last, which will die.
    fn connect_doomed(
        self,
        mut receivers: Vec<Arc<dyn Receiver>>,
    ) -> (Vec<Arc<dyn Transport>>, Box<dyn Doomed>) {
        match self {
            Self::InProcess | Self::Faulty(_) => {
                receivers.push(Arc::new(Recorder::default()));
                let mut ranks = self.in_process(receivers);
                let doomed = ranks.pop().unwrap();
                let survivors = ranks.into_iter().map(|rank| rank as Arc<dyn Transport>);
                (survivors.collect(), Box::new(doomed))
            }
            Self::UcxShared | Self::UcxTcp => {
                receivers.push(Arc::new(Recorder::default()));
                let mut ranks = self.ucx(receivers);
                let doomed = ranks.pop().unwrap();
                (ranks, Box::new(doomed))
            }
            Self::Device => {
                let mut all = self.options(receivers.len() + 1);
                let doomed = testing::join_frozen(all.pop().unwrap());
                let threads: Vec<_> = all
                    .into_iter()
                    .zip(receivers)
                    .map(|(options, receiver)| device::join(options, receiver))
                    .collect();
                let survivors = threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap() as Arc<dyn Transport>);
                (
                    survivors.collect(),
                    Box::new(doomed.join().unwrap().unwrap()),
                )
            }
            Self::Tcp | Self::Encrypted | Self::Shared => {
                let mut all = self.options(receivers.len() + 1);
                let doomed = testing::join_frozen(all.pop().unwrap());
                let threads: Vec<_> = all
                    .into_iter()
                    .zip(receivers)
                    .map(|(options, receiver)| testing::join(options, receiver))
                    .collect();
                let survivors = threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap().unwrap() as Arc<dyn Transport>);
                (
                    survivors.collect(),
                    Box::new(doomed.join().unwrap().unwrap()),
                )
            }
        }
    }

    fn in_process(self, receivers: Vec<Arc<dyn Receiver>>) -> Vec<Arc<InProcess>> {
        let Self::Faulty(seed) = self else {
            return in_process(receivers).unwrap();
        };
        let faults = Faults {
            deadline: WATCHDOG / 4,
            ..Faults::harmless(seed)
        };
        in_process_with_faults(receivers, &faults).unwrap()
    }

    /// The options of a job on one host, with persistent buffers where the kind has them.
    fn options(self, world: usize) -> Vec<JobOptions> {
        let mut all = testing::all_options(u32::try_from(world).unwrap());
        for options in &mut all {
            options.comm.encrypt = matches!(self, Self::Encrypted);
        }
        if matches!(self, Self::Shared | Self::Device | Self::UcxShared) {
            for options in &mut all {
                "localhost".clone_into(&mut options.host_name);
                options.buffer_bytes = 64 << 20;
                if matches!(self, Self::Device) {
                    device::configure(options, 16 << 20);
                }
            }
        }
        all
    }

    fn ucx(self, receivers: Vec<Arc<dyn Receiver>>) -> Vec<Arc<dyn Transport>> {
        let kind: &'static dyn Layer = match self {
            Self::UcxTcp => &ucx::testing::Over("tcp,self"),
            _ => &ucx::testing::Over("posix,self"),
        };
        let ranks: Vec<_> = self
            .options(receivers.len())
            .into_iter()
            .zip(receivers)
            .map(|(options, receiver)| {
                let stack = Stack::of(&[kind], options, receiver).unwrap();
                let thread = std::thread::Builder::new().name("test-rank".to_owned());
                thread.spawn(move || stack.join(&mut || true)).unwrap()
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap())
            .collect()
    }

    /// A job whose receivers write down what they are told.
    pub(crate) fn recorded(self, world: usize) -> Vec<RecordedRank> {
        let recorders = Recorder::several(world);
        let receivers = recorders.iter().map(Recorder::receiver).collect();
        self.connect(receivers).into_iter().zip(recorders).collect()
    }

    /// The survivors of a job of `world` ranks, and the last rank, which will die.
    pub(crate) fn doomed(self, world: usize) -> (Vec<RecordedRank>, Box<dyn Doomed>) {
        let recorders = Recorder::several(world - 1);
        let receivers = recorders.iter().map(Recorder::receiver).collect();
        let (survivors, doomed) = self.connect_doomed(receivers);
        (survivors.into_iter().zip(recorders).collect(), doomed)
    }
}
