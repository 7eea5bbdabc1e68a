//! What calls and answers say of tensors beyond their bytes.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::recipes::{Composite, Recipe, from_wire, to_wire};
use crate::values::Spec;

/// What the executing rank cannot see of a call's arguments. Tensors are numbered as those of the request.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct ArgumentNotes(pub(crate) shardwright_wire::ArgumentNotes);

#[pymethods]
impl ArgumentNotes {
    /// Note what there is to note of arguments; by default nothing.
    #[new]
    #[pyo3(signature = (*, shared=Vec::new(), strides=Vec::new(), overlapping=Vec::new(), relaid=Vec::new(),
                        composites=Vec::new(), hooked_views=Vec::new(), private=false, kept=Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn new(
        shared: Vec<Vec<u32>>,
        strides: Vec<(u32, Vec<u64>)>,
        overlapping: Vec<u32>,
        relaid: Vec<u32>,
        composites: Vec<(u32, PyRef<'_, Composite>)>,
        hooked_views: Vec<u32>,
        private: bool,
        kept: Vec<u32>,
    ) -> Self {
        Self(shardwright_wire::ArgumentNotes {
            shared,
            strides,
            overlapping,
            relaid,
            composites: to_wire(composites),
            hooked_views,
            private,
            kept,
        })
    }

    /// Groups of tensors that share memory at the caller.
    #[getter]
    fn shared(&self) -> Vec<Vec<u32>> {
        self.0.shared.clone()
    }

    /// The strides of tensors that are not dense, to be laid like that again.
    #[getter]
    fn strides(&self) -> Vec<(u32, Vec<u64>)> {
        self.0.strides.clone()
    }

    /// Tensors with several elements at one place in memory.
    #[getter]
    fn overlapping(&self) -> Vec<u32> {
        self.0.overlapping.clone()
    }

    /// Of those the ones that arrive in another layout.
    #[getter]
    fn relaid(&self) -> Vec<u32> {
        self.0.relaid.clone()
    }

    /// Tensors that travel as several.
    #[getter]
    fn composites(&self) -> Vec<(u32, Composite)> {
        from_wire(&self.0.composites)
    }

    /// Views that have hooks, on themselves or on views between them and their base.
    #[getter]
    fn hooked_views(&self) -> Vec<u32> {
        self.0.hooked_views.clone()
    }

    /// Whether the caller has no such tensors: another rank made them, and sent them here.
    #[getter]
    fn private(&self) -> bool {
        self.0.private
    }

    /// Of those the ones whose memory that rank keeps.
    #[getter]
    fn kept(&self) -> Vec<u32> {
        self.0.kept.clone()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// How an answer's tensors relate to the arguments and to each other, and what the execution left behind.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct ResultNotes(pub(crate) Arc<shardwright_wire::ResultNotes>);

#[pymethods]
impl ResultNotes {
    /// Note what there is to note of results; by default nothing.
    #[new]
    #[pyo3(signature = (*, recipes=Vec::new(), strides=Vec::new(), watch=Vec::new(), watch_arguments=Vec::new(),
                        written=Vec::new(), dropped=Vec::new(), composites=Vec::new(), kept_arguments=Vec::new(),
                        kept_results=Vec::new(), collected=None, open=false, hooked=false, ordered=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn new(
        recipes: Vec<(u32, PyRef<'_, Recipe>)>,
        strides: Vec<(u32, Vec<u64>)>,
        watch: Vec<u32>,
        watch_arguments: Vec<u32>,
        written: Vec<(u32, u32)>,
        dropped: Vec<u32>,
        composites: Vec<(u32, PyRef<'_, Composite>)>,
        kept_arguments: Vec<u32>,
        kept_results: Vec<u32>,
        collected: Option<PyRef<'_, Spec>>,
        open: bool,
        hooked: bool,
        ordered: bool,
    ) -> Self {
        let recipes = recipes.into_iter();
        Self(Arc::new(shardwright_wire::ResultNotes {
            recipes: recipes
                .map(|(place, recipe)| (place, recipe.0.clone()))
                .collect(),
            strides,
            watch,
            watch_arguments,
            written,
            dropped,
            composites: to_wire(composites),
            kept_arguments,
            kept_results,
            collected: collected.map(|collected| collected.0.clone()),
            open,
            hooked,
            ordered,
        }))
    }

    /// How the caller finds results among what it has, by place.
    #[getter]
    fn recipes(&self) -> Vec<(u32, Recipe)> {
        let recipes = self.0.recipes.iter();
        recipes
            .map(|(place, recipe)| (*place, Recipe(recipe.clone())))
            .collect()
    }

    /// The strides of tensors that are not dense.
    #[getter]
    fn strides(&self) -> Vec<(u32, Vec<u64>)> {
        self.0.strides.clone()
    }

    /// Results that share memory in a way that no view makes again.
    #[getter]
    fn watch(&self) -> Vec<u32> {
        self.0.watch.clone()
    }

    /// Arguments that such results share memory with.
    #[getter]
    fn watch_arguments(&self) -> Vec<u32> {
        self.0.watch_arguments.clone()
    }

    /// Arguments that were written to, each with the number of the tensor that has its new values.
    #[getter]
    fn written(&self) -> Vec<(u32, u32)> {
        self.0.written.clone()
    }

    /// Views made under `no_grad` that require a gradient, which torch drops.
    #[getter]
    fn dropped(&self) -> Vec<u32> {
        self.0.dropped.clone()
    }

    /// Tensors that travel as several.
    #[getter]
    fn composites(&self) -> Vec<(u32, Composite)> {
        from_wire(&self.0.composites)
    }

    /// Arguments whose memory something keeps after the call.
    #[getter]
    fn kept_arguments(&self) -> Vec<u32> {
        self.0.kept_arguments.clone()
    }

    /// Results whose memory something keeps after the call.
    #[getter]
    fn kept_results(&self) -> Vec<u32> {
        self.0.kept_results.clone()
    }

    /// What was collected beside the result, over the answer's tensors; None where nothing was to be.
    #[getter]
    fn collected(&self) -> Option<Spec> {
        self.0.collected.clone().map(Spec)
    }

    /// Whether a gradient may come back to the execution.
    #[getter]
    fn open(&self) -> bool {
        self.0.open
    }

    /// Whether it has put hooks on tensors of its own.
    #[getter]
    fn hooked(&self) -> bool {
        self.0.hooked
    }

    /// Whether it has changed what a module keeps.
    #[getter]
    fn ordered(&self) -> bool {
        self.0.ordered
    }

    /// Whether nothing is said but whether a gradient may come back.
    #[getter]
    fn is_plain(&self) -> bool {
        self.0.is_plain()
    }

    /// Whether the tensors may stay where they are: nothing is said of memory that they share with others.
    #[getter]
    fn may_stay(&self) -> bool {
        self.0.may_stay()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
