//! This process's place among the ranks of its job.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use shardwright_wire::ErrorReport;

use crate::connection::Connection;
#[cfg(any(test, feature = "faults"))]
use crate::in_process::faults::{Faults, in_process_with_faults};
use crate::in_process::{InProcess, in_process};
use crate::job::{JobOptions, Memory};
use crate::layers::Stack;
use crate::owner::Owner;
use crate::router::Router;
use crate::routing::Choice;
use crate::start_error::StartError;
use crate::transport::{Receiver, Transport};

/// A rank's connection to the others, put together from what its options say.
pub struct Node {
    transport: Arc<dyn Transport>,
    router: Arc<Router>,
    choice: Choice,
    owner: Owner,
    memory: Mutex<Arc<Memory>>,
}

/// A node before the ranks have met.
pub struct Joining {
    stack: Stack,
    router: Arc<Router>,
    choice: Choice,
}

impl Joining {
    /// Loads what the options ask for; libraries that it loads look at the environment of this process.
    pub fn prepare(options: JobOptions) -> Result<Self, StartError> {
        let router = Arc::new(Router::default());
        let choice = options.comm.transport;
        let receiver: Arc<dyn Receiver> = Arc::<Router>::clone(&router);
        Ok(Self {
            stack: Stack::new(options, receiver)?,
            router,
            choice,
        })
    }

    /// Joins the job, and returns when all ranks have; asks `go_on` many times a second.
    pub fn join(self, go_on: &mut dyn FnMut() -> bool) -> Result<Node, StartError> {
        let memory = self.stack.memory().clone();
        let transport = self.stack.join(go_on)?;
        Ok(Node::new(transport, self.router, memory, self.choice))
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
        let nodes = ranks
            .map(|(rank, router)| Self::new(rank, router, Memory::default(), Choice::default()));
        Ok(nodes.collect())
    }

    fn new(
        transport: Arc<dyn Transport>,
        router: Arc<Router>,
        memory: Memory,
        choice: Choice,
    ) -> Self {
        let transport: Arc<dyn Transport> = Connection::new(transport);
        router.connect(&transport);
        Self {
            transport,
            router,
            choice,
            owner: Owner::this_process(),
            memory: Mutex::new(Arc::new(memory)),
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
    pub fn choice(&self) -> Choice {
        self.choice
    }

    /// The process whose node it is.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Where it keeps tensors on their way; nowhere in particular once it is closed.
    pub fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Leaves the job; the other ranks hear a goodbye, with `farewell` when an error is the reason. Takes a few seconds
    /// at most; a second call does nothing.
    pub fn close(&self, farewell: Option<ErrorReport>) {
        self.transport.close(farewell);
        if self.owner.is_here() {
            self.router.close();
            let memory = self.memory.lock();
            *memory.unwrap_or_else(PoisonError::into_inner) = Arc::default();
        }
    }
}
