//! Faults between the ranks of one process, for tests; behind the feature `faults`, which no wheel is built with.
//!
//! Messages are encoded, go wrong on their way, and are put right or found out by the receiver.

mod delivery;
mod envelope;
mod frame;
mod line;
mod planned_delivery;
mod sequence;

use std::sync::Arc;

use self::delivery::Wire;
pub use self::planned_delivery::{Cut, Faults, FaultsError};
use shardwright_wire::Heartbeat;

use super::{InProcess, connect};
use crate::transport::{Loss, Receiver};

/// What goes into an inbox where messages are numbered.
pub(super) enum Numbered {
    /// An encoded message with its number.
    Frame(u64, Vec<u8>),
    /// A heartbeat with the number of messages sent before it.
    Heartbeat(Heartbeat, u64),
}

/// Connects as many ranks as there are receivers, with faults between them.
pub(crate) fn in_process_with_faults(
    receivers: Vec<Arc<dyn Receiver>>,
    faults: &Faults,
) -> std::io::Result<Vec<Arc<InProcess>>> {
    let world = u32::try_from(receivers.len()).unwrap_or(u32::MAX);
    connect(
        receivers,
        &(Arc::new(Wire::new(faults.clone(), world)) as _),
    )
}

impl InProcess {
    /// Disappears as if the process had died.
    pub fn vanish(&self) {
        self.leave(&Loss::Died);
    }
}
