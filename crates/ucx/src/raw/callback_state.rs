//! What UCX's callbacks write, and the operations whose memory UCX may use.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::functions::UcpFunctions;
use super::layout::{CANCELED, IoVector, OK, UcsStatus};
use crate::admission::Admission;
use crate::endpoint::EndpointId;
use crate::error::WorkerEvent;
use crate::spare::SpareMemory;

/// Shared by a worker and its callbacks, which run on the worker's thread inside its calls. Every
/// field is taken out, changed and put back without a call in between.
pub(super) struct CallbackState {
    pub(super) functions: Arc<UcpFunctions>,
    pub(super) worker: Cell<*mut c_void>,
    pub(super) limit: usize,
    pub(super) events: Cell<Vec<WorkerEvent>>,
    pub(super) spare: Cell<SpareMemory>,
    admission: Cell<Admission>,
    operations: Cell<Slots>,
}

/// Operations in flight, by place.
#[derive(Default)]
struct Slots {
    places: Vec<*mut Operation>,
    free: Vec<usize>,
}

/// What UCX is doing, with the memory that it uses.
pub(super) enum Transfer {
    /// A message on its way out, with the memory that UCX reads.
    Send {
        token: u64,
        _header: Vec<u8>,
        _payload: Vec<Buffer>,
        _pieces: Vec<IoVector>,
    },
    /// An announced message on its way in.
    Receive {
        from: Rank,
        header: Vec<u8>,
        memory: Vec<u128>,
        length: usize,
    },
    /// An endpoint being closed.
    Close,
}

/// One operation. UCX holds its address as a callback's argument.
pub(super) struct Operation {
    pub(super) inbox: *const CallbackState,
    place: usize,
    pub(super) endpoint: Option<EndpointId>,
    pub(super) work: Transfer,
    /// Nobody waits for it any more: its end is not reported.
    abandoned: bool,
}

/// What an endpoint's error callback needs to know.
pub(super) struct EndpointArgument {
    pub(super) inbox: *const CallbackState,
    pub(super) endpoint: EndpointId,
    pub(super) peer: Rank,
}

impl CallbackState {
    pub(super) fn new(functions: Arc<UcpFunctions>, limit: usize, spare_limit: usize) -> Self {
        Self {
            functions,
            worker: Cell::new(null_mut()),
            limit,
            events: Cell::default(),
            spare: Cell::new(SpareMemory::new(spare_limit)),
            admission: Cell::default(),
            operations: Cell::default(),
        }
    }

    pub(super) fn push(&self, event: WorkerEvent) {
        let mut events = self.events.take();
        events.push(event);
        self.events.set(events);
    }

    /// Looks at who is let in, and notes it.
    pub(super) fn admission<T>(&self, look: impl FnOnce(&mut Admission) -> T) -> T {
        let mut admission = self.admission.take();
        let seen = look(&mut admission);
        self.admission.set(admission);
        seen
    }

    /// Registers an operation and gives the address for UCX.
    pub(super) fn begin(&self, endpoint: Option<EndpointId>, work: Transfer) -> *mut Operation {
        let mut slots = self.operations.take();
        let place = slots.free.pop().unwrap_or(slots.places.len());
        let operation = Box::into_raw(Box::new(Operation {
            inbox: self,
            place,
            endpoint,
            work,
            abandoned: false,
        }));
        if place == slots.places.len() {
            slots.places.push(operation);
        } else {
            slots.places[place] = operation;
        }
        self.operations.set(slots);
        operation
    }

    /// Takes an operation out again.
    ///
    /// # Safety
    /// `operation` came from `begin` of this inbox, was not taken out since, and UCX is done with it.
    pub(super) unsafe fn end(&self, operation: *mut Operation) -> Operation {
        // SAFETY: `begin` leaked exactly this box, and it is taken back once.
        let operation = *unsafe { Box::from_raw(operation) };
        let mut slots = self.operations.take();
        slots.places[operation.place] = null_mut();
        slots.free.push(operation.place);
        self.operations.set(slots);
        operation
    }

    /// Reports how an operation ended.
    pub(super) fn report(&self, operation: Operation, status: UcsStatus) {
        if operation.abandoned {
            return;
        }
        let reason = || self.functions.describe(status);
        match operation.work {
            Transfer::Send { token, .. } if status == OK => self.push(WorkerEvent::Sent { token }),
            Transfer::Send { token, .. } => self.push(WorkerEvent::SendFailed {
                token,
                reason: reason(),
            }),
            Transfer::Receive {
                from,
                header,
                memory,
                length,
            } if status == OK => self.push(WorkerEvent::Received {
                from,
                header,
                payload: Buffer::from_words(memory, length),
            }),
            Transfer::Receive { from, .. } => self.push(WorkerEvent::ReceiveFailed {
                from,
                reason: reason(),
            }),
            Transfer::Close => {}
        }
    }

    /// Forgets the operations of an endpoint and its peer: those being sent are reported as
    /// failed now, and their memory is kept until UCX is done with it.
    pub(super) fn abandon(&self, endpoint: EndpointId, peer: Rank) {
        for operation in self.live() {
            // SAFETY: a live operation is valid, and UCX only passes its address on.
            let operation = unsafe { &mut *operation };
            if operation.abandoned {
                continue;
            }
            match &operation.work {
                Transfer::Send { token, .. } if operation.endpoint == Some(endpoint) => {
                    let (token, reason) = (*token, self.functions.describe(CANCELED));
                    self.push(WorkerEvent::SendFailed { token, reason });
                    operation.abandoned = true;
                }
                Transfer::Receive { from, .. } if *from == peer => operation.abandoned = true,
                _ => {}
            }
        }
    }

    /// Whether something is being sent or closed that somebody waits for.
    pub(super) fn is_busy(&self) -> bool {
        self.live().iter().any(|operation| {
            // SAFETY: as in `abandon`.
            let operation = unsafe { &**operation };
            !operation.abandoned && !matches!(operation.work, Transfer::Receive { .. })
        })
    }

    /// The addresses of all operations that UCX has not ended.
    pub(super) fn live(&self) -> Vec<*mut Operation> {
        let slots = self.operations.take();
        let live = slots
            .places
            .iter()
            .copied()
            .filter(|place| !place.is_null());
        let live = live.collect();
        self.operations.set(slots);
        live
    }
}
