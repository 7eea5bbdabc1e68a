//! Messages: every field in the order of its declaration, but that what names tensors stands behind their body.

use shardwright_core::{CallId, MicrobatchId, ModelId, Rank, RequestId, StepEpoch};

use super::call::{read_answer, read_work, write_answer, write_work};
use super::frame::{Frame, FrameKind};
use super::order::{read_order, write_order};
use super::parts::{
    check_fit, read_fetch, read_held, read_path, read_released, read_report, write_fetch,
    write_held, write_path, write_released, write_report,
};
use super::placement::{self, Placed, SharedPlace};
use super::reader::Reader;
use super::value::{self, Budget};
use super::writer::{Writer, bounded};
use super::{CodecError, Limits};
use crate::buffer::Buffer;
use crate::call::Answer;
use crate::message::{
    Abort, Body, Delivery, ForwardOver, Message, ObjectMessage, Place, Request, Response,
    ResponseOutcome, StepBegin, StepEnd,
};
use crate::tensor::{TensorMeta, TensorPart};

/// The binary form of a message; an error when it breaks a limit.
pub fn encode(message: &Message, limits: &Limits) -> Result<Frame, CodecError> {
    encode_placed(message, limits, &mut |_| None)
}

/// Like [`encode`]; `place` is asked for each tensor whether its bytes can stay in shared
/// memory instead of following in the frame.
pub fn encode_placed(
    message: &Message,
    limits: &Limits,
    place: &mut dyn FnMut(&Buffer) -> Option<SharedPlace>,
) -> Result<Frame, CodecError> {
    let mut encoder = Encoder {
        limits,
        place,
        following: Vec::new(),
    };
    let mut writer = Frame::begin();
    encoder.message(&mut writer, message)?;
    let control = writer.bytes.len() as u64;
    bounded(
        "bytes of text, bytes, numbers and containers besides the tensors",
        control,
        limits.control_bytes,
    )?;
    Ok(Frame::end(FrameKind::Message, writer, encoder.following))
}

/// A message whose tensors have not arrived yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Incoming {
    message: Message,
    placed: Vec<Placed>,
}

impl Incoming {
    /// Where each tensor's bytes are; those that follow in the frame follow in this order.
    pub fn placed(&self) -> &[Placed] {
        &self.placed
    }

    /// The message with its tensors, of the sizes announced.
    ///
    /// # Panics
    /// When the buffers are not of the sizes in [`Self::placed`].
    pub fn complete(mut self, buffers: Vec<Buffer>) -> Message {
        assert!(
            buffers
                .iter()
                .map(Buffer::len)
                .eq(self.placed.iter().map(|placed| placed.bytes)),
            "the transport brings as many bytes as the control part announces"
        );
        if let Some(body) = self.message.body_mut() {
            for (tensor, data) in body.tensors.iter_mut().zip(buffers) {
                tensor.data = data;
            }
        }
        self.message
    }
}

/// Reads and checks a control part; `tensor_bytes` is the header's.
pub fn decode_control(
    control: &[u8],
    tensor_bytes: u64,
    limits: &Limits,
) -> Result<Incoming, CodecError> {
    let mut reader = Reader::new(control);
    let mut decoder = Decoder {
        limits,
        placed: Vec::new(),
    };
    let message = decoder.message(&mut reader)?;
    reader.finish()?;
    let following = decoder.placed.iter().filter(|one| one.shared.is_none());
    let announced: u64 = following.map(|one| one.bytes as u64).sum();
    if announced != tensor_bytes {
        return Err(CodecError::TooMany {
            what: "bytes of tensors",
            found: tensor_bytes,
            allowed: announced,
        });
    }
    Ok(Incoming {
        message,
        placed: decoder.placed,
    })
}

struct Encoder<'a> {
    limits: &'a Limits,
    place: &'a mut dyn FnMut(&Buffer) -> Option<SharedPlace>,
    following: Vec<Buffer>,
}

impl Encoder<'_> {
    fn message(&mut self, writer: &mut Writer, message: &Message) -> Result<(), CodecError> {
        match message {
            Message::Request(request) => {
                writer.u8(0);
                writer.u64(request.id.0);
                writer.u64(request.step.0);
                writer.u32(request.model.0);
                writer.u32(request.microbatch.0);
                writer.u32(request.requester.0);
                writer.option(request.place.parent, |writer, parent| writer.u64(parent.0));
                writer.u32(request.place.call.0);
                write_path(writer, &request.path);
                writer.bool(request.hold);
                write_released(writer, &request.released);
                self.body(writer, &request.body)?;
                let tensors = request.body.tensors.len();
                write_work(writer, &request.work, self.limits, tensors)
            }
            Message::Response(response) => {
                writer.u8(1);
                writer.u64(response.id.0);
                writer.u64(response.step.0);
                writer.u32(response.responder.0);
                match &response.outcome {
                    ResponseOutcome::Value(Answer { kind, body }) => {
                        writer.u8(0);
                        self.body(writer, body)?;
                        write_answer(writer, kind, self.limits, body.tensors.len())
                    }
                    ResponseOutcome::Failed(report) => {
                        writer.u8(1);
                        write_report(writer, report);
                        Ok(())
                    }
                }
            }
            Message::StepBegin(begin) => {
                writer.u8(2);
                writer.u64(begin.step.0);
                writer.text(&begin.function);
                writer.u32(begin.num_microbatches);
                writer.bool(begin.one_at_a_time);
                Ok(())
            }
            Message::StepEnd(end) => {
                writer.u8(3);
                writer.u64(end.step.0);
                self.body(writer, &end.body)
            }
            Message::Abort(abort) => {
                writer.u8(4);
                writer.u64(abort.step.0);
                write_report(writer, &abort.error);
                Ok(())
            }
            Message::Object(object) => {
                writer.u8(5);
                writer.text(&object.channel);
                self.body(writer, &object.body)
            }
            Message::ShutdownNotice(report) => {
                writer.u8(6);
                writer.option(report.as_deref(), write_report);
                Ok(())
            }
            Message::Fetch(fetch) => {
                writer.u8(7);
                write_fetch(writer, fetch);
                Ok(())
            }
            Message::Delivery(delivery) => {
                writer.u8(8);
                writer.u64(delivery.step.0);
                writer.u32(delivery.requester.0);
                writer.u64(delivery.request.0);
                writer.u32(delivery.index);
                self.body(writer, &delivery.body)
            }
            Message::TaskOrder(order) => {
                writer.u8(9);
                write_order(writer, order);
                Ok(())
            }
            Message::ForwardOver(over) => {
                writer.u8(10);
                writer.u64(over.step.0);
                writer.u32(over.microbatch.0);
                Ok(())
            }
        }
    }

    fn body(&mut self, writer: &mut Writer, body: &Body) -> Result<(), CodecError> {
        let limits = self.limits;
        bounded("tensors", body.tensors.len() as u64, limits.tensors)?;
        writer.count(body.tensors.len());
        for TensorPart { meta, data, held } in &body.tensors {
            bounded(
                "bytes in one tensor",
                data.len() as u64,
                limits.tensor_bytes,
            )?;
            bounded("dimensions", meta.shape.len() as u64, limits.dimensions)?;
            check_fit(meta, data.len() as u64, held.is_some())?;
            writer.text(&meta.dtype);
            writer.count(meta.shape.len());
            meta.shape
                .iter()
                .chain(&meta.strides)
                .for_each(|size| writer.u64(*size));
            writer.text(&meta.device);
            writer.bool(meta.requires_grad);
            writer.option(*held, write_held);
            writer.count(data.len());
            let place = (self.place)(data);
            placement::write(writer, place);
            if place.is_none() {
                self.following.push(data.clone());
            }
        }
        value::write(
            writer,
            &body.value,
            0,
            &mut Budget::new(limits, body.tensors.len()),
        )
    }
}

struct Decoder<'a> {
    limits: &'a Limits,
    placed: Vec<Placed>,
}

impl Decoder<'_> {
    fn message(&mut self, reader: &mut Reader<'_>) -> Result<Message, CodecError> {
        Ok(match reader.u8()? {
            0 => Message::Request(Box::new(self.request(reader)?)),
            1 => Message::Response(Box::new(Response {
                id: RequestId(reader.u64()?),
                step: StepEpoch(reader.u64()?),
                responder: Rank(reader.u32()?),
                outcome: match reader.u8()? {
                    0 => ResponseOutcome::Value(self.answer(reader)?),
                    1 => ResponseOutcome::Failed(read_report(reader)?),
                    found => {
                        return Err(CodecError::Tag {
                            what: "outcome",
                            found: u64::from(found),
                        });
                    }
                },
            })),
            2 => Message::StepBegin(StepBegin {
                step: StepEpoch(reader.u64()?),
                function: reader.text()?,
                num_microbatches: reader.u32()?,
                one_at_a_time: reader.bool()?,
            }),
            3 => Message::StepEnd(Box::new(StepEnd {
                step: StepEpoch(reader.u64()?),
                body: self.body(reader)?,
            })),
            4 => Message::Abort(Box::new(Abort {
                step: StepEpoch(reader.u64()?),
                error: read_report(reader)?,
            })),
            5 => Message::Object(Box::new(ObjectMessage {
                channel: reader.text()?,
                body: self.body(reader)?,
            })),
            6 => Message::ShutdownNotice(reader.option(read_report)?.map(Box::new)),
            7 => Message::Fetch(read_fetch(reader)?),
            8 => Message::Delivery(Box::new(Delivery {
                step: StepEpoch(reader.u64()?),
                requester: Rank(reader.u32()?),
                request: RequestId(reader.u64()?),
                index: reader.u32()?,
                body: self.body(reader)?,
            })),
            9 => Message::TaskOrder(Box::new(read_order(reader)?)),
            10 => Message::ForwardOver(ForwardOver {
                step: StepEpoch(reader.u64()?),
                microbatch: MicrobatchId(reader.u32()?),
            }),
            found => {
                return Err(CodecError::Tag {
                    what: "message",
                    found: u64::from(found),
                });
            }
        })
    }

    fn request(&mut self, reader: &mut Reader<'_>) -> Result<Request, CodecError> {
        let id = RequestId(reader.u64()?);
        let step = StepEpoch(reader.u64()?);
        let model = ModelId(reader.u32()?);
        let microbatch = MicrobatchId(reader.u32()?);
        let requester = Rank(reader.u32()?);
        let place = Place {
            parent: reader.option(|reader| reader.u64().map(RequestId))?,
            call: CallId(reader.u32()?),
        };
        let path = read_path(reader)?;
        let hold = reader.bool()?;
        let released = read_released(reader)?;
        let body = self.body(reader)?;
        let work = read_work(reader, self.limits, body.tensors.len())?;
        Ok(Request {
            id,
            step,
            model,
            work,
            microbatch,
            requester,
            place,
            path,
            hold,
            released,
            body,
        })
    }

    fn answer(&mut self, reader: &mut Reader<'_>) -> Result<Answer, CodecError> {
        let body = self.body(reader)?;
        let kind = read_answer(reader, self.limits, body.tensors.len())?;
        Ok(Answer { kind, body })
    }

    fn body(&mut self, reader: &mut Reader<'_>) -> Result<Body, CodecError> {
        let count = reader.count("tensors", self.limits.tensors)?;
        let empty = Buffer::default();
        let mut tensors = Vec::new();
        for _ in 0..count {
            let dtype = reader.text()?;
            let dimensions = reader.count("dimensions", self.limits.dimensions)?;
            let mut sizes = || {
                (0..dimensions)
                    .map(|_| reader.u64())
                    .collect::<Result<Vec<_>, _>>()
            };
            let (shape, strides) = (sizes()?, sizes()?);
            let device = reader.text()?;
            let requires_grad = reader.bool()?;
            let meta = TensorMeta {
                dtype,
                shape,
                strides,
                device,
                requires_grad,
            };
            let held = reader.option(read_held)?;
            let bytes = reader.u64()?;
            bounded("bytes in one tensor", bytes, self.limits.tensor_bytes)?;
            check_fit(&meta, bytes, held.is_some())?;
            self.placed.push(Placed {
                bytes: bytes as usize,
                shared: placement::read(reader)?,
            });
            tensors.push(TensorPart {
                meta,
                data: empty.clone(),
                held,
            });
        }
        let value = value::read(reader, 0, &mut Budget::new(self.limits, count))?;
        Ok(Body { value, tensors })
    }
}
