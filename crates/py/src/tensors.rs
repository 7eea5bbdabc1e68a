//! Tensors' bytes on their way between Python and messages.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use shardwright_comm::TensorMemory;
use shardwright_core::{Rank, RequestId};
use shardwright_wire::{Buffer, HeldTensor, TensorMeta, TensorPart};

use crate::error::device_error;

/// `(dtype, shape, strides, device, requires_grad)`.
pub(crate) type Meta = (String, Vec<u64>, Vec<u64>, String, bool);

/// The type of the devices whose memory is sent and received as such.
const CUDA: &str = "cuda";

/// Where the node of this process keeps tensors on their way, until it is closed.
static MEMORY: Mutex<Weak<TensorMemory>> = Mutex::new(Weak::new());

/// Use a node's memory from now on.
pub(crate) fn set_memory(memory: &Arc<TensorMemory>) {
    *MEMORY.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(memory);
}

pub(crate) fn memory() -> Option<Arc<TensorMemory>> {
    MEMORY
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .upgrade()
}

pub(crate) fn checked(meta: TensorMeta, nbytes: usize) -> PyResult<TensorMeta> {
    if meta.fits(nbytes as u64) {
        return Ok(meta);
    }
    Err(PyValueError::new_err(format!(
        "{nbytes} bytes are not a dense tensor of dtype {}, shape {:?} and strides {:?}",
        meta.dtype, meta.shape, meta.strides
    )))
}

/// The tensors of one body, copied out of torch's memory or received.
#[pyclass(frozen, module = "shardwright._core")]
#[derive(Default)]
pub(crate) struct TensorParts(Mutex<Vec<TensorPart>>);

impl TensorParts {
    pub(crate) fn received(parts: Vec<TensorPart>) -> Self {
        Self(Mutex::new(parts))
    }

    /// The parts, which are then gone from here.
    pub(crate) fn take(&self) -> Vec<TensorPart> {
        std::mem::take(&mut *self.parts())
    }

    /// What is left of the parts, for showing them.
    pub(crate) fn copies(&self) -> Vec<TensorPart> {
        self.parts().clone()
    }

    /// The tensors' descriptions.
    pub(crate) fn metas(&self) -> Vec<TensorMeta> {
        self.parts().iter().map(|part| part.meta.clone()).collect()
    }

    pub(crate) fn parts(&self) -> std::sync::MutexGuard<'_, Vec<TensorPart>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub(crate) fn with<T>(
        &self,
        index: usize,
        look: impl FnOnce(&mut TensorPart) -> T,
    ) -> PyResult<T> {
        let mut parts = self.parts();
        let len = parts.len();
        parts
            .get_mut(index)
            .map(look)
            .ok_or_else(|| PyIndexError::new_err(format!("tensor {index} of a body of {len}")))
    }
}

pub(crate) fn meta_of(meta: &TensorMeta) -> Meta {
    (
        meta.dtype.clone(),
        meta.shape.clone(),
        meta.strides.clone(),
        meta.device.clone(),
        meta.requires_grad,
    )
}

#[pymethods]
impl TensorParts {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Add a tensor in the memory of CUDA device `ordinal`, behind what `stream` has been given so far; does not wait.
    /// False, and nothing is added, where there is no way or no room for it.
    ///
    /// The memory stays the tensor's, and unchanged, as the stream sees it.
    #[pyo3(signature = (address, nbytes, dtype, shape, strides, requires_grad, *, ordinal, stream))]
    #[expect(clippy::too_many_arguments, reason = "one for each field of a tensor")]
    fn append_device(
        &self,
        py: Python<'_>,
        address: u64,
        nbytes: usize,
        dtype: String,
        shape: Vec<u64>,
        strides: Vec<u64>,
        requires_grad: bool,
        ordinal: i32,
        stream: u64,
    ) -> PyResult<bool> {
        let meta = TensorMeta {
            dtype,
            shape,
            strides,
            device: CUDA.to_owned(),
            requires_grad,
        };
        let meta = checked(meta, nbytes)?;
        let memory = memory().unwrap_or_default();
        let Some(device) = memory.device() else {
            return Ok(false);
        };
        let data = py.detach(|| device.send_from(ordinal, address, nbytes, stream));
        let data = data.map_err(|error| device_error(&error))?;
        let added = data.map(|data| self.parts().push(TensorPart::new(meta, data)));
        Ok(added.is_some())
    }

    /// Take a tensor's bytes into the memory of CUDA device `ordinal`, behind what `stream` has been given so far; does
    /// not wait. False, and nothing is taken, where there is no way.
    ///
    /// The memory stays the tensor's, and unused, as the stream sees it.
    #[pyo3(signature = (index, address, *, ordinal, stream))]
    fn take_into_device(
        &self,
        py: Python<'_>,
        index: usize,
        address: u64,
        ordinal: i32,
        stream: u64,
    ) -> PyResult<bool> {
        let memory = memory().unwrap_or_default();
        let Some(device) = memory.device() else {
            return Ok(false);
        };
        let data = self.with(index, |part| {
            let here = part.meta.fits(part.data.len() as u64);
            here.then(|| std::mem::take(&mut part.data))
        })?;
        let Some(data) = data else {
            return Ok(false);
        };
        let taken = py.detach(|| device.receive_into(&data, ordinal, address, stream));
        if !matches!(taken, Ok(true)) {
            self.with(index, |part| part.data = data)?;
        }
        taken.map_err(|error| device_error(&error))
    }

    fn __len__(&self) -> usize {
        self.parts().len()
    }

    /// `(dtype, shape, strides, device, requires_grad)` of a tensor.
    pub(crate) fn meta(&self, index: usize) -> PyResult<Meta> {
        self.with(index, |part| meta_of(&part.meta))
    }

    /// For each tensor whether it requires a gradient at its receiver.
    pub(crate) fn needs(&self) -> Vec<bool> {
        let parts = self.parts();
        parts.iter().map(|part| part.meta.requires_grad).collect()
    }

    /// Add a tensor of an answer to a request of `requester`, which `holder` holds: it goes from there to where this
    /// body goes.
    #[pyo3(signature = (dtype, shape, strides, device, requires_grad, *, holder, requester, request, index))]
    #[expect(clippy::too_many_arguments, reason = "one for each field of a tensor")]
    fn append_held(
        &self,
        dtype: String,
        shape: Vec<u64>,
        strides: Vec<u64>,
        device: String,
        requires_grad: bool,
        holder: u32,
        requester: u32,
        request: u64,
        index: u32,
    ) {
        let meta = TensorMeta {
            dtype,
            shape,
            strides,
            device,
            requires_grad,
        };
        let held = HeldTensor {
            holder: Rank(holder),
            requester: Rank(requester),
            request: RequestId(request),
            index,
        };
        self.parts().push(TensorPart {
            meta,
            data: Buffer::default(),
            held: Some(held),
        });
    }

    /// `(holder, requester, request, index)` of a tensor that a rank holds; None for another one.
    fn held(&self, index: usize) -> PyResult<Option<(u32, u32, u64, u32)>> {
        self.with(index, |part| {
            let held = part.held?;
            Some((held.holder.0, held.requester.0, held.request.0, held.index))
        })
    }

    /// Whether a tensor's bytes are here, and not only with the rank that holds it.
    fn is_here(&self, index: usize) -> PyResult<bool> {
        self.with(index, |part| part.is_here())
    }
}
