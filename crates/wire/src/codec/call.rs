//! What requests ask for, and what an answer is. Both stand behind their body, whose tensors they name.

use std::sync::Arc;

use shardwright_core::{CallId, ModuleId, Rank, RequestId};

use super::notes::{
    check_gradients, read_arguments, read_pair, read_results, write_arguments, write_pair,
    write_results,
};
use super::reader::Reader;
use super::value::{self, Budget};
use super::writer::Writer;
use super::{CodecError, Limits};
use crate::call::{
    AnswerKind, BackwardCall, BackwardLink, CloseCall, ForwardCall, ForwardLink, SequentialRange,
    Work,
};
use crate::torch::{Checkpointing, Collecting, SettingValue, TorchContext, TorchSetting};

/// More device types than torch has.
const MAX_AUTOCAST: u64 = 64;
/// More outputs than there are kinds to collect.
const MAX_COLLECTED: u64 = 1 << 16;
/// Longer chains than a model has parts.
const MAX_CHAIN: u64 = 1 << 16;

pub(super) fn write_work(
    writer: &mut Writer,
    work: &Work,
    limits: &Limits,
    tensors: usize,
) -> Result<(), CodecError> {
    match work {
        Work::Forward(call) => {
            writer.u8(0);
            writer.u32(call.module.0);
            writer.option(call.range, write_range);
            writer.u64(call.seed);
            write_arguments(writer, &call.notes, tensors)?;
            write_context(writer, &call.context, limits)?;
            writer.list(&call.chain, write_forward_link);
            writer.bool(call.stopped);
        }
        Work::Backward(call) => {
            check_gradients(&call.gradients, limits, tensors)?;
            writer.u8(1);
            writer.u32(call.module.0);
            writer.u64(call.forward.0);
            writer.list(&call.gradients, |writer, pair| write_pair(writer, *pair));
            writer.list(&call.chain, write_backward_link);
        }
        Work::Close(call) => {
            writer.u8(2);
            writer.u32(call.module.0);
            writer.u64(call.forward.0);
            writer.list(&call.chain, write_backward_link);
        }
        Work::Control { name } => {
            writer.u8(3);
            writer.text(name);
        }
    }
    Ok(())
}

pub(super) fn read_work(
    reader: &mut Reader<'_>,
    limits: &Limits,
    tensors: usize,
) -> Result<Work, CodecError> {
    Ok(match reader.u8()? {
        0 => Work::from(ForwardCall {
            module: ModuleId(reader.u32()?),
            range: reader.option(read_range)?,
            seed: reader.u64()?,
            notes: read_arguments(reader, limits, tensors)?,
            context: read_context(reader, limits)?,
            chain: reader.list("calls in a chain", MAX_CHAIN, read_forward_link)?,
            stopped: reader.bool()?,
        }),
        1 => {
            let call = BackwardCall {
                module: ModuleId(reader.u32()?),
                forward: RequestId(reader.u64()?),
                gradients: reader.list("gradients", limits.tensors, read_pair)?,
                chain: read_backward_chain(reader, limits)?,
            };
            check_gradients(&call.gradients, limits, tensors)?;
            Work::from(call)
        }
        2 => Work::from(CloseCall {
            module: ModuleId(reader.u32()?),
            forward: RequestId(reader.u64()?),
            chain: read_backward_chain(reader, limits)?,
        }),
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

pub(super) fn write_answer(
    writer: &mut Writer,
    kind: &AnswerKind,
    limits: &Limits,
    tensors: usize,
) -> Result<(), CodecError> {
    match kind {
        AnswerKind::Value => writer.u8(0),
        AnswerKind::Result(notes) => {
            writer.u8(1);
            write_results(writer, notes, limits, tensors)?;
        }
        AnswerKind::Passed(notes) => {
            writer.u8(2);
            write_results(writer, notes, limits, tensors)?;
        }
        AnswerKind::Stopped => writer.u8(3),
        AnswerKind::Gradients(gradients) => {
            check_gradients(gradients, limits, tensors)?;
            writer.u8(4);
            writer.list(gradients, |writer, pair| write_pair(writer, *pair));
        }
    }
    Ok(())
}

pub(super) fn read_answer(
    reader: &mut Reader<'_>,
    limits: &Limits,
    tensors: usize,
) -> Result<AnswerKind, CodecError> {
    Ok(match reader.u8()? {
        0 => AnswerKind::Value,
        1 => AnswerKind::Result(Arc::new(read_results(reader, limits, tensors)?)),
        2 => AnswerKind::Passed(Arc::new(read_results(reader, limits, tensors)?)),
        3 => AnswerKind::Stopped,
        4 => {
            let gradients = reader.list("gradients", limits.tensors, read_pair)?;
            check_gradients(&gradients, limits, tensors)?;
            AnswerKind::Gradients(gradients)
        }
        found => {
            return Err(CodecError::Tag {
                what: "answer",
                found: u64::from(found),
            });
        }
    })
}

fn write_range(writer: &mut Writer, range: SequentialRange) {
    writer.u32(range.start);
    writer.u32(range.end);
}

fn read_range(reader: &mut Reader<'_>) -> Result<SequentialRange, CodecError> {
    Ok(SequentialRange {
        start: reader.u32()?,
        end: reader.u32()?,
    })
}

fn write_forward_link(writer: &mut Writer, link: &ForwardLink) {
    writer.u32(link.rank.0);
    writer.u64(link.request.0);
    writer.u32(link.module.0);
    writer.option(link.range, write_range);
    writer.u32(link.call.0);
    writer.u64(link.seed);
}

fn read_forward_link(reader: &mut Reader<'_>) -> Result<ForwardLink, CodecError> {
    Ok(ForwardLink {
        rank: Rank(reader.u32()?),
        request: RequestId(reader.u64()?),
        module: ModuleId(reader.u32()?),
        range: reader.option(read_range)?,
        call: CallId(reader.u32()?),
        seed: reader.u64()?,
    })
}

fn write_backward_link(writer: &mut Writer, link: &BackwardLink) {
    writer.u32(link.rank.0);
    writer.u64(link.request.0);
    writer.u32(link.module.0);
    writer.u64(link.forward.0);
    writer.u32(link.call.0);
    writer.option(link.results.as_deref(), |writer, results| {
        writer.list(results, |writer, pair| write_pair(writer, *pair));
    });
}

fn read_backward_chain(
    reader: &mut Reader<'_>,
    limits: &Limits,
) -> Result<Vec<BackwardLink>, CodecError> {
    reader.list("calls in a chain", MAX_CHAIN, |reader| {
        Ok(BackwardLink {
            rank: Rank(reader.u32()?),
            request: RequestId(reader.u64()?),
            module: ModuleId(reader.u32()?),
            forward: RequestId(reader.u64()?),
            call: CallId(reader.u32()?),
            results: reader.option(|reader| reader.list("gradients", limits.tensors, read_pair))?,
        })
    })
}

fn write_context(
    writer: &mut Writer,
    context: &TorchContext,
    limits: &Limits,
) -> Result<(), CodecError> {
    writer.bool(context.grad_mode);
    writer.bool(context.inference_mode);
    writer.list(&context.autocast, |writer, (device, dtype, cache)| {
        writer.text(device);
        writer.text(dtype);
        writer.bool(*cache);
    });
    writer.option(context.checkpointing, |writer, checkpointing| {
        writer.bool(checkpointing.isolated);
        writer.bool(checkpointing.preserves_rng_state);
        writer.u32(checkpointing.group);
    });
    writer.bool(context.hooks);
    writer.option(context.device.as_deref(), Writer::text);
    writer.count(context.settings.len());
    for (setting, value) in &context.settings {
        if !setting.takes(value) {
            return Err(CodecError::Setting {
                setting: setting.name(),
                found: if setting.is_name() { "flag" } else { "name" },
            });
        }
        writer.u8(*setting as u8);
        match value {
            SettingValue::Flag(flag) => writer.bool(*flag),
            SettingValue::Name(name) => writer.text(name),
        }
    }
    writer.bool(context.collector.is_some());
    if let Some(entries) = &context.collector {
        writer.count(entries.len());
        for (name, collecting) in entries {
            writer.text(name);
            match collecting {
                Collecting::Items(items) => {
                    writer.u8(0);
                    writer.u32(*items);
                }
                Collecting::Other(other) => {
                    writer.u8(1);
                    value::write(writer, other, 0, &mut Budget::new(limits, 0))?;
                }
            }
        }
    }
    Ok(())
}

fn read_context(reader: &mut Reader<'_>, limits: &Limits) -> Result<TorchContext, CodecError> {
    Ok(TorchContext {
        grad_mode: reader.bool()?,
        inference_mode: reader.bool()?,
        autocast: reader.list("autocast states", MAX_AUTOCAST, |reader| {
            Ok((reader.text()?, reader.text()?, reader.bool()?))
        })?,
        checkpointing: reader.option(|reader| {
            Ok(Checkpointing {
                isolated: reader.bool()?,
                preserves_rng_state: reader.bool()?,
                group: reader.u32()?,
            })
        })?,
        hooks: reader.bool()?,
        device: reader.option(Reader::text)?,
        settings: reader.list("settings", TorchSetting::ALL.len() as u64, read_setting)?,
        collector: reader.option(|reader| {
            reader.list("collected outputs", MAX_COLLECTED, |reader| {
                Ok((reader.text()?, read_collecting(reader, limits)?))
            })
        })?,
    })
}

fn read_setting(reader: &mut Reader<'_>) -> Result<(TorchSetting, SettingValue), CodecError> {
    let number = reader.u8()?;
    let Some(setting) = TorchSetting::ALL.get(usize::from(number)) else {
        return Err(CodecError::Tag {
            what: "setting",
            found: u64::from(number),
        });
    };
    let value = if setting.is_name() {
        SettingValue::Name(reader.text()?)
    } else {
        SettingValue::Flag(reader.bool()?)
    };
    Ok((*setting, value))
}

fn read_collecting(reader: &mut Reader<'_>, limits: &Limits) -> Result<Collecting, CodecError> {
    match reader.u8()? {
        0 => reader.u32().map(Collecting::Items),
        1 => value::read(reader, 0, &mut Budget::new(limits, 0)).map(Collecting::Other),
        found => Err(CodecError::Tag {
            what: "collected output",
            found: u64::from(found),
        }),
    }
}
