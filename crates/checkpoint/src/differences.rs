//! How what a model wants differs from what a checkpoint holds. Pure.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;
use serde::Serialize;

use crate::manifest::Manifest;

/// A tensor without its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorKind {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum Difference {
    /// It is wanted, and the checkpoint does not have it.
    Missing {
        /// The tensor's name.
        name: String,
    },
    /// The checkpoint has it, and it is not wanted.
    Unexpected {
        /// The tensor's name.
        name: String,
    },
    /// The shapes differ.
    Shape {
        /// The tensor's name.
        name: String,
        /// What is wanted.
        wanted: Vec<u64>,
        /// What the checkpoint has.
        found: Vec<u64>,
    },
    /// The types of the elements differ.
    Dtype {
        /// The tensor's name.
        name: String,
        /// What is wanted.
        wanted: Dtype,
        /// What the checkpoint has.
        found: Dtype,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name } => write!(f, "missing: {name}"),
            Self::Unexpected { name } => write!(f, "unexpected: {name}"),
            Self::Shape {
                name,
                wanted,
                found,
            } => write!(f, "shape: {name} is {found:?}, wanted {wanted:?}"),
            Self::Dtype {
                name,
                wanted,
                found,
            } => write!(f, "dtype: {name} is {found}, wanted {wanted}"),
        }
    }
}

/// All differences, ordered by name. A tensor is there under its aliases too, and wanted under any of its names.
pub fn differences(wanted: &BTreeMap<String, TensorKind>, manifest: &Manifest) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut used = vec![false; manifest.tensors.len()];
    for (name, wanted) in wanted {
        let Some(place) = manifest.place(name) else {
            let name = name.clone();
            found.push((name.clone(), Difference::Missing { name }));
            continue;
        };
        used[place] = true;
        let tensor = &manifest.tensors[place];
        if tensor.shape != wanted.shape {
            let difference = Difference::Shape {
                name: name.clone(),
                wanted: wanted.shape.clone(),
                found: tensor.shape.clone(),
            };
            found.push((name.clone(), difference));
        }
        if tensor.dtype != wanted.dtype {
            let difference = Difference::Dtype {
                name: name.clone(),
                wanted: wanted.dtype,
                found: tensor.dtype,
            };
            found.push((name.clone(), difference));
        }
    }
    let unexpected = manifest.tensors.iter().zip(used).filter(|(_, used)| !used);
    found.extend(unexpected.map(|(tensor, _)| {
        let name = tensor.name.clone();
        (name.clone(), Difference::Unexpected { name })
    }));
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    found
        .into_iter()
        .map(|(_, difference)| difference)
        .collect()
}
