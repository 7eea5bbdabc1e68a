//! The binary form of messages: little-endian, versioned, bounded.
//!
//! A frame is a fixed header, a control part, and the bytes of the tensors one
//! after another, but for those that lie in memory which both ranks see. The control
//! part is read and checked whole before a byte is set aside for a tensor.
//!
//! - WI-1: no input makes decoding panic, overflow the stack, or reserve more
//!   memory than a small multiple of the bytes that have arrived.
//! - WI-2: what is encoded without an error decodes to an equal message.
//! - WI-3: a tensor's bytes fit its dtype, sizes and strides.
//! - WI-4: whatever names a tensor of its body (values, notes, gradients) names one that is there.

mod call;
mod frame;
mod message;
mod notes;
mod order;
mod parts;
mod placement;
mod reader;
mod value;
mod writer;

pub use frame::{Frame, FrameKind, HEADER_BYTES, Header, decode_heartbeat, heartbeat_frame};
pub use message::{Incoming, decode_control, encode, encode_placed};
pub use placement::{Placed, SharedMemory, SharedPlace};

/// The version of the format; a change that an older reader cannot read raises it.
pub const FORMAT_VERSION: u16 = 10;

/// What a frame may hold at most; the same at sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the control part.
    pub control_bytes: u64,
    /// Bytes of one tensor.
    pub tensor_bytes: u64,
    /// Number of tensors.
    pub tensors: u64,
    /// Levels of containers within containers.
    pub depth: u64,
    /// Number of nodes in the tree of values.
    pub nodes: u64,
    /// Dimensions of a tensor.
    pub dimensions: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            control_bytes: 256 << 20,
            tensor_bytes: 64 << 30,
            tensors: 1 << 16,
            depth: 96,
            nodes: 1 << 24,
            dimensions: 64,
        }
    }
}

/// A message or frame that breaks the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Something else talks here.
    #[error("not a shardwright frame: it begins with {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// Written by another version.
    #[error("format version {found} where this library reads version {supported}")]
    Version {
        /// The frame's version.
        found: u16,
        /// What this library reads.
        supported: u16,
    },
    /// A tag without a meaning.
    #[error("{found} does not name a kind of {what}")]
    Tag {
        /// What was expected.
        what: &'static str,
        /// What was found.
        found: u64,
    },
    /// The bytes end too early.
    #[error("the message ends {missing} bytes too early")]
    Truncated {
        /// How many more were announced.
        missing: u64,
    },
    /// The bytes go on after the end.
    #[error("{extra} bytes follow the end of the message")]
    Trailing {
        /// How many.
        extra: u64,
    },
    /// More of something than is allowed.
    #[error("{found} {what}, at most {allowed} are allowed")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        found: u64,
        /// How much is allowed.
        allowed: u64,
    },
    /// A setting with a value of another kind.
    #[error("{setting} is set to a {found}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What it is set to.
        found: &'static str,
    },
    /// Text that is not UTF-8.
    #[error("text that is not UTF-8")]
    Text,
    /// Something names a tensor that the message lacks (WI-4).
    #[error("the message names tensor {index} of {tensors}")]
    TensorIndex {
        /// The named one.
        index: u32,
        /// How many there are.
        tensors: usize,
    },
    /// A tensor whose bytes do not fit its description (WI-3).
    #[error(
        "a tensor of {bytes} bytes does not fit dtype {dtype}, sizes {shape:?}, strides {strides:?}"
    )]
    TensorSize {
        /// Its bytes.
        bytes: u64,
        /// Its dtype.
        dtype: String,
        /// Its sizes.
        shape: Vec<u64>,
        /// Its strides.
        strides: Vec<u64>,
    },
}
