//! The order of tasks over a tensor-parallel group.

use shardwright_core::{MicrobatchId, ModelId, ModuleId, RequestId, StepEpoch};

use super::CodecError;
use super::reader::Reader;
use super::writer::Writer;
use crate::message::{Asked, Phase, TaskEvent, TaskName, TaskOrder, TaskSource};

/// More events come in several messages.
const MOST_EVENTS: u64 = 1 << 20;

pub(super) fn write_order(writer: &mut Writer, order: &TaskOrder) {
    writer.u64(order.step.0);
    writer.u64(order.number);
    writer.count(order.events.len());
    for event in &order.events {
        match event {
            TaskEvent::Turn(task) => {
                writer.u8(0);
                write_task(writer, task);
            }
            TaskEvent::Asks(asked) => {
                writer.u8(1);
                writer.u32(asked.place);
                writer.option(asked.phase, write_phase);
                writer.u32(asked.microbatch.0);
                writer.u32(asked.module.0.0);
                writer.option(asked.module.1, |writer, module| writer.u32(module.0));
                writer.bool(asked.is_predicted);
            }
            TaskEvent::Ends(task) => {
                writer.u8(2);
                write_task(writer, task);
            }
            TaskEvent::Enters(name) => {
                writer.u8(3);
                writer.text(name);
            }
            TaskEvent::Defers(task) => {
                writer.u8(4);
                write_task(writer, task);
            }
        }
    }
}

pub(super) fn read_order(reader: &mut Reader<'_>) -> Result<TaskOrder, CodecError> {
    let step = StepEpoch(reader.u64()?);
    let number = reader.u64()?;
    let count = reader.count("events", MOST_EVENTS)?;
    let mut events = Vec::new();
    for _ in 0..count {
        events.push(match reader.u8()? {
            0 => TaskEvent::Turn(read_task(reader)?),
            1 => TaskEvent::Asks(Asked {
                place: reader.u32()?,
                phase: reader.option(read_phase)?,
                microbatch: MicrobatchId(reader.u32()?),
                module: (
                    ModelId(reader.u32()?),
                    reader.option(|reader| reader.u32().map(ModuleId))?,
                ),
                is_predicted: reader.bool()?,
            }),
            2 => TaskEvent::Ends(read_task(reader)?),
            3 => TaskEvent::Enters(reader.text()?),
            4 => TaskEvent::Defers(read_task(reader)?),
            found => {
                return Err(CodecError::Tag {
                    what: "event",
                    found: u64::from(found),
                });
            }
        });
    }
    Ok(TaskOrder {
        step,
        number,
        events,
    })
}

fn write_task(writer: &mut Writer, task: &TaskName) {
    match task.source {
        TaskSource::Root => writer.u8(0),
        TaskSource::Request { place, id } => {
            writer.u8(1);
            writer.u32(place);
            writer.u64(id.0);
        }
        TaskSource::WeightGradient { token } => {
            writer.u8(2);
            writer.u64(token);
        }
    }
    write_phase(writer, task.phase);
    writer.u32(task.microbatch.0);
    writer.option(task.module, |writer, (model, module)| {
        writer.u32(model.0);
        writer.u32(module.0);
    });
}

fn read_task(reader: &mut Reader<'_>) -> Result<TaskName, CodecError> {
    Ok(TaskName {
        source: match reader.u8()? {
            0 => TaskSource::Root,
            1 => TaskSource::Request {
                place: reader.u32()?,
                id: RequestId(reader.u64()?),
            },
            2 => TaskSource::WeightGradient {
                token: reader.u64()?,
            },
            found => {
                return Err(CodecError::Tag {
                    what: "source of a task",
                    found: u64::from(found),
                });
            }
        },
        phase: read_phase(reader)?,
        microbatch: MicrobatchId(reader.u32()?),
        module: reader.option(|reader| Ok((ModelId(reader.u32()?), ModuleId(reader.u32()?))))?,
    })
}

fn write_phase(writer: &mut Writer, phase: Phase) {
    writer.bool(phase == Phase::Backward);
}

fn read_phase(reader: &mut Reader<'_>) -> Result<Phase, CodecError> {
    Ok(if reader.bool()? {
        Phase::Backward
    } else {
        Phase::Forward
    })
}
