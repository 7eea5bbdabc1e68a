//! UCX's callbacks. They run inside calls of the worker, on its thread.

use std::ffi::c_void;
use std::ptr::null_mut;

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::callback_state::{CallbackState, EndpointArgument, Operation, Transfer};
use super::layout::{
    ANNOUNCED_ONLY, Completion, EXCEEDS_LIMIT, HOST_MEMORY, IN_PROGRESS, MessageParams, NO_MEMORY,
    OK, REQUEST_CALLBACK, REQUEST_MEMORY_TYPE, RequestParams, RequestStatus, TRUNCATED, UcsStatus,
    outcome,
};
use crate::admission::Admission;
use crate::error::{ReceiveRefusal, WorkerEvent};

/// The bytes of a header that say who sends it.
pub(crate) const SENDER_BYTES: usize = 4;

impl CallbackState {
    /// A message has come, or its announcement.
    ///
    /// # Safety
    /// Called from UCX's callback with its arguments: `header` and `data` are valid for their lengths,
    /// or `data` is an announcement's descriptor.
    unsafe fn arrive(
        &self,
        header: &[u8],
        data: *mut c_void,
        length: usize,
        announced: bool,
    ) -> UcsStatus {
        // Only an announcement can be answered with an error.
        let answer = |status| if announced { status } else { OK };
        // Nothing is set aside, and nobody is blamed, for what an unknown peer sends.
        let Some((sender, header)) = header.split_first_chunk::<SENDER_BYTES>() else {
            self.admission(Admission::count_unknown_peer);
            return answer(EXCEEDS_LIMIT);
        };
        let from = Rank(u32::from_le_bytes(*sender));
        let Some(header) = self.admission(|admission| admission.admit(from, header)) else {
            return answer(EXCEEDS_LIMIT);
        };
        let refuse = |refusal, status| {
            self.push(WorkerEvent::Refused { from, refusal });
            answer(status)
        };
        if length > self.limit {
            let limit = self.limit;
            return refuse(ReceiveRefusal::TooLong { length, limit }, EXCEEDS_LIMIT);
        }
        let words = length.div_ceil(size_of::<u128>());
        let mut spare = self.spare.take();
        let memory = spare.take(words);
        self.spare.set(spare);
        let Some(mut memory) = memory else {
            return refuse(ReceiveRefusal::NoMemory { length }, NO_MEMORY);
        };
        if let Some(last) = memory.spare_capacity_mut()[..words].last_mut() {
            // The bytes behind the end.
            last.write(0);
        }
        let header = header.to_vec();
        if announced {
            if let Err(refusal) = self.admission(|admission| admission.announce(from, length)) {
                return refuse(refusal, EXCEEDS_LIMIT);
            }
            // SAFETY: upheld by the caller.
            return unsafe { self.fetch(from, header, memory, data, length) };
        }
        if length > 0 {
            // SAFETY: `data` is valid for `length` bytes, `memory` for the words that hold them; all
            // bytes of these words are initialised, as the last word was before.
            unsafe {
                let target = memory.as_mut_ptr();
                std::ptr::copy_nonoverlapping(data.cast::<u8>(), target.cast::<u8>(), length);
                memory.set_len(words);
            }
        }
        self.push(WorkerEvent::Received {
            from,
            header,
            payload: Buffer::from_words(memory, length),
        });
        OK
    }

    /// Fetches an announced message.
    ///
    /// # Safety
    /// `data` is the descriptor of an announcement, and `memory` has room for `length` bytes.
    unsafe fn fetch(
        &self,
        from: Rank,
        header: Vec<u8>,
        mut memory: Vec<u128>,
        data: *mut c_void,
        length: usize,
    ) -> UcsStatus {
        let target = memory.as_mut_ptr();
        let work = Transfer::Receive {
            from,
            header,
            memory,
            length,
        };
        let operation = self.begin(None, work);
        let parameters = RequestParams {
            mask: REQUEST_CALLBACK | REQUEST_MEMORY_TYPE,
            flags: 0,
            request: null_mut(),
            callback: Completion {
                receive: on_received,
            },
            datatype: 0,
            user_data: operation.cast(),
            reply_buffer: null_mut(),
            memory_type: HOST_MEMORY,
            receive_info: null_mut(),
            memory_handle: null_mut(),
        };
        // SAFETY: the memory belongs to the operation, which lives until UCX is done with it; moving
        // the vector into it did not move its elements.
        let result = unsafe {
            (self.functions.message_receive)(
                self.worker.get(),
                data,
                target.cast(),
                length,
                &raw const parameters,
            )
        };
        let status = match outcome(result) {
            RequestStatus::Pending => return IN_PROGRESS,
            RequestStatus::Done => OK,
            RequestStatus::Failed(status) => status,
        };
        // SAFETY: no callback comes, so the operation is still registered and UCX is done with it.
        unsafe { self.received(operation, status, length) };
        IN_PROGRESS
    }

    /// # Safety
    /// As for `end`; and with an `OK` status UCX has written `length` bytes.
    unsafe fn received(&self, operation: *mut Operation, status: UcsStatus, length: usize) {
        // SAFETY: upheld by the caller.
        let mut operation = unsafe { self.end(operation) };
        let mut status = status;
        if let Transfer::Receive {
            from,
            memory,
            length: announced,
            ..
        } = &mut operation.work
        {
            self.admission(|admission| admission.arrived(*from, *announced));
            if status == OK && length == *announced {
                // SAFETY: UCX wrote all bytes, and those behind the end were written before.
                unsafe { memory.set_len(length.div_ceil(size_of::<u128>())) };
            } else if status == OK {
                status = TRUNCATED;
            }
        }
        self.report(operation, status);
    }
}

/// UCX's callback for messages.
///
/// # Safety
/// Called by UCX only, inside a call of the worker whose inbox is `argument`.
pub(super) unsafe extern "C" fn on_message(
    argument: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    parameters: *const MessageParams,
) -> UcsStatus {
    // SAFETY: the handler was set with the worker's inbox, which outlives the worker.
    let inbox = unsafe { &*argument.cast::<CallbackState>() };
    let header = if header_length == 0 {
        &[]
    } else {
        // SAFETY: UCX keeps the header valid during the callback.
        unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_length) }
    };
    // SAFETY: UCX passes valid parameters.
    let announced = unsafe { (*parameters).attributes } & ANNOUNCED_ONLY != 0;
    // SAFETY: these are UCX's arguments.
    unsafe { inbox.arrive(header, data, length, announced) }
}

/// UCX's callback for announced messages that were fetched.
///
/// # Safety
/// Called by UCX only, once, with the operation that was registered for it.
unsafe extern "C" fn on_received(
    request: *mut c_void,
    status: UcsStatus,
    length: usize,
    operation: *mut c_void,
) {
    let operation = operation.cast::<Operation>();
    // SAFETY: the operation is registered until this callback, and its inbox outlives the worker.
    unsafe {
        let inbox = &*(*operation).inbox;
        (inbox.functions.request_free)(request);
        inbox.received(operation, status, length);
    }
}

/// UCX's callback for messages that were sent and endpoints that were closed.
///
/// # Safety
/// Called by UCX only, once, with the operation that was registered for it.
pub(super) unsafe extern "C" fn on_sent(
    request: *mut c_void,
    status: UcsStatus,
    operation: *mut c_void,
) {
    let operation = operation.cast::<Operation>();
    // SAFETY: the operation is registered until this callback, and its inbox outlives the worker.
    unsafe {
        let inbox = &*(*operation).inbox;
        (inbox.functions.request_free)(request);
        let operation = inbox.end(operation);
        inbox.report(operation, status);
    }
}

/// UCX's callback for endpoints that failed.
///
/// # Safety
/// Called by UCX only, with the argument that the endpoint was made with.
pub(super) unsafe extern "C" fn on_error(
    argument: *mut c_void,
    _endpoint: *mut c_void,
    status: UcsStatus,
) {
    // SAFETY: the worker keeps every endpoint's argument until it is destroyed.
    let argument = unsafe { &*argument.cast::<EndpointArgument>() };
    // SAFETY: the inbox outlives the worker.
    let inbox = unsafe { &*argument.inbox };
    inbox.push(WorkerEvent::EndpointFailed {
        endpoint: argument.endpoint,
        peer: argument.peer,
        reason: inbox.functions.describe(status),
    });
}
