//! A context: a UCX instance with its configuration.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use super::functions::UcpFunctions;
use super::layout::{CONTEXT_FIELDS, ContextParams, FEATURES, OK};
use crate::error::UcxError;
use shardwright_system::Owner;

/// The version of the interface that is asked for: the oldest that is accepted.
const INTERFACE: (u32, u32) = (1, 15);

/// An owned context.
pub(crate) struct Context {
    pub(super) functions: Arc<UcpFunctions>,
    pub(super) handle: *mut c_void,
    owner: Owner,
}

// SAFETY: a context may be used from any thread, one at a time; this type offers no way to use
// it through a shared reference but its one worker's creation.
unsafe impl Send for Context {}

impl Context {
    /// Makes a context. A setting of `required` that UCX does not take is an error; one of
    /// `wanted` may be unknown to a version and is passed over.
    pub(crate) fn create(
        functions: &Arc<UcpFunctions>,
        required: &[(&str, String)],
        wanted: &[(&str, String)],
        num_endpoints: usize,
    ) -> Result<Self, UcxError> {
        let mut config = null_mut();
        // SAFETY: no prefix, no file, and a place for the result.
        let status = unsafe { (functions.config_read)(null(), null(), &raw mut config) };
        check(functions, "read the configuration", status)?;
        let made = Self::configured(functions, config, required, wanted, num_endpoints);
        // SAFETY: the configuration was read above and is not used afterwards.
        unsafe { (functions.config_release)(config) };
        made
    }

    fn configured(
        functions: &Arc<UcpFunctions>,
        config: *mut c_void,
        required: &[(&str, String)],
        wanted: &[(&str, String)],
        num_endpoints: usize,
    ) -> Result<Self, UcxError> {
        for (name, value) in required {
            modify(functions, config, name, value)?;
        }
        for (name, value) in wanted {
            if let Err(error) = modify(functions, config, name, value) {
                tracing::debug!(%error, "a UCX setting is not used");
            }
        }
        let parameters = ContextParams {
            field_mask: CONTEXT_FIELDS,
            features: FEATURES,
            request_size: 0,
            request_init: null_mut(),
            request_cleanup: null_mut(),
            tag_sender_mask: 0,
            mt_workers_shared: 0,
            estimated_num_eps: num_endpoints,
            estimated_num_ppn: 0,
            name: null(),
        };
        let mut handle = null_mut();
        // SAFETY: parameters and configuration live through the call, which copies them.
        let status = unsafe {
            (functions.init)(
                INTERFACE.0,
                INTERFACE.1,
                &raw const parameters,
                config,
                &raw mut handle,
            )
        };
        check(functions, "make a context", status)?;
        Ok(Self {
            functions: Arc::clone(functions),
            handle,
            owner: Owner::this_process(),
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        // SAFETY: the worker, which owns the context, was destroyed before or never made.
        unsafe { (self.functions.cleanup)(self.handle) };
    }
}

fn modify(
    functions: &UcpFunctions,
    config: *mut c_void,
    name: &str,
    value: &str,
) -> Result<(), UcxError> {
    let refused = |reason: String| UcxError::Setting {
        name: name.to_owned(),
        value: value.to_owned(),
        reason,
    };
    let texts = CString::new(name).and_then(|name| Ok((name, CString::new(value)?)));
    let (name, text) = texts.map_err(|error| refused(error.to_string()))?;
    // SAFETY: a live configuration and two texts, which are copied.
    let status = unsafe { (functions.config_modify)(config, name.as_ptr(), text.as_ptr()) };
    if status == OK {
        return Ok(());
    }
    Err(refused(functions.describe(status)))
}

/// An error for a failed call.
pub(super) fn check(
    functions: &UcpFunctions,
    action: &'static str,
    status: i8,
) -> Result<(), UcxError> {
    if status == OK {
        return Ok(());
    }
    Err(UcxError::Call {
        action,
        reason: functions.describe(status),
    })
}
