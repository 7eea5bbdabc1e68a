//! The part of UCX's C structures that this crate uses, in the order of `ucp.h` and `ucp_def.h`.
//!
//! UCX reads and writes only the fields whose bit is set in a structure's mask, and new versions
//! only append: a structure that ends early is sound as long as no later bit is set.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`, a packed enumeration of one byte.
pub(crate) type UcsStatus = i8;
/// `UCS_OK`.
pub(crate) const OK: UcsStatus = 0;
/// `UCS_INPROGRESS`.
pub(crate) const IN_PROGRESS: UcsStatus = 1;
/// `UCS_ERR_NO_MEMORY`.
pub(crate) const NO_MEMORY: UcsStatus = -4;
/// `UCS_ERR_UNREACHABLE`.
pub(crate) const UNREACHABLE: UcsStatus = -6;
/// `UCS_ERR_MESSAGE_TRUNCATED`.
pub(crate) const TRUNCATED: UcsStatus = -9;
/// `UCS_ERR_BUSY`.
pub(crate) const BUSY: UcsStatus = -15;
/// `UCS_ERR_CANCELED`.
pub(crate) const CANCELED: UcsStatus = -16;
/// `UCS_ERR_EXCEEDS_LIMIT`.
pub(crate) const EXCEEDS_LIMIT: UcsStatus = -21;
/// `UCS_ERR_LAST`: pointers from here up are statuses.
const LAST: usize = (-100_isize).cast_unsigned();

/// `ucs_status_ptr_t`: nothing, a request, or an error.
pub(crate) type StatusPointer = *mut c_void;

/// What a status pointer means.
pub(crate) enum RequestStatus {
    /// Done at once; no callback comes.
    Done,
    /// The callback comes later.
    Pending,
    /// Failed at once; no callback comes.
    Failed(UcsStatus),
}

/// Reads a status pointer.
pub(crate) fn outcome(pointer: StatusPointer) -> RequestStatus {
    if pointer.is_null() {
        RequestStatus::Done
    } else if pointer as usize >= LAST {
        RequestStatus::Failed(pointer as isize as UcsStatus)
    } else {
        RequestStatus::Pending
    }
}

/// `ucp_params_t`.
#[repr(C)]
pub(crate) struct ContextParams {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *mut c_void,
    pub(crate) request_cleanup: *mut c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
}
/// `UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS`.
pub(crate) const CONTEXT_FIELDS: u64 = 1 | 1 << 6;
/// `UCP_FEATURE_WAKEUP | UCP_FEATURE_AM`.
pub(crate) const FEATURES: u64 = 1 << 4 | 1 << 6;

/// `ucp_worker_params_t`.
#[repr(C)]
pub(crate) struct WorkerParams {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) cpu_mask: [u64; 16],
    pub(crate) events: c_uint,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
}
/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS`.
pub(crate) const WORKER_FIELDS: u64 = 1 | 1 << 5;
/// `UCS_THREAD_MODE_SERIALIZED`: several threads, one at a time.
pub(crate) const SERIALIZED: c_int = 1;
/// `UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK`: operations on dead peers may be left at the end.
pub(crate) const IGNORE_REQUEST_LEAK: u64 = 1;

/// `ucp_worker_attr_t`.
#[repr(C)]
pub(crate) struct WorkerAttributes {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) address_flags: u32,
    pub(crate) address: *mut c_void,
    pub(crate) address_length: usize,
    pub(crate) max_am_header: usize,
    pub(crate) name: [c_char; 32],
    pub(crate) max_debug_string: usize,
}
/// `UCP_WORKER_ATTR_FIELD_ADDRESS`.
pub(crate) const WORKER_ADDRESS: u64 = 1 << 1;
/// `UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER`.
pub(crate) const WORKER_MAX_HEADER: u64 = 1 << 3;

/// `ucs_sock_addr_t`.
#[repr(C)]
pub(crate) struct SocketAddress {
    pub(crate) address: *const c_void,
    pub(crate) length: u32,
}

impl SocketAddress {
    pub(crate) fn none() -> Self {
        Self {
            address: std::ptr::null(),
            length: 0,
        }
    }
}

/// `ucp_ep_params_t`.
#[repr(C)]
pub(crate) struct EndpointParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *const c_void,
    pub(crate) error_mode: c_int,
    pub(crate) error_callback: Option<ErrorCallback>,
    pub(crate) error_argument: *mut c_void,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: c_uint,
    pub(crate) socket_address: SocketAddress,
    pub(crate) connection_request: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) local_socket_address: SocketAddress,
}
/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE`.
pub(crate) const ENDPOINT_FIELDS: u64 = 1 | 1 << 1;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLER`.
pub(crate) const ENDPOINT_ERROR_HANDLER: u64 = 1 << 2;
/// `UCP_ERR_HANDLING_MODE_NONE`.
pub(crate) const ERRORS_UNREPORTED: c_int = 0;
/// `UCP_ERR_HANDLING_MODE_PEER`.
pub(crate) const ERRORS_REPORTED: c_int = 1;
/// `UCP_EP_CLOSE_FLAG_FORCE`.
pub(crate) const CLOSE_FORCED: u32 = 1;

/// `ucp_transport_entry_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TransportEntry {
    pub(crate) transport: *const c_char,
    pub(crate) device: *const c_char,
}

/// `ucp_ep_attr_t`.
#[repr(C)]
pub(crate) struct EndpointAttributes {
    pub(crate) field_mask: u64,
    pub(crate) name: [c_char; 32],
    /// Two `struct sockaddr_storage` of 128 bytes, aligned like a word.
    pub(crate) socket_addresses: [[u64; 16]; 2],
    pub(crate) entries: *mut TransportEntry,
    pub(crate) num_entries: c_uint,
    pub(crate) entry_size: usize,
    pub(crate) user_data: *mut c_void,
}
/// `UCP_EP_ATTR_FIELD_TRANSPORTS`.
pub(crate) const ENDPOINT_TRANSPORTS: u64 = 1 << 3;

/// `ucp_dt_iov_t`.
#[repr(C)]
pub(crate) struct IoVector {
    pub(crate) address: *const c_void,
    pub(crate) length: usize,
}
/// `ucp_dt_make_contig(1)`: plain bytes.
pub(crate) const BYTES: u64 = 1 << 3;
/// `ucp_dt_make_iov()`: a list of [`IoVector`]s.
pub(crate) const PIECES: u64 = 2;

/// `ucp_request_param_t`.
#[repr(C)]
pub(crate) struct RequestParams {
    pub(crate) mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    pub(crate) callback: Completion,
    pub(crate) datatype: u64,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: c_int,
    pub(crate) receive_info: *mut c_void,
    pub(crate) memory_handle: *mut c_void,
}
/// `UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA`.
pub(crate) const REQUEST_CALLBACK: u32 = 1 << 1 | 1 << 2;
/// `UCP_OP_ATTR_FIELD_DATATYPE`.
pub(crate) const REQUEST_DATATYPE: u32 = 1 << 3;
/// `UCP_OP_ATTR_FIELD_FLAGS`.
pub(crate) const REQUEST_FLAGS: u32 = 1 << 4;
/// `UCP_OP_ATTR_FIELD_MEMORY_TYPE`.
pub(crate) const REQUEST_MEMORY_TYPE: u32 = 1 << 6;
/// `UCS_MEMORY_TYPE_HOST`.
pub(crate) const HOST_MEMORY: c_int = 0;

/// The union `cb` of `ucp_request_param_t`.
#[repr(C)]
pub(crate) union Completion {
    pub(crate) send: SendCallback,
    pub(crate) receive: ReceiveCallback,
}

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub(crate) struct HandlerParams {
    pub(crate) field_mask: u64,
    pub(crate) id: c_uint,
    pub(crate) flags: u32,
    pub(crate) callback: MessageCallback,
    pub(crate) argument: *mut c_void,
}
/// `UCP_AM_HANDLER_PARAM_FIELD_{ID, FLAGS, CB, ARG}`.
pub(crate) const HANDLER_FIELDS: u64 = 0b1111;
/// `UCP_AM_FLAG_WHOLE_MSG`: one call per message.
pub(crate) const WHOLE_MESSAGE: u32 = 1;

/// `ucp_am_recv_param_t`.
#[repr(C)]
pub(crate) struct MessageParams {
    pub(crate) attributes: u64,
    pub(crate) reply_endpoint: *mut c_void,
}
/// `UCP_AM_RECV_ATTR_FLAG_RNDV`: the data are still at the sender.
pub(crate) const ANNOUNCED_ONLY: u64 = 1 << 17;

/// `ucp_send_nbx_callback_t`: request, status, user data.
pub(crate) type SendCallback = unsafe extern "C" fn(*mut c_void, UcsStatus, *mut c_void);
/// `ucp_am_recv_data_nbx_callback_t`: request, status, length, user data.
pub(crate) type ReceiveCallback = unsafe extern "C" fn(*mut c_void, UcsStatus, usize, *mut c_void);
/// `ucp_err_handler_cb_t`: argument, endpoint, status.
pub(crate) type ErrorCallback = unsafe extern "C" fn(*mut c_void, *mut c_void, UcsStatus);
/// `ucp_am_recv_callback_t`: argument, header, its length, data, its length, parameters.
pub(crate) type MessageCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const MessageParams,
) -> UcsStatus;
