//! UCX's functions, found by name at run time.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::environment::with_settings;
use super::layout::{
    ContextParams, EndpointAttributes, EndpointParams, HandlerParams, RequestParams, StatusPointer,
    UcsStatus, WorkerAttributes, WorkerParams,
};
use shardwright_system::functions;
use shardwright_system::raw::in_full;

type Handle = *mut c_void;

/// Gives back the signals that UCX took.
const DISABLE_SIGNALS: &str = "ucs_debug_disable_signals";

functions! {
    /// The functions of a loaded UCX. The library is never unloaded: it has threads of its own.
    pub(crate) struct UcpFunctions;
    /// `(status)`: a text that lives for ever.
    status_string = "ucs_status_string": fn(UcsStatus) -> *const c_char;
    /// `(prefix, file, config)`: a configuration from the environment, to be released.
    config_read = "ucp_config_read": fn(*const c_char, *const c_char, *mut Handle) -> UcsStatus;
    /// `(config, name, value)`: changes one setting; the texts are copied.
    config_modify = "ucp_config_modify": fn(Handle, *const c_char, *const c_char) -> UcsStatus;
    /// `(config)`: frees a configuration.
    config_release = "ucp_config_release": fn(Handle);
    /// `(major, minor, parameters, config, context)`: makes a context, if the library is as new
    /// as the given version of the interface; the configuration is copied.
    init = "ucp_init_version": fn(c_uint, c_uint, *const ContextParams, Handle, *mut Handle) -> UcsStatus;
    /// `(context)`: frees a context whose workers are destroyed.
    cleanup = "ucp_cleanup": fn(Handle);
    /// `(context, parameters, worker)`: makes a worker.
    worker_create = "ucp_worker_create": fn(Handle, *const WorkerParams, *mut Handle) -> UcsStatus;
    /// `(worker)`: frees a worker with its endpoints; may run completion callbacks.
    worker_destroy = "ucp_worker_destroy": fn(Handle);
    /// `(worker, attributes)`: fills what the mask asks for; an address is to be released.
    worker_query = "ucp_worker_query": fn(Handle, *mut WorkerAttributes) -> UcsStatus;
    /// `(worker, address)`: frees an address.
    release_address = "ucp_worker_release_address": fn(Handle, Handle);
    /// `(worker)`: advances everything and runs callbacks; 0 when nothing happened.
    progress = "ucp_worker_progress": fn(Handle) -> c_uint;
    /// `(worker, descriptor)`: the descriptor that becomes readable; it belongs to the worker.
    event_descriptor = "ucp_worker_get_efd": fn(Handle, *mut c_int) -> UcsStatus;
    /// `(worker)`: `UCS_OK` when the descriptor will tell of the next event, `UCS_ERR_BUSY` when
    /// something has happened that asks for progress first.
    arm = "ucp_worker_arm": fn(Handle) -> UcsStatus;
    /// `(worker)`: makes the descriptor readable; from any thread, at any time before destruction.
    signal = "ucp_worker_signal": fn(Handle) -> UcsStatus;
    /// `(worker, parameters)`: sets the callback for messages of one id.
    set_handler = "ucp_worker_set_am_recv_handler": fn(Handle, *const HandlerParams) -> UcsStatus;
    /// `(worker, parameters, endpoint)`: starts to connect to an address; does not wait.
    endpoint_create = "ucp_ep_create": fn(Handle, *const EndpointParams, *mut Handle) -> UcsStatus;
    /// `(endpoint, parameters)`: flushes and closes; when forced (only where errors are reported)
    /// ends all operations at once. The endpoint is not to be used again, whatever the result.
    endpoint_close = "ucp_ep_close_nbx": fn(Handle, *const RequestParams) -> StatusPointer;
    /// `(endpoint, attributes)`: fills what the mask asks for; texts live as long as the endpoint.
    endpoint_query = "ucp_ep_query": fn(Handle, *mut EndpointAttributes) -> UcsStatus;
    /// `(endpoint, id, header, its length, data, count, parameters)`: sends a message. Header and
    /// data stay valid and unchanged until it is done. The callback comes only where a request is
    /// returned, which is then to be freed.
    message_send = "ucp_am_send_nbx":
        fn(Handle, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParams) -> StatusPointer;
    /// `(worker, descriptor, memory, length, parameters)`: fetches an announced message into
    /// memory that stays valid until it is done; takes the descriptor over, even on failure.
    message_receive = "ucp_am_recv_data_nbx":
        fn(Handle, *mut c_void, *mut c_void, usize, *const RequestParams) -> StatusPointer;
    /// `(request)`: gives a request back to the library; also from its callback.
    request_free = "ucp_request_free": fn(*mut c_void);
}

impl UcpFunctions {
    /// Loads UCX from a path, or by its name from the system's directories, with `settings`
    /// (`NAME=value`) in the environment while it initialises itself. What `accept` refuses by its
    /// version is unloaded again, as far as it lets itself be unloaded.
    pub(crate) fn load(
        path: &OsStr,
        settings: &[String],
        accept: impl FnOnce((u32, u32, u32)) -> Result<(), String>,
    ) -> Result<Self, String> {
        // SAFETY: the initialisers of UCX's libraries set up their own state only; the settings
        // keep them from replacing functions of libc and handlers of signals.
        let library = with_settings(settings, || unsafe {
            Library::open(Some(path), RTLD_NOW | RTLD_LOCAL)
        })
        .map_err(|error| in_full(&error))?;
        accept(version(&library)?)?;
        // SAFETY: a library with all these names is UCX, whose interface keeps these types in the
        // versions that are accepted.
        let functions = unsafe { Self::find(&library) }.map_err(|error| in_full(&error))?;
        // SAFETY: `void ucs_debug_disable_signals(void)`, in one of the libraries that UCX loads
        // itself, gives back the signals that UCX took while it was loaded.
        let disable = unsafe { library.get::<unsafe extern "C" fn()>(DISABLE_SIGNALS) };
        if let Ok(disable) = disable {
            // SAFETY: takes no arguments and may be called at any time.
            unsafe { disable() };
        }
        // Never unloaded, so that the functions stay callable.
        std::mem::forget(library);
        Ok(functions)
    }

    /// The library's text for a status.
    pub(crate) fn describe(&self, status: UcsStatus) -> String {
        // SAFETY: returns a pointer to a text that is never freed, for any status.
        let text = unsafe { CStr::from_ptr((self.status_string)(status)) };
        text.to_string_lossy().into_owned()
    }
}

/// The version of a library (major, minor, release), if it is UCX.
fn version(library: &Library) -> Result<(u32, u32, u32), String> {
    type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);
    // SAFETY: this function has had this type since it exists.
    let get_version = unsafe { library.get::<GetVersion>("ucp_get_version") };
    let get_version = get_version.map_err(|error| in_full(&error))?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three places to write to.
    unsafe { get_version(&raw mut major, &raw mut minor, &raw mut release) };
    Ok((major, minor, release))
}
