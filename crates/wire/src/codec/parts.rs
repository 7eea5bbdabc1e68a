//! What messages are made of, apart from values and tensors.

use shardwright_core::{CallPath, MicrobatchId, Rank, RequestId, StepEpoch};

use super::CodecError;
use super::reader::Reader;
use super::writer::Writer;
use crate::message::{ErrorReport, Fetch, Phase};
use crate::tensor::{HeldTensor, TensorMeta};

/// More requests than a rank makes of another between two others.
const MAX_RELEASED: u64 = 1 << 20;
/// More calls within one another than a thread has stack for.
const MAX_PATH: u64 = 1 << 16;

/// WI-3; a tensor that is held elsewhere may come without its bytes.
pub(super) fn check_fit(meta: &TensorMeta, bytes: u64, held: bool) -> Result<(), CodecError> {
    let absent = held && bytes == 0 && meta.num_bytes().is_some();
    if absent || meta.fits(bytes) {
        return Ok(());
    }
    Err(CodecError::TensorSize {
        bytes,
        dtype: meta.dtype.clone(),
        shape: meta.shape.clone(),
        strides: meta.strides.clone(),
    })
}

pub(super) fn write_released(writer: &mut Writer, released: &[RequestId]) {
    writer.list(released, |writer, request| writer.u64(request.0));
}

pub(super) fn write_path(writer: &mut Writer, path: &CallPath) {
    writer.list(&path.0, |writer, number| writer.u32(*number));
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

pub(super) fn read_released(reader: &mut Reader<'_>) -> Result<Vec<RequestId>, CodecError> {
    reader.list("released requests", MAX_RELEASED, |reader| {
        reader.u64().map(RequestId)
    })
}

pub(super) fn read_path(reader: &mut Reader<'_>) -> Result<CallPath, CodecError> {
    let numbers = reader.list("calls in a path", MAX_PATH, Reader::u32)?;
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
