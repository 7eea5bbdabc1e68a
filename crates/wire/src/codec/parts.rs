//! What messages are made of, apart from values and tensors.

use shardwright_core::{CallPath, MicrobatchId, ModuleId, Rank, RequestId, StepEpoch};

use super::CodecError;
use super::reader::Reader;
use super::writer::Writer;
use crate::message::{ErrorReport, Fetch, Phase, SequentialRange, TaskContext, Work};
use crate::tensor::HeldTensor;

/// More device types than torch has.
const MAX_AUTOCAST: u64 = 64;
/// More requests than a rank makes of another between two others.
const MAX_RELEASED: u64 = 1 << 20;
/// More calls within one another than a thread has stack for, and longer chains than a model has parts.
const MAX_PATH: u64 = 1 << 16;

pub(super) fn write_work(writer: &mut Writer, work: &Work) {
    match work {
        Work::Forward { module, range } => {
            writer.u8(0);
            writer.u32(module.0);
            writer.option(*range, |writer, range| {
                writer.u32(range.start);
                writer.u32(range.end);
            });
        }
        Work::Backward { module, forward } => {
            writer.u8(1);
            writer.u32(module.0);
            writer.u64(forward.0);
        }
        Work::Close { module, forward } => {
            writer.u8(2);
            writer.u32(module.0);
            writer.u64(forward.0);
        }
        Work::Control { name } => {
            writer.u8(3);
            writer.text(name);
        }
    }
}

pub(super) fn write_context(writer: &mut Writer, context: &TaskContext) {
    writer.bool(context.grad_mode);
    writer.bool(context.inference_mode);
    writer.count(context.autocast.len());
    for (device, dtype, cache) in &context.autocast {
        writer.text(device);
        writer.text(dtype);
        writer.bool(*cache);
    }
    writer.bool(context.checkpointing);
}

pub(super) fn write_released(writer: &mut Writer, released: &[RequestId]) {
    writer.count(released.len());
    for request in released {
        writer.u64(request.0);
    }
}

pub(super) fn write_path(writer: &mut Writer, path: &CallPath) {
    writer.count(path.0.len());
    for number in &path.0 {
        writer.u32(*number);
    }
}

pub(super) fn write_held(writer: &mut Writer, held: HeldTensor) {
    writer.u32(held.holder.0);
    writer.u32(held.requester.0);
    writer.u64(held.request.0);
    writer.u32(held.index);
}

pub(super) fn write_fetch(writer: &mut Writer, fetch: &Fetch) {
    writer.u64(fetch.step.0);
    write_held(writer, fetch.tensor);
    writer.u32(fetch.to.0);
    writer.u32(fetch.requester.0);
    writer.u64(fetch.request.0);
    writer.u32(fetch.index);
}

pub(super) fn write_report(writer: &mut Writer, report: &ErrorReport) {
    writer.u32(report.rank.0);
    writer.text(&report.host);
    writer.option(report.module.as_deref(), Writer::text);
    writer.option(report.microbatch, |writer, microbatch| {
        writer.u32(microbatch.0);
    });
    writer.option(report.phase, |writer, phase| {
        writer.bool(phase == Phase::Backward);
    });
    writer.text(&report.kind);
    writer.text(&report.message);
    writer.text(&report.traceback);
}

pub(super) fn read_work(reader: &mut Reader<'_>) -> Result<Work, CodecError> {
    Ok(match reader.u8()? {
        0 => Work::Forward {
            module: ModuleId(reader.u32()?),
            range: reader.option(|reader| {
                Ok(SequentialRange {
                    start: reader.u32()?,
                    end: reader.u32()?,
                })
            })?,
        },
        1 => Work::Backward {
            module: ModuleId(reader.u32()?),
            forward: RequestId(reader.u64()?),
        },
        2 => Work::Close {
            module: ModuleId(reader.u32()?),
            forward: RequestId(reader.u64()?),
        },
        3 => Work::Control {
            name: reader.text()?,
        },
        found => {
            return Err(CodecError::Tag {
                what: "work",
                found: u64::from(found),
            });
        }
    })
}

pub(super) fn read_context(reader: &mut Reader<'_>) -> Result<TaskContext, CodecError> {
    let grad_mode = reader.bool()?;
    let inference_mode = reader.bool()?;
    let count = reader.count("autocast states", MAX_AUTOCAST)?;
    let mut autocast = Vec::new();
    for _ in 0..count {
        autocast.push((reader.text()?, reader.text()?, reader.bool()?));
    }
    Ok(TaskContext {
        grad_mode,
        inference_mode,
        autocast,
        checkpointing: reader.bool()?,
    })
}

pub(super) fn read_released(reader: &mut Reader<'_>) -> Result<Vec<RequestId>, CodecError> {
    let count = reader.count("released requests", MAX_RELEASED)?;
    let mut released = Vec::new();
    for _ in 0..count {
        released.push(RequestId(reader.u64()?));
    }
    Ok(released)
}

pub(super) fn read_path(reader: &mut Reader<'_>) -> Result<CallPath, CodecError> {
    let count = reader.count("calls in a path", MAX_PATH)?;
    let mut numbers = Vec::new();
    for _ in 0..count {
        numbers.push(reader.u32()?);
    }
    Ok(CallPath(numbers))
}

pub(super) fn read_held(reader: &mut Reader<'_>) -> Result<HeldTensor, CodecError> {
    Ok(HeldTensor {
        holder: Rank(reader.u32()?),
        requester: Rank(reader.u32()?),
        request: RequestId(reader.u64()?),
        index: reader.u32()?,
    })
}

pub(super) fn read_fetch(reader: &mut Reader<'_>) -> Result<Fetch, CodecError> {
    Ok(Fetch {
        step: StepEpoch(reader.u64()?),
        tensor: read_held(reader)?,
        to: Rank(reader.u32()?),
        requester: Rank(reader.u32()?),
        request: RequestId(reader.u64()?),
        index: reader.u32()?,
    })
}

pub(super) fn read_report(reader: &mut Reader<'_>) -> Result<ErrorReport, CodecError> {
    Ok(ErrorReport {
        rank: Rank(reader.u32()?),
        host: reader.text()?,
        module: reader.option(Reader::text)?,
        microbatch: reader.option(|reader| reader.u32().map(MicrobatchId))?,
        phase: reader.option(Reader::bool)?.map(|backward| {
            if backward {
                Phase::Backward
            } else {
                Phase::Forward
            }
        }),
        kind: reader.text()?,
        message: reader.text()?,
        traceback: reader.text()?,
    })
}
