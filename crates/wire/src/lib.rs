//! Messages and values as they cross ranks: typed trees with tensors replaced
//! by stubs, and a bounded, versioned binary form. Pure; nothing is ever unpickled.

pub mod buffer;
pub mod call;
pub mod codec;
pub mod heartbeat;
pub mod message;
pub mod notes;
pub mod tensor;
pub mod text;
pub mod torch;
pub mod value;

pub use buffer::{Buffer, Lent, NoMemory, Owned};
pub use call::{
    Answer, AnswerKind, BackwardCall, BackwardLink, CloseCall, ForwardCall, ForwardLink, Gradients,
    SequentialRange, UnknownGradient, Work, WorkKind, next_backward,
};
pub use codec::{
    CodecError, FORMAT_VERSION, Frame, FrameKind, HEADER_BYTES, Header, Incoming, Limits, Placed,
    SharedMemory, SharedPlace,
};
pub use heartbeat::Heartbeat;
pub use message::{
    Abort, Asked, Body, Delivery, ErrorReport, Fetch, ForwardOver, Message, ObjectMessage, Phase,
    Place, Request, Response, ResponseOutcome, StepBegin, StepEnd, TaskEvent, TaskName, TaskOrder,
    TaskSource,
};
pub use notes::{ArgumentNotes, Base, Composite, Recipe, ResultNotes, View};
pub use tensor::{HeldTensor, TensorMeta, TensorPart};
pub use torch::{Checkpointing, Collecting, SettingValue, TorchContext, TorchSetting};
pub use value::Value;
