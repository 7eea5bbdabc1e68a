//! A worker: the handle through which everything else is reached.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::callback_state::{CallbackState, EndpointArgument};
use super::callbacks::{on_error, on_message};
use super::context::{Context, check};
use super::functions::UcpFunctions;
use super::layout::{
    BUSY, ENDPOINT_ERROR_HANDLER, ENDPOINT_FIELDS, ENDPOINT_TRANSPORTS, ERRORS_REPORTED,
    ERRORS_UNREPORTED, EndpointAttributes, EndpointParams, HANDLER_FIELDS, HandlerParams,
    IGNORE_REQUEST_LEAK, OK, SERIALIZED, SocketAddress, TransportEntry, UNREACHABLE, WHOLE_MESSAGE,
    WORKER_ADDRESS, WORKER_FIELDS, WORKER_MAX_HEADER, WorkerAttributes, WorkerParams,
};
use crate::admission::AdmissionKey;
use crate::endpoint::EndpointId;
use crate::error::{UcxError, WorkerEvent};
use shardwright_system::Owner;

/// The id of this crate's active messages.
pub(super) const MESSAGE_ID: u32 = 0;

/// The most transports that one endpoint is asked about.
const MOST_TRANSPORTS: usize = 16;

/// An owned worker with its context and inbox.
pub(crate) struct RawWorker {
    context: Context,
    pub(super) handle: *mut c_void,
    pub(super) inbox: *mut CallbackState,
    /// Whether endpoints report errors; then they can be closed by force.
    pub(super) errors_reported: bool,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) waking: Arc<Waking>,
    events: Arc<OwnedFd>,
    pub(super) owner: Owner,
}

/// An endpoint; its handle is null once it is closed.
pub(super) struct Endpoint {
    handle: *mut c_void,
    pub(super) argument: *mut EndpointArgument,
}

// SAFETY: UCX's serialised mode allows any thread, one at a time; the type is not `Sync`.
unsafe impl Send for RawWorker {}

/// The worker's handle for other threads; null once the worker is closed.
pub(super) struct Waking {
    functions: Arc<UcpFunctions>,
    pub(super) worker: Mutex<WorkerAddress>,
}

pub(super) struct WorkerAddress(pub(super) *mut c_void);

// SAFETY: only passed to `signal`, which is safe from any thread, under the lock that the worker
// takes before it is destroyed.
unsafe impl Send for WorkerAddress {}

/// Waits for a worker's events, and wakes who waits; for any thread, also after the worker's end.
#[derive(Clone)]
pub struct EventHandle {
    waking: Arc<Waking>,
    events: Arc<OwnedFd>,
    owner: Owner,
}

impl EventHandle {
    /// The descriptor, for waiting on it together with others.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Sleeps until the armed worker has an event or is signalled; `false` when `timeout` has passed.
    pub fn wait(&self, timeout: Duration) -> std::io::Result<bool> {
        let mut descriptors = [PollFd::new(&*self.events, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).map_err(std::io::Error::other)?;
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes who waits, once: a signal that comes before the wait ends it too.
    pub fn signal(&self) {
        if !self.owner.is_here() {
            return;
        }
        let worker = self.waking.worker.lock();
        let worker = worker.unwrap_or_else(PoisonError::into_inner);
        if !worker.0.is_null() {
            // SAFETY: the worker is not destroyed while the lock is held and the handle is there.
            let status = unsafe { (self.waking.functions.signal)(worker.0) };
            if status != OK {
                tracing::warn!(status, "UCX could not wake its worker");
            }
        }
    }
}

impl std::fmt::Debug for EventHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("EventHandle")
            .finish_non_exhaustive()
    }
}

impl RawWorker {
    /// Makes the context's worker. It takes payloads of `limit` bytes at most, and keeps
    /// `spare_limit` bytes of memory that was given back.
    pub(crate) fn create(
        context: Context,
        limit: usize,
        spare_limit: usize,
        errors_reported: bool,
    ) -> Result<Self, UcxError> {
        let functions = Arc::clone(&context.functions);
        let parameters = WorkerParams {
            field_mask: WORKER_FIELDS,
            thread_mode: SERIALIZED,
            cpu_mask: [0; 16],
            events: 0,
            user_data: null_mut(),
            event_fd: -1,
            flags: IGNORE_REQUEST_LEAK,
        };
        let mut handle = null_mut();
        // SAFETY: a live context, and parameters that live through the call.
        let status = unsafe {
            (functions.worker_create)(context.handle, &raw const parameters, &raw mut handle)
        };
        check(&functions, "make a worker", status)?;
        let inbox = CallbackState::new(Arc::clone(&functions), limit, spare_limit);
        inbox.worker.set(handle);
        let inbox = Box::into_raw(Box::new(inbox));
        let set_up = Self::set_up(&functions, handle, inbox);
        let events = match set_up {
            Ok(events) => Arc::new(events),
            Err(error) => {
                // SAFETY: made above and known to nobody else; after it the inbox is not used.
                unsafe {
                    (functions.worker_destroy)(handle);
                    drop(Box::from_raw(inbox));
                }
                return Err(error);
            }
        };
        let worker = Mutex::new(WorkerAddress(handle));
        Ok(Self {
            context,
            handle,
            inbox,
            errors_reported,
            endpoints: Vec::new(),
            waking: Arc::new(Waking { functions, worker }),
            events,
            owner: Owner::this_process(),
        })
    }

    /// Sets the callback, and gives a descriptor of the events that outlives the worker.
    fn set_up(
        functions: &UcpFunctions,
        handle: *mut c_void,
        inbox: *mut CallbackState,
    ) -> Result<OwnedFd, UcxError> {
        let handler = HandlerParams {
            field_mask: HANDLER_FIELDS,
            id: MESSAGE_ID,
            flags: WHOLE_MESSAGE,
            callback: on_message,
            argument: inbox.cast(),
        };
        // SAFETY: a live worker; the inbox outlives it.
        let status = unsafe { (functions.set_handler)(handle, &raw const handler) };
        check(functions, "set the handler of messages", status)?;
        let mut descriptor: c_int = -1;
        // SAFETY: a live worker and a place for the result.
        let status = unsafe { (functions.event_descriptor)(handle, &raw mut descriptor) };
        check(functions, "give its event descriptor", status)?;
        // SAFETY: the descriptor is open as long as the worker, which outlives this borrow.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        borrowed
            .try_clone_to_owned()
            .map_err(|error| UcxError::Call {
                action: "duplicate its event descriptor",
                reason: error.to_string(),
            })
    }

    pub(super) fn functions(&self) -> &UcpFunctions {
        &self.context.functions
    }

    pub(super) fn inbox(&self) -> &CallbackState {
        // SAFETY: made in `create`, and freed only in `drop`, after the worker was destroyed.
        unsafe { &*self.inbox }
    }

    /// The handle for those who wait and wake.
    pub(crate) fn event_handle(&self) -> EventHandle {
        EventHandle {
            waking: Arc::clone(&self.waking),
            events: Arc::clone(&self.events),
            owner: self.owner,
        }
    }

    /// The worker's address, for its peers.
    pub(crate) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let attributes = self.query(WORKER_ADDRESS)?;
        // SAFETY: UCX filled address and length, which stay valid until they are released.
        unsafe {
            let bytes = std::slice::from_raw_parts(
                attributes.address.cast::<u8>(),
                attributes.address_length,
            );
            let address = bytes.to_vec();
            (self.functions().release_address)(self.handle, attributes.address);
            Ok(address)
        }
    }

    /// The longest header of a message.
    pub(crate) fn max_header(&self) -> Result<usize, UcxError> {
        Ok(self.query(WORKER_MAX_HEADER)?.max_am_header)
    }

    fn query(&self, field_mask: u64) -> Result<WorkerAttributes, UcxError> {
        let mut attributes = WorkerAttributes {
            field_mask,
            thread_mode: 0,
            address_flags: 0,
            address: null_mut(),
            address_length: 0,
            max_am_header: 0,
            name: [0; 32],
            max_debug_string: 0,
        };
        // SAFETY: a live worker and attributes of at least the fields asked for.
        let status = unsafe { (self.functions().worker_query)(self.handle, &raw mut attributes) };
        check(self.functions(), "describe its worker", status)?;
        Ok(attributes)
    }

    /// Advances everything; `false` when there was nothing to do.
    pub(crate) fn progress(&mut self) -> bool {
        // SAFETY: a live worker, by its one owner, not inside a callback.
        unsafe { (self.functions().progress)(self.handle) != 0 }
    }

    /// Prepares the descriptor for a sleep; `false` when there is something to do first.
    pub(crate) fn arm(&mut self) -> Result<bool, UcxError> {
        // SAFETY: as for `progress`.
        let status = unsafe { (self.functions().arm)(self.handle) };
        if status == BUSY {
            return Ok(false);
        }
        check(self.functions(), "arm its event descriptor", status)?;
        Ok(true)
    }

    /// What has happened.
    pub(crate) fn take_events(&mut self) -> Vec<WorkerEvent> {
        self.inbox().events.take()
    }

    /// Lets in only ranks below `world` that know the key.
    pub(crate) fn require(&mut self, key: AdmissionKey, world: u32) {
        let inbox = self.inbox();
        inbox.admission(|admission| admission.require(key, world));
    }

    /// How many messages were dropped for want of the key.
    pub(crate) fn unknown_peers(&self) -> u64 {
        self.inbox()
            .admission(|admission| admission.unknown_peers())
    }

    /// Memory for messages to come.
    pub(crate) fn give_back(&mut self, memory: Vec<u128>) {
        let mut spare = self.inbox().spare.take();
        spare.give_back(memory);
        self.inbox().spare.set(spare);
    }

    /// Begins to connect to a peer's worker.
    pub(crate) fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<EndpointId, UcxError> {
        let endpoint = EndpointId(u32::try_from(self.endpoints.len()).expect("few endpoints"));
        let argument = Box::into_raw(Box::new(EndpointArgument {
            inbox: self.inbox,
            endpoint,
            peer,
        }));
        let (error_mode, reporting) = if self.errors_reported {
            (ERRORS_REPORTED, ENDPOINT_ERROR_HANDLER)
        } else {
            (ERRORS_UNREPORTED, 0)
        };
        // UCX reads integers in the address, and its length stands inside: aligned, and with room.
        let aligned = Buffer::copy_of(&[address, &[0; 16]].concat());
        let parameters = EndpointParams {
            field_mask: ENDPOINT_FIELDS | reporting,
            address: aligned.as_bytes().as_ptr().cast(),
            error_mode,
            error_callback: Some(on_error),
            error_argument: argument.cast(),
            user_data: null_mut(),
            flags: 0,
            socket_address: SocketAddress::none(),
            connection_request: null_mut(),
            name: null(),
            local_socket_address: SocketAddress::none(),
        };
        let mut handle = null_mut();
        // SAFETY: a live worker; the address comes from a peer that has proved the job's secret, and
        // the argument lives until the worker is destroyed.
        let status = unsafe {
            (self.functions().endpoint_create)(self.handle, &raw const parameters, &raw mut handle)
        };
        // Kept even when this failed: the endpoint's number is not used again.
        self.endpoints.push(Endpoint { handle, argument });
        if status != OK {
            self.endpoints[endpoint.0 as usize].handle = null_mut();
        }
        if status == UNREACHABLE {
            return Err(UcxError::Unreachable { peer });
        }
        check(self.functions(), "connect to a peer", status)?;
        Ok(endpoint)
    }

    /// The handle of an endpoint that is open.
    pub(super) fn endpoint(&self, endpoint: EndpointId) -> Option<*mut c_void> {
        let handle = self.endpoints.get(endpoint.0 as usize)?.handle;
        (!handle.is_null()).then_some(handle)
    }

    /// Forgets the handle of an endpoint that is being closed.
    pub(super) fn forget_endpoint(&mut self, endpoint: EndpointId) {
        if let Some(endpoint) = self.endpoints.get_mut(endpoint.0 as usize) {
            endpoint.handle = null_mut();
        }
    }

    /// Whether an endpoint is open.
    pub(crate) fn is_open(&self, endpoint: EndpointId) -> bool {
        self.endpoint(endpoint).is_some()
    }

    /// The transports that an open endpoint uses, as `transport/device`.
    pub(crate) fn transports(&self, endpoint: EndpointId) -> Result<Vec<String>, UcxError> {
        let Some(handle) = self.endpoint(endpoint) else {
            return Ok(Vec::new());
        };
        let nothing = TransportEntry {
            transport: null(),
            device: null(),
        };
        let mut entries = [nothing; MOST_TRANSPORTS];
        let mut attributes = EndpointAttributes {
            field_mask: ENDPOINT_TRANSPORTS,
            name: [0; 32],
            socket_addresses: [[0; 16]; 2],
            entries: entries.as_mut_ptr(),
            num_entries: MOST_TRANSPORTS as u32,
            entry_size: size_of::<TransportEntry>(),
            user_data: null_mut(),
        };
        // SAFETY: a live endpoint, and room for as many entries as are said to be there.
        let status = unsafe { (self.functions().endpoint_query)(handle, &raw mut attributes) };
        check(self.functions(), "describe an endpoint", status)?;
        let text = |text| {
            // SAFETY: UCX filled in texts that live as long as the endpoint.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().into_owned()
        };
        let filled = entries.iter().take(attributes.num_entries as usize);
        Ok(filled
            .filter(|entry| !entry.transport.is_null() && !entry.device.is_null())
            .map(|entry| format!("{}/{}", text(entry.transport), text(entry.device)))
            .collect())
    }
}
