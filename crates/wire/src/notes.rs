//! What requests and answers say of tensors beyond their bytes: memory that they share, how they lie in it, and writes.
//!
//! Arguments are numbered as the tensors of the request's body, results as those of the answer's. An answer may carry
//! further tensors behind the results': what several of them are views of, and arguments that were written to.

use crate::value::Value;

/// What the executing rank cannot see of the arguments' tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArgumentNotes {
    /// Groups of tensors that share memory at the caller.
    pub shared: Vec<Vec<u32>>,
    /// The strides of tensors that are not dense, to be laid like that again.
    pub strides: Vec<(u32, Vec<u64>)>,
    /// Tensors with several elements at one place in memory.
    pub overlapping: Vec<u32>,
    /// Of those the ones that arrive in another layout.
    pub relaid: Vec<u32>,
    /// Tensors that travel as several, which follow at the end.
    pub composites: Vec<(u32, Composite)>,
    /// Views that have hooks, on themselves or on views between them and their base.
    pub hooked_views: Vec<u32>,
    /// Whether the caller has no such tensors: the rank before in a chain made them.
    pub private: bool,
    /// Of those the ones whose memory that rank keeps.
    pub kept: Vec<u32>,
}

/// How an answer's tensors relate to the arguments and to each other, and what the execution left behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResultNotes {
    /// Results that the caller finds among what it has, instead of being sent them.
    pub recipes: Vec<(u32, Recipe)>,
    /// The strides of tensors that are not dense.
    pub strides: Vec<(u32, Vec<u64>)>,
    /// Results that share memory in a way that no view makes again.
    pub watch: Vec<u32>,
    /// Arguments that such results share memory with.
    pub watch_arguments: Vec<u32>,
    /// Arguments that were written to, each with the number of the tensor that has its new values.
    pub written: Vec<(u32, u32)>,
    /// Views that require a gradient which the tensor library drops.
    pub dropped: Vec<u32>,
    /// Tensors that travel as several.
    pub composites: Vec<(u32, Composite)>,
    /// Arguments whose memory something keeps after the call.
    pub kept_arguments: Vec<u32>,
    /// Results whose memory something keeps after the call.
    pub kept_results: Vec<u32>,
    /// What was collected beside the result ([`TorchContext::collector`](crate::TorchContext::collector)).
    pub collected: Option<Value>,
    /// Whether a gradient may come back to the execution.
    pub open: bool,
    /// Whether it has put hooks on tensors of its own.
    pub hooked: bool,
    /// Whether it has changed what a module keeps, so that its callers go on only after it.
    pub ordered: bool,
}

impl ResultNotes {
    /// Whether the tensors may stay where they are until somebody asks for them: nothing is said of memory that they share
    /// with others, or of how they lie in it.
    pub fn may_stay(&self) -> bool {
        self.recipes.is_empty()
            && self.strides.is_empty()
            && self.watch.is_empty()
            && self.watch_arguments.is_empty()
            && self.written.is_empty()
            && self.dropped.is_empty()
            && self.composites.is_empty()
    }

    /// Whether another execution may be said to have done the same. What is kept is not compared: while it is sent or moved,
    /// or is garbage, memory has more references than a module holds.
    pub fn is_like(&self, other: &Self) -> bool {
        let same_kept = Self {
            kept_arguments: self.kept_arguments.clone(),
            kept_results: self.kept_results.clone(),
            ..other.clone()
        };
        *self == same_kept
    }

    /// Whether all that another execution kept is said to be kept.
    pub fn keeps_all_of(&self, other: &Self) -> bool {
        let has = |all: &[u32], some: &[u32]| some.iter().all(|one| all.contains(one));
        has(&self.kept_arguments, &other.kept_arguments)
            && has(&self.kept_results, &other.kept_results)
    }

    /// Says that all is kept that either execution kept.
    pub fn keep_all_of(&mut self, other: &Self) {
        let add = |all: &mut Vec<u32>, some: &[u32]| {
            all.extend_from_slice(some);
            all.sort_unstable();
            all.dedup();
        };
        add(&mut self.kept_arguments, &other.kept_arguments);
        add(&mut self.kept_results, &other.kept_results);
    }

    /// Whether nothing is said but whether a gradient may come back.
    pub fn is_plain(&self) -> bool {
        self.may_stay()
            && self.kept_arguments.is_empty()
            && self.kept_results.is_empty()
            && self.collected.is_none()
            && !self.hooked
            && !self.ordered
    }
}

/// How the caller finds a result among its arguments and the answer's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// It is an argument.
    Argument {
        /// Which.
        argument: u32,
        /// Whether it requires a gradient.
        requires_grad: bool,
    },
    /// It is a view.
    View {
        /// What it is a view of.
        base: Base,
        /// How it lies there.
        view: View,
        /// Whether it requires a gradient.
        requires_grad: bool,
    },
}

/// What a view is a view of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// An argument.
    Argument(u32),
    /// A tensor of the answer.
    Result(u32),
}

/// A view, made again by its base's memory. Sizes, strides and the offset are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The sizes.
    pub shape: Vec<u64>,
    /// The strides.
    pub strides: Vec<u64>,
    /// Where it begins, from where its base begins.
    pub offset: i64,
    /// Whether it is read conjugated where its base is not, or the other way round.
    pub conjugated: bool,
    /// Whether it is read negated where its base is not, or the other way round.
    pub negated: bool,
    /// Whether it was made with gradients enabled.
    pub grad_mode: bool,
}

/// What a tensor is that travels as several dense ones; at its own place stands an empty one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Composite {
    /// An argument, which the caller has.
    Argument(u32),
    /// A sparse tensor of coordinates.
    Sparse {
        /// The tensor with its elements' indices.
        indices: u32,
        /// The one with their values.
        values: u32,
        /// Its sizes.
        shape: Vec<u64>,
        /// Whether each index stands in it once.
        coalesced: bool,
    },
    /// A nested tensor of one ragged dimension.
    Nested {
        /// The tensor with its values.
        values: u32,
        /// The one with the offsets at which its parts begin.
        offsets: u32,
        /// The ragged dimension.
        ragged_dimension: u32,
    },
}

impl Composite {
    /// The numbers of the dense tensors that it travels as.
    pub fn parts(&self) -> impl Iterator<Item = u32> + use<> {
        let parts = match self {
            Self::Argument(_) => [None, None],
            Self::Sparse {
                indices, values, ..
            } => [Some(*indices), Some(*values)],
            Self::Nested {
                values, offsets, ..
            } => [Some(*values), Some(*offsets)],
        };
        parts.into_iter().flatten()
    }
}
