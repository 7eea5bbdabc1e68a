//! Pieces of checkpoints as Python gives them: tensors in host memory, or what is known of them.

use pyo3::intern;
use pyo3::prelude::*;
use shardwright_checkpoint::{Dtype, PieceSpec, PieceView, Region};

use crate::error::argument_error;
use crate::packing::plain_dtype;
use crate::raw;
use crate::torch_types::TorchTypes;

/// The box's offset and size, and the first element and the number of a run of its elements.
pub(crate) type Part = (Vec<u64>, Vec<u64>, Option<(u64, u64)>);

pub(crate) fn region((offset, size, run): Part) -> Region {
    let whole = Region::boxed(offset, size);
    match run {
        None => whole,
        Some((first, count)) => whole.run(first, count),
    }
}

/// The type of the elements as safetensors has it, by torch's name.
fn dtype_of(name: &str) -> Option<Dtype> {
    Some(match name {
        "bool" => Dtype::BOOL,
        "uint8" => Dtype::U8,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "int8" => Dtype::I8,
        "int16" => Dtype::I16,
        "int32" => Dtype::I32,
        "int64" => Dtype::I64,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "float32" => Dtype::F32,
        "float64" => Dtype::F64,
        "complex64" => Dtype::C64,
        "float8_e4m3fn" => Dtype::F8_E4M3,
        "float8_e4m3fnuz" => Dtype::F8_E4M3FNUZ,
        "float8_e5m2" => Dtype::F8_E5M2,
        "float8_e5m2fnuz" => Dtype::F8_E5M2FNUZ,
        "float8_e8m0fnu" => Dtype::F8_E8M0,
        _ => return None,
    })
}

pub(crate) fn known_dtype(tensor: &str, name: &str) -> PyResult<Dtype> {
    dtype_of(name).ok_or_else(|| {
        argument_error(format!(
            "tensor {tensor:?} has dtype {name}, which safetensors cannot hold; view complex tensors as real ones"
        ))
    })
}

/// A tensor in host memory, kept alive, and where its elements are.
pub(crate) struct Memory {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) dtype: Dtype,
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
}

impl Memory {
    pub(crate) fn of(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let Some(dtype) = plain_dtype(TorchTypes::get(py)?, tensor)? else {
            return Err(argument_error(format!(
                "tensor {name:?} is not an ordinary, contiguous tensor in host memory"
            )));
        };
        Ok(Self {
            dtype: known_dtype(name, dtype)?,
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            nbytes: tensor.getattr(intern!(py, "nbytes"))?.extract()?,
            tensor: tensor.clone().unbind(),
        })
    }
}

/// Refuses tensors that share memory, which two reads would write.
pub(crate) fn check_apart(memories: &[(String, Memory, Part)]) -> PyResult<()> {
    let held = memories.iter().filter(|(_, memory, _)| memory.nbytes > 0);
    let mut ranges: Vec<(usize, usize, &str)> = held
        .map(|(name, memory, _)| (memory.address, memory.address + memory.nbytes, &**name))
        .collect();
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(argument_error(format!(
            "what is read of {:?} and {:?} would go into the same memory",
            pair[0].2, pair[1].2
        ))),
    }
}

/// A piece as Python gives it: the tensor's name, the elements, the whole tensor's shape, and the part.
pub(crate) type Given<'py> = (String, Bound<'py, PyAny>, Vec<u64>, Part);

/// A piece whose memory has been looked at.
pub(crate) struct Looked<'a> {
    name: &'a str,
    memory: Memory,
    shape: &'a [u64],
    region: Region,
}

pub(crate) fn given<'a>(pieces: &'a [Given<'_>]) -> PyResult<Vec<Looked<'a>>> {
    let looked = pieces.iter().map(|(name, tensor, shape, part)| {
        Ok(Looked {
            name,
            memory: Memory::of(name, tensor)?,
            shape,
            region: region(part.clone()),
        })
    });
    looked.collect()
}

pub(crate) fn views<'a>(given: &'a [Looked<'_>]) -> Vec<PieceView<'a>> {
    let views = given.iter().map(|one| PieceView {
        name: one.name,
        dtype: one.memory.dtype,
        shape: one.shape,
        region: one.region.clone(),
        bytes: raw::bytes_of(&one.memory.tensor, one.memory.address, one.memory.nbytes),
    });
    views.collect()
}

/// A piece without its elements: the tensor's name, the dtype, the whole tensor's shape, and the part.
pub(crate) type Described = (String, String, Vec<u64>, Part);

pub(crate) fn specs(pieces: &[Described]) -> PyResult<Vec<PieceSpec<'_>>> {
    let specs = pieces.iter().map(|(name, dtype, shape, part)| {
        Ok(PieceSpec {
            name,
            dtype: known_dtype(name, dtype)?,
            shape,
            region: region(part.clone()),
        })
    });
    specs.collect()
}

/// Hands over the bytes of a contiguous tensor in host memory, of which at most `left` may come.
pub(crate) fn with_bytes<R: Send>(
    tensor: &Bound<'_, PyAny>,
    left: u64,
    take: impl FnOnce(&[u8]) -> R + Send,
) -> PyResult<R> {
    let memory = Memory::of("of a part", tensor)?;
    if memory.nbytes as u64 > left {
        return Err(argument_error(format!(
            "{} bytes were given, and {left} are left of the part",
            memory.nbytes
        )));
    }
    let bytes = raw::bytes_of(&memory.tensor, memory.address, memory.nbytes);
    Ok(tensor.py().detach(|| take(bytes)))
}
