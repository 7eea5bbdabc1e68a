//! What a worker does with its endpoints: send, close, end.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::PoisonError;

use shardwright_core::Rank;
use shardwright_wire::Buffer;

use super::callback_state::{Operation, Transfer};
use super::callbacks::on_sent;
use super::layout::{
    BYTES, CLOSE_FORCED, Completion, HOST_MEMORY, IoVector, OK, PIECES, REQUEST_CALLBACK,
    REQUEST_DATATYPE, REQUEST_FLAGS, REQUEST_MEMORY_TYPE, RequestParams, RequestStatus,
    StatusPointer, outcome,
};
use super::worker::{MESSAGE_ID, RawWorker};
use crate::endpoint::EndpointId;
use crate::error::UcxError;

impl RawWorker {
    /// Sends a message. Its end is an event, unless this fails.
    pub(crate) fn send(
        &mut self,
        endpoint: EndpointId,
        header: Vec<u8>,
        payload: Vec<Buffer>,
        token: u64,
    ) -> Result<(), UcxError> {
        let Some(handle) = self.endpoint(endpoint) else {
            return Err(UcxError::NoSuchEndpoint { endpoint });
        };
        let pieces: Vec<IoVector> = payload
            .iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| IoVector {
                address: piece.as_bytes().as_ptr().cast(),
                length: piece.len(),
            })
            .collect();
        // UCX may read all of this until the operation ends; moving it into the operation moves the
        // vectors, not what they hold.
        let (head, head_length) = (header.as_ptr().cast::<c_void>(), header.len());
        let (data, count, datatype) = match &*pieces {
            [] => (null(), 0, BYTES),
            [piece] => (piece.address, piece.length, BYTES),
            several => (several.as_ptr().cast::<c_void>(), several.len(), PIECES),
        };
        let work = Transfer::Send {
            token,
            _header: header,
            _payload: payload,
            _pieces: pieces,
        };
        let operation = self.inbox().begin(Some(endpoint), work);
        let parameters = request(
            operation,
            REQUEST_DATATYPE | REQUEST_MEMORY_TYPE,
            datatype,
            0,
        );
        // SAFETY: a live endpoint; header, data and the list of pieces belong to the operation, which
        // lives until UCX is done with it, and shared buffers are never written to.
        let result = unsafe {
            (self.functions().message_send)(
                handle,
                MESSAGE_ID,
                head,
                head_length,
                data,
                count,
                &raw const parameters,
            )
        };
        match outcome(result) {
            RequestStatus::Pending => {}
            RequestStatus::Done => {
                // SAFETY: no callback comes, and UCX is done with the operation.
                let operation = unsafe { self.inbox().end(operation) };
                self.inbox().report(operation, OK);
            }
            RequestStatus::Failed(status) => {
                // SAFETY: as above.
                drop(unsafe { self.inbox().end(operation) });
                return Err(UcxError::Call {
                    action: "send a message",
                    reason: self.functions().describe(status),
                });
            }
        }
        Ok(())
    }

    /// Closes an endpoint: when forced, its operations end now; else they are completed first.
    /// [`Self::is_busy`] tells when that is done.
    pub(crate) fn close_endpoint(&mut self, endpoint: EndpointId, forced: bool) {
        let Some(handle) = self.endpoint(endpoint) else {
            return;
        };
        if forced && !self.errors_reported {
            // UCX allows no force here; the endpoint ends with the worker.
            self.forget_endpoint(endpoint);
            return;
        }
        self.forget_endpoint(endpoint);
        let operation = self.inbox().begin(Some(endpoint), Transfer::Close);
        let flags = if forced { CLOSE_FORCED } else { 0 };
        let parameters = request(operation, REQUEST_FLAGS, 0, flags);
        // SAFETY: a live endpoint, which is not used any more.
        let result: StatusPointer =
            unsafe { (self.functions().endpoint_close)(handle, &raw const parameters) };
        if !matches!(outcome(result), RequestStatus::Pending) {
            // SAFETY: no callback comes, and UCX is done with the operation.
            drop(unsafe { self.inbox().end(operation) });
        }
    }

    /// Ends an endpoint and everything that is under way with its peer, without waiting.
    pub(crate) fn abandon(&mut self, endpoint: EndpointId, peer: Rank) {
        self.inbox().abandon(endpoint, peer);
        self.close_endpoint(endpoint, true);
    }

    /// Whether something is being sent or closed.
    pub(crate) fn is_busy(&self) -> bool {
        self.inbox().is_busy()
    }
}

/// Parameters of an operation that ends with [`on_sent`].
fn request(operation: *mut Operation, mask: u32, datatype: u64, flags: u32) -> RequestParams {
    RequestParams {
        mask: REQUEST_CALLBACK | mask,
        flags,
        request: null_mut(),
        callback: Completion { send: on_sent },
        datatype,
        user_data: operation.cast(),
        reply_buffer: null_mut(),
        memory_type: HOST_MEMORY,
        receive_info: null_mut(),
        memory_handle: null_mut(),
    }
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // In a forked child the connections are the parent's; the context's own end looks too.
            return;
        }
        let mut address = (self.waking.worker.lock()).unwrap_or_else(PoisonError::into_inner);
        address.0 = null_mut();
        drop(address);
        // SAFETY: nobody else has the handle any more. The callbacks that this runs find the inbox.
        unsafe { (self.functions().worker_destroy)(self.handle) };
        for operation in self.inbox().live() {
            // SAFETY: registered, and UCX uses nothing of a destroyed worker.
            drop(unsafe { self.inbox().end(operation) });
        }
        for endpoint in self.endpoints.drain(..) {
            // SAFETY: leaked in `connect`, and the endpoint went with the worker.
            drop(unsafe { Box::from_raw(endpoint.argument) });
        }
        // SAFETY: leaked in `create`; no callback comes after the worker's end.
        drop(unsafe { Box::from_raw(self.inbox) });
    }
}
