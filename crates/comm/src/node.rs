//! This process's place among the ranks of its job.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Body, ErrorReport, Message, ObjectMessage};

use crate::connection::ClosableTransport;
use crate::deadline::Deadline;
use crate::error::CommError;
#[cfg(any(test, feature = "faults"))]
use crate::in_process::faults::{Faults, in_process_with_faults};
use crate::in_process::{InProcess, in_process};
use crate::job::{JobOptions, TensorMemory};
use crate::layers::Stack;
use crate::local_rendezvous::LocalRendezvous;
use crate::objects::barrier;
use crate::published;
use crate::router::Router;
use crate::routing::TransportChoice;
use crate::start_error::StartError;
use crate::transport::{Receiver, Transport};
use shardwright_system::Owner;

/// A rank's connection to the others, put together from what its options say.
pub struct Node {
    transport: Arc<dyn Transport>,
    router: Arc<Router>,
    choice: TransportChoice,
    owner: Owner,
    memory: Mutex<Arc<TensorMemory>>,
    /// Where late ranks of this host are told of the job.
    local: Option<LocalRendezvous>,
}

/// A node before the ranks have met.
pub struct Joining {
    stack: Stack,
    router: Arc<Router>,
    choice: TransportChoice,
    local: Option<LocalRendezvous>,
}

impl Joining {
    /// Loads what the options ask for; libraries that it loads look at the environment of this process.
    pub fn prepare(mut options: JobOptions) -> Result<Self, StartError> {
        let router = Arc::new(Router::default());
        let choice = options.comm.transport;
        let local = options.place.local.take();
        let receiver: Arc<dyn Receiver> = Arc::<Router>::clone(&router);
        Ok(Self {
            stack: Stack::new(options, receiver)?,
            router,
            choice,
            local,
        })
    }

    /// Joins the job, and returns when all ranks have; asks `go_on` many times a second.
    pub fn join(self, go_on: &mut dyn FnMut() -> bool) -> Result<Node, StartError> {
        let memory = self.stack.memory().clone();
        let transport = self.stack.join(go_on)?;
        let node = Node::new(transport, self.router, memory, self.choice);
        Ok(Node {
            local: self.local,
            ..node
        })
    }
}

impl Node {
    /// The nodes of ranks that share this process.
    pub fn in_process(world: usize) -> io::Result<Vec<Self>> {
        Self::of_this_process(world, in_process)
    }

    /// The same with faults between the ranks.
    #[cfg(any(test, feature = "faults"))]
    pub fn in_process_with_faults(world: usize, faults: &Faults) -> io::Result<Vec<Self>> {
        Self::of_this_process(world, |receivers| in_process_with_faults(receivers, faults))
    }

    fn of_this_process(
        world: usize,
        connect: impl FnOnce(Vec<Arc<dyn Receiver>>) -> io::Result<Vec<Arc<InProcess>>>,
    ) -> io::Result<Vec<Self>> {
        let routers: Vec<Arc<Router>> = (0..world).map(|_| Arc::default()).collect();
        let receivers = routers.iter();
        let receivers = receivers.map(|router| Arc::<Router>::clone(router) as _);
        let ranks = connect(receivers.collect())?.into_iter().zip(routers);
        let nodes = ranks.map(|(rank, router)| {
            Self::new(
                rank,
                router,
                TensorMemory::default(),
                TransportChoice::default(),
            )
        });
        Ok(nodes.collect())
    }

    fn new(
        transport: Arc<dyn Transport>,
        router: Arc<Router>,
        memory: TensorMemory,
        choice: TransportChoice,
    ) -> Self {
        let transport: Arc<dyn Transport> = ClosableTransport::new(transport);
        router.connect(&transport);
        Self {
            transport,
            router,
            choice,
            owner: Owner::this_process(),
            memory: Mutex::new(Arc::new(memory)),
            local: None,
        }
    }

    /// What carries its messages.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// Where what comes is looked for.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// What the configuration allows.
    pub fn choice(&self) -> TransportChoice {
        self.choice
    }

    /// An error in a forked child.
    pub fn check(&self) -> Result<(), CommError> {
        Ok(self.owner.check()?)
    }

    /// Where it keeps tensors on their way; nowhere in particular once it is closed.
    pub fn memory(&self) -> Arc<TensorMemory> {
        Arc::clone(&self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends an object; does not wait for its receiver.
    pub fn send_object(&self, to: Rank, channel: String, body: Body) -> Result<(), CommError> {
        let message = Message::Object(Box::new(ObjectMessage { channel, body }));
        self.transport.send_and_read(to, message)
    }

    /// The next object that a rank sent on a channel; asks `go_on` many times a second.
    pub fn receive_object(
        &self,
        from: Rank,
        channel: &str,
        limit: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Body, CommError> {
        self.check()?;
        let mut deadline = Deadline::new(Some(limit), go_on).reading(&*self.transport);
        self.router.objects().receive(from, channel, &mut deadline)
    }

    /// Keeps a body for `peers` to fetch; the key to ask for it by.
    pub fn publish(&self, body: Body, peers: impl IntoIterator<Item = Rank>) -> i64 {
        self.router.published().publish(body, peers)
    }

    /// Asks for what a rank has published; it arrives as an object on the channel that this returns.
    pub fn fetch(&self, from: Rank, key: i64) -> Result<String, CommError> {
        published::fetch(&*self.transport, from, key)?;
        Ok(published::channel_of(key))
    }

    /// Tells a rank that this one will not fetch what it has published.
    pub fn release(&self, from: Rank, key: i64) -> Result<(), CommError> {
        published::release(&*self.transport, from, key)
    }

    /// Waits until every rank of `group` has called this with the same name.
    pub fn barrier(
        &self,
        group: &[Rank],
        name: &str,
        limit: Option<Duration>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), CommError> {
        self.check()?;
        let mut deadline = Deadline::new(limit, go_on).reading(&*self.transport);
        let objects = self.router.objects();
        barrier(&*self.transport, objects, group, name, &mut deadline)
    }

    /// How many objects have come for which nobody has asked, and how many are kept for others to fetch.
    pub fn objects_held(&self) -> (usize, usize) {
        let waiting = self.router.objects().waiting();
        (waiting, self.router.published().len())
    }

    /// Leaves the job; the other ranks hear a shutdown notice, with `report` when an error is the reason. Takes a few seconds
    /// at most; a second call does nothing.
    pub fn close(&self, report: Option<ErrorReport>) {
        self.local.iter().for_each(LocalRendezvous::close);
        self.transport.close(report);
        if self.owner.is_here() {
            self.router.close();
            let memory = self.memory.lock();
            *memory.unwrap_or_else(PoisonError::into_inner) = Arc::default();
        }
    }
}
