//! Trees of values.

use super::reader::Reader;
use super::writer::{Writer, bounded};
use super::{CodecError, Limits};
use crate::value::Value;

const NONE: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
const INT: u8 = 3;
const BIG_INT: u8 = 4;
const FLOAT: u8 = 5;
const COMPLEX: u8 = 6;
const STR: u8 = 7;
const BYTES: u8 = 8;
const LIST: u8 = 9;
const TUPLE: u8 = 10;
const SET: u8 = 11;
const FROZEN_SET: u8 = 12;
const DICT: u8 = 13;
const SLICE: u8 = 14;
const ELLIPSIS: u8 = 15;
const DTYPE: u8 = 16;
const DEVICE: u8 = 17;
const SIZE: u8 = 18;
const TORCH_CONSTANT: u8 = 19;
const REGISTERED: u8 = 20;
const TENSOR: u8 = 21;

/// What of the limits is left while a tree is walked.
pub(super) struct Budget {
    limits: Limits,
    nodes: u64,
    tensors: usize,
}

impl Budget {
    pub(super) fn new(limits: &Limits, tensors: usize) -> Self {
        Self {
            limits: *limits,
            nodes: 0,
            tensors,
        }
    }

    fn enter(&mut self, depth: u64) -> Result<(), CodecError> {
        bounded("levels of nesting", depth, self.limits.depth)?;
        self.nodes += 1;
        bounded("values in one message", self.nodes, self.limits.nodes)
    }

    fn tensor(&self, index: u32) -> Result<(), CodecError> {
        if (index as usize) < self.tensors {
            return Ok(());
        }
        Err(CodecError::TensorIndex {
            index,
            tensors: self.tensors,
        })
    }
}

pub(super) fn write(
    writer: &mut Writer,
    value: &Value,
    depth: u64,
    budget: &mut Budget,
) -> Result<(), CodecError> {
    budget.enter(depth)?;
    match value {
        Value::None => writer.u8(NONE),
        Value::Bool(flag) => writer.u8(if *flag { TRUE } else { FALSE }),
        Value::Int(number) => {
            writer.u8(INT);
            writer.i64(*number);
        }
        Value::BigInt(text) => tagged_text(writer, BIG_INT, text),
        Value::Float(number) => {
            writer.u8(FLOAT);
            writer.f64(*number);
        }
        Value::Complex(real, imaginary) => {
            writer.u8(COMPLEX);
            writer.f64(*real);
            writer.f64(*imaginary);
        }
        Value::Str(text) => tagged_text(writer, STR, text),
        Value::Bytes(bytes) => {
            writer.u8(BYTES);
            writer.blob(bytes);
        }
        Value::List(items) => write_items(writer, LIST, items, depth, budget)?,
        Value::Tuple(items) => write_items(writer, TUPLE, items, depth, budget)?,
        Value::Set(items, false) => write_items(writer, SET, items, depth, budget)?,
        Value::Set(items, true) => write_items(writer, FROZEN_SET, items, depth, budget)?,
        Value::Dict(entries) => {
            writer.u8(DICT);
            writer.count(entries.len());
            for (key, item) in entries {
                write(writer, key, depth + 1, budget)?;
                write(writer, item, depth + 1, budget)?;
            }
        }
        Value::Slice(parts) => {
            writer.u8(SLICE);
            for part in parts.iter() {
                write(writer, part, depth + 1, budget)?;
            }
        }
        Value::Ellipsis => writer.u8(ELLIPSIS),
        Value::Dtype(name) => tagged_text(writer, DTYPE, name),
        Value::Device(name) => tagged_text(writer, DEVICE, name),
        Value::Size(sizes) => {
            writer.u8(SIZE);
            writer.count(sizes.len());
            for size in sizes {
                writer.i64(*size);
            }
        }
        Value::TorchConstant(name) => tagged_text(writer, TORCH_CONSTANT, name),
        Value::Registered(name, fields) => {
            tagged_text(writer, REGISTERED, name);
            write(writer, fields, depth + 1, budget)?;
        }
        Value::Tensor(index) => {
            budget.tensor(*index)?;
            writer.u8(TENSOR);
            writer.u32(*index);
        }
    }
    Ok(())
}

fn tagged_text(writer: &mut Writer, tag: u8, text: &str) {
    writer.u8(tag);
    writer.text(text);
}

fn write_items(
    writer: &mut Writer,
    tag: u8,
    items: &[Value],
    depth: u64,
    budget: &mut Budget,
) -> Result<(), CodecError> {
    writer.u8(tag);
    writer.count(items.len());
    items
        .iter()
        .try_for_each(|item| write(writer, item, depth + 1, budget))
}

pub(super) fn read(
    reader: &mut Reader<'_>,
    depth: u64,
    budget: &mut Budget,
) -> Result<Value, CodecError> {
    budget.enter(depth)?;
    Ok(match reader.u8()? {
        NONE => Value::None,
        FALSE => Value::Bool(false),
        TRUE => Value::Bool(true),
        INT => Value::Int(reader.i64()?),
        BIG_INT => Value::BigInt(reader.text()?),
        FLOAT => Value::Float(reader.f64()?),
        COMPLEX => Value::Complex(reader.f64()?, reader.f64()?),
        STR => Value::Str(reader.text()?),
        BYTES => Value::Bytes(reader.blob()?.to_vec()),
        LIST => Value::List(read_items(reader, depth, budget)?),
        TUPLE => Value::Tuple(read_items(reader, depth, budget)?),
        SET => Value::Set(read_items(reader, depth, budget)?, false),
        FROZEN_SET => Value::Set(read_items(reader, depth, budget)?, true),
        DICT => {
            let count = reader.count("dictionary entries", budget.limits.nodes)?;
            let mut entries = Vec::new();
            for _ in 0..count {
                let key = read(reader, depth + 1, budget)?;
                entries.push((key, read(reader, depth + 1, budget)?));
            }
            Value::Dict(entries)
        }
        SLICE => Value::Slice(Box::new([
            read(reader, depth + 1, budget)?,
            read(reader, depth + 1, budget)?,
            read(reader, depth + 1, budget)?,
        ])),
        ELLIPSIS => Value::Ellipsis,
        DTYPE => Value::Dtype(reader.text()?),
        DEVICE => Value::Device(reader.text()?),
        SIZE => {
            let count = reader.count("dimensions", budget.limits.dimensions)?;
            Value::Size((0..count).map(|_| reader.i64()).collect::<Result<_, _>>()?)
        }
        TORCH_CONSTANT => Value::TorchConstant(reader.text()?),
        REGISTERED => {
            let name = reader.text()?;
            Value::Registered(name, Box::new(read(reader, depth + 1, budget)?))
        }
        TENSOR => {
            let index = reader.u32()?;
            budget.tensor(index)?;
            Value::Tensor(index)
        }
        found => {
            return Err(CodecError::Tag {
                what: "value",
                found: u64::from(found),
            });
        }
    })
}

fn read_items(
    reader: &mut Reader<'_>,
    depth: u64,
    budget: &mut Budget,
) -> Result<Vec<Value>, CodecError> {
    let count = reader.count("items", budget.limits.nodes)?;
    let mut items = Vec::new();
    for _ in 0..count {
        items.push(read(reader, depth + 1, budget)?);
    }
    Ok(items)
}
