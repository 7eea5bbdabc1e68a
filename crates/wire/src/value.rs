//! The typed tree that Python arguments and results become.

/// A value that may cross ranks. Tensors are leaves that index the body's parts.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `bool`.
    Bool(bool),
    /// An `int` that fits 64 bits.
    Int(i64),
    /// A larger `int`, in hexadecimal: long decimal numbers take Python quadratic time, and it refuses them.
    BigInt(String),
    /// `float`, bit for bit.
    Float(f64),
    /// `complex`.
    Complex(f64, f64),
    /// `str`.
    Str(String),
    /// `bytes`.
    Bytes(Vec<u8>),
    /// `list`.
    List(Vec<Value>),
    /// `tuple`.
    Tuple(Vec<Value>),
    /// `set` or `frozenset` (the flag is true when frozen), in the sender's iteration order.
    Set(Vec<Value>, bool),
    /// `dict`, in insertion order.
    Dict(Vec<(Value, Value)>),
    /// `slice(start, stop, step)`.
    Slice(Box<[Value; 3]>),
    /// `...`.
    Ellipsis,
    /// `torch.dtype`, by its name without the `torch.` prefix.
    Dtype(String),
    /// `torch.device`, as its string.
    Device(String),
    /// `torch.Size`.
    Size(Vec<i64>),
    /// `torch.layout`, `torch.memory_format` and their like: the name in the `torch` module.
    TorchConstant(String),
    /// A registered type: its registered name and its fields.
    Registered(String, Box<Value>),
    /// The tensor at this index of the body's parts.
    Tensor(u32),
}
