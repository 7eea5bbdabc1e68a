//! What a job's messages go through: the connections over which its ranks have met, and the transports above them.
//!
//! A transport is one folder and one line in [`LAYERS`]. Ranks learn of each other's by the table that rank 0 hands
//! out.

use std::collections::BTreeMap;
use std::sync::Arc;

use shardwright_core::Rank;
use shardwright_wire::Limits;

use crate::exchange::Exchange;
use crate::job::{Brought, JobOptions, TensorMemory};
use crate::start_error::StartError;
use crate::tcp;
use crate::transport::{Receiver, Transport};

/// The transports above the connections, from the lowest.
const LAYERS: &[&dyn Layer] = &[
    &crate::ucx::UcxLayer,       // messages between ranks that both have UCX
    &crate::device::DeviceLayer, // messages that wait for their tensors' device
];

/// A kind of transport.
pub(crate) trait Layer: Sync {
    /// Its name among the others.
    fn name(&self) -> &'static str;

    /// What this rank has of it; `None` where its options or its machine are without. `receiver` hears of all that
    /// comes.
    fn prepare(
        &self,
        options: &JobOptions,
        memory: &TensorMemory,
        receiver: &Arc<dyn Receiver>,
    ) -> Result<Option<Box<dyn Prepared>>, StartError>;
}

/// A transport before the ranks have met.
pub(crate) trait Prepared: Send {
    /// Where the other ranks find it, if they have to.
    fn address(&self) -> Option<Vec<u8>> {
        None
    }

    /// Who hears of what comes from below, where that is not the receiver itself.
    fn relay(&self) -> Option<Arc<dyn Receiver>> {
        None
    }

    /// Puts it above the one below, which is running.
    fn join(self: Box<Self>, met: Met) -> Result<Arc<dyn Transport>, StartError>;
}

/// What a transport learns when the ranks have met.
pub(crate) struct Met {
    pub(crate) below: Arc<dyn Transport>,
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) limits: Limits,
    /// Where it is found on the other ranks: none unless all have it, so that no pair is slower than the others for a
    /// reason that nobody sees.
    pub(crate) addresses: BTreeMap<Rank, Vec<u8>>,
}

/// All transports of a rank, before the ranks have met.
pub(crate) struct Stack {
    options: JobOptions,
    brought: Brought,
    /// From the lowest.
    layers: Vec<(&'static str, Box<dyn Prepared>)>,
    /// Who hears of what comes from the connections.
    receiver: Arc<dyn Receiver>,
}

impl Stack {
    /// Of all kinds of transports, those that this rank has.
    pub(crate) fn new(
        options: JobOptions,
        receiver: Arc<dyn Receiver>,
    ) -> Result<Self, StartError> {
        Self::of(LAYERS, options, receiver)
    }

    /// Of these kinds.
    pub(crate) fn of(
        kinds: &[&dyn Layer],
        options: JobOptions,
        mut receiver: Arc<dyn Receiver>,
    ) -> Result<Self, StartError> {
        let mut brought = Brought {
            memory: TensorMemory::of(&options),
            addresses: BTreeMap::new(),
        };
        let mut layers = Vec::new();
        // A rank that lacks what a job needs only says so.
        for kind in kinds.iter().rev().filter(|_| options.lacks.is_none()) {
            let Some(layer) = kind.prepare(&options, &brought.memory, &receiver)? else {
                continue;
            };
            receiver = layer.relay().unwrap_or(receiver);
            let address = layer
                .address()
                .map(|address| (kind.name().to_owned(), address));
            brought.addresses.extend(address);
            layers.insert(0, (kind.name(), layer));
        }
        Ok(Self {
            options,
            brought,
            layers,
            receiver,
        })
    }

    pub(crate) fn memory(&self) -> &TensorMemory {
        &self.brought.memory
    }

    /// Joins the job, and returns when all ranks have; asks `go_on` many times a second.
    pub(crate) fn join(
        self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Arc<dyn Transport>, StartError> {
        let limits = self.options.limits;
        let connections = tcp::connect(self.options, self.brought, self.receiver, go_on)?;
        let mut top: Arc<dyn Transport> = Arc::<tcp::Tcp>::clone(&connections);
        for (name, layer) in self.layers {
            top = layer.join(Met {
                below: top,
                exchange: connections.exchange(),
                limits,
                addresses: connections.addresses(name),
            })?;
        }
        Ok(top)
    }
}
