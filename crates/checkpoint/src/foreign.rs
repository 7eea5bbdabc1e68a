//! Files of the safetensors format that others wrote: what their headers and index say, each claim checked. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use safetensors::Dtype;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::full::METADATA;
use crate::manifest::{Bytes, item_bytes};
use crate::region::{MAX_DIMENSIONS, num_elements};

/// The format allows no larger headers.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Why a file of others cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignError {
    /// It is too short for its header.
    #[error("it has {found} bytes, and its header alone {expected}")]
    Short {
        /// The file's size.
        found: u64,
        /// With the header.
        expected: u64,
    },
    /// The header is larger than the format allows.
    #[error("its header would have {bytes} bytes; the format allows {MAX_HEADER_BYTES}")]
    Header {
        /// Its size.
        bytes: u64,
    },
    /// It is not of the form that it should have.
    #[error("{0}")]
    Form(String),
    /// A name is there twice.
    #[error("{0:?} is there twice")]
    Twice(String),
    /// Tensors of another library.
    #[error("its tensors are of format {0:?}, not of PyTorch")]
    Format(String),
    /// What it says of a tensor cannot be true.
    #[error("tensor {tensor:?}: {problem}")]
    Tensor {
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// Bytes that belong to no tensor.
    #[error("its tensors end at byte {end} of its {found} bytes of data")]
    Rest {
        /// Where they end.
        end: u64,
        /// How many there are.
        found: u64,
    },
    /// The index and the file disagree.
    #[error("tensor {tensor:?} is {problem}")]
    Index {
        /// The tensor's name.
        tensor: String,
        /// How.
        problem: &'static str,
    },
}

/// A tensor as a header says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Bytes,
}

/// How many bytes of data a file has by its header, the text behind its size; a header that cannot be true is refused.
pub fn check_header(text: &[u8]) -> Result<u64, ForeignError> {
    read_header(text).map(|tensors| data_bytes(&tensors))
}

/// How many bytes the tensors of a header have.
pub(crate) fn data_bytes(tensors: &[ForeignTensor]) -> u64 {
    tensors.last().map_or(0, |last| last.bytes.end)
}

/// The tensors of a file by its header, the text behind its size, in the order of their data.
pub(crate) fn read_header(text: &[u8]) -> Result<Vec<ForeignTensor>, ForeignError> {
    if text.first() != Some(&b'{') {
        let problem = "its header does not begin with a brace";
        return Err(ForeignError::Form(problem.to_owned()));
    }
    let header: Header = serde_json::from_slice(text).map_err(|error| form(&error))?;
    check_metadata(header.metadata)?;
    let mut tensors = Vec::new();
    for (name, info) in Unique(header.tensors).once()? {
        let wrong = |problem: String| ForeignError::Tensor {
            tensor: name.clone(),
            problem,
        };
        let expected = num_bytes(info.dtype, &info.shape).map_err(wrong)?;
        let (begin, end) = info.data_offsets;
        if end.checked_sub(begin) != Some(expected) {
            let problem = format!("{begin} to {end} are not its {expected} bytes");
            return Err(wrong(problem));
        }
        tensors.push(ForeignTensor {
            name,
            dtype: info.dtype,
            shape: info.shape,
            bytes: Bytes { begin, end },
        });
    }
    tensors.sort_by(|a, b| (a.bytes, &a.name).cmp(&(b.bytes, &b.name)));
    let mut end = 0;
    for tensor in &tensors {
        if tensor.bytes.begin != end {
            return Err(ForeignError::Tensor {
                tensor: tensor.name.clone(),
                problem: format!(
                    "it begins at {}, and the one before it ends at {end}",
                    tensor.bytes.begin
                ),
            });
        }
        end = tensor.bytes.end;
    }
    Ok(tensors)
}

fn num_bytes(dtype: Dtype, shape: &[u64]) -> Result<u64, String> {
    let Some(item) = item_bytes(dtype) else {
        return Err(format!("elements of type {dtype} have less than a byte"));
    };
    if shape.len() > MAX_DIMENSIONS {
        return Err(format!("it has more than {MAX_DIMENSIONS} dimensions"));
    }
    let bytes = num_elements(shape).and_then(|all| all.checked_mul(item));
    bytes.ok_or_else(|| "its bytes are beyond 64 bits".to_owned())
}

fn check_metadata(metadata: Vec<Unique<String>>) -> Result<(), ForeignError> {
    if metadata.len() > 1 {
        return Err(ForeignError::Twice(METADATA.to_owned()));
    }
    for fields in metadata {
        match fields.once()?.remove("format") {
            Some(other) if other != "pt" => return Err(ForeignError::Format(other)),
            _ => {}
        }
    }
    Ok(())
}

/// What a header says, before any of it is believed.
#[derive(Default)]
struct Header {
    metadata: Vec<Unique<String>>,
    tensors: Vec<(String, Info)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                while let Some(name) = map.next_key::<String>()? {
                    let named = |error| A::Error::custom(format!("{name:?}: {error}"));
                    if name == METADATA {
                        header.metadata.push(map.next_value().map_err(named)?);
                    } else {
                        let info = map.next_value().map_err(named)?;
                        header.tensors.push((name, info));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// Which tensors are in which files, by the text of an index.
pub(crate) fn read_index(text: &[u8]) -> Result<BTreeMap<String, String>, ForeignError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: Unique<String>,
    }
    let index: Index = serde_json::from_slice(text).map_err(|error| form(&error))?;
    index.weight_map.once()
}

fn form(error: &serde_json::Error) -> ForeignError {
    ForeignError::Form(error.to_string())
}

/// The fields of an object as they stand there, where parsers would take the last of two equal ones in silence.
struct Unique<T>(Vec<(String, T)>);

impl<T> Unique<T> {
    fn once(self) -> Result<BTreeMap<String, T>, ForeignError> {
        let mut fields = BTreeMap::new();
        for (name, value) in self.0 {
            if fields.contains_key(&name) {
                return Err(ForeignError::Twice(name));
            }
            fields.insert(name, value);
        }
        Ok(fields)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Unique<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Unique<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Unique(fields))
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}
