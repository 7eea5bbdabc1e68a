//! Messages and values as they cross ranks: typed trees with tensors replaced
//! by stubs, and a bounded, versioned binary form. Pure; nothing is ever unpickled.

pub mod beat;
pub mod buffer;
pub mod codec;
pub mod message;
pub mod tensor;
pub mod text;
pub mod value;

pub use beat::Beat;
pub use buffer::{Buffer, Lent, NoMemory, Owned};
pub use codec::{
    CodecError, FORMAT_VERSION, Frame, FrameKind, HEADER_BYTES, Header, Incoming, Limits, Placed,
    SharedMemory, SharedPlace,
};
pub use message::{
    Abort, Asked, Body, Delivery, ErrorReport, Fetch, ForwardOver, Message, ObjectMessage, Outcome,
    Phase, Place, Request, Response, SequentialRange, StepBegin, StepEnd, TaskContext, TaskEvent,
    TaskName, TaskOrder, TaskSource, Work,
};
pub use tensor::{HeldTensor, TensorMeta, TensorPart};
pub use value::Value;
