//! `Sites`: what is known of calls from earlier steps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use shardwright_core::{ModelId, ModuleId};
use shardwright_runtime::{PredictionRules, Predictions, SiteId, SiteKey};

use crate::description::Description;
use crate::torch_context::TorchContext;

/// What is known of a job's calls, and how far that is relied on (static mode). A call, alike for all microbatches and
/// steps, has a number.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Sites(Mutex<Predictions>);

impl Sites {
    fn lock(&self) -> MutexGuard<'_, Predictions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Sites {
    /// Know nothing yet, of a job with these settings.
    #[new]
    #[pyo3(signature = (*, tensor_handles, fast_mode, static_mode, static_steps))]
    fn new(tensor_handles: bool, fast_mode: bool, static_mode: bool, static_steps: u64) -> Self {
        Self(Mutex::new(Predictions::new(PredictionRules {
            handles: tensor_handles,
            fast: fast_mode,
            learns: static_mode,
            static_steps,
        })))
    }

    /// Whether calls are remembered, and predicted.
    #[getter]
    fn learns(&self) -> bool {
        self.lock().learns()
    }

    /// Whether callers may go on before answers are there.
    #[getter]
    fn predicts(&self) -> bool {
        self.lock().predicts()
    }

    /// A step begins; in one that is run again after a departure nothing is predicted.
    #[pyo3(signature = (step, function, *, predicts))]
    fn begin_step(&self, step: u64, function: &str, predicts: bool) {
        self.lock().begin_step(step, function, predicts);
    }

    /// The ranks of a tensor-parallel group have come to know calls at different times: all that is known counts as seen in
    /// this step for the first time. Returns whether anything is predicted after that, which is not where they part again
    /// and again.
    fn restart(&self) -> bool {
        self.lock().restart()
    }

    /// A call of the step function that runs: the module that makes it (None for the step function), its number there,
    /// the model, the modules that it asks for one after another, with their children to run, and its torch state.
    #[pyo3(signature = (caller, number, model, asked, context))]
    fn site(
        &self,
        caller: Option<String>,
        number: u32,
        model: u32,
        asked: Vec<(u32, Option<(u32, u32)>)>,
        context: &TorchContext,
    ) -> u32 {
        let state = &context.0;
        let asked = asked.into_iter();
        let key = SiteKey {
            caller,
            number,
            model: ModelId(model),
            asked: asked
                .map(|(module, range)| (ModuleId(module), range))
                .collect(),
            modes: vec![
                state.grad_mode,
                state.inference_mode,
                state.checkpointing.is_some(),
                state.hooks,
            ],
            autocast: state.autocast.clone(),
        };
        self.lock().site(key).0
    }

    /// What each request of a call with these arguments will be answered with, once that has been the same for some
    /// steps, else None; and whether the results' tensors stay where they are made.
    ///
    /// `given` is None where the arguments are not to be remembered; `observed` tells that somebody wants to see the
    /// results.
    #[pyo3(signature = (site, given, *, observed))]
    fn predict(
        &self,
        site: u32,
        given: Option<&Description>,
        observed: bool,
    ) -> (Option<Vec<Description>>, bool) {
        let given = given.map(|given| &*given.0);
        let told = self.lock().predict(SiteId(site), given, observed);
        let answers = told.answers;
        let answers = answers.map(|answers| answers.into_iter().map(Description).collect());
        (answers, told.hold)
    }

    /// Remember what a call has given.
    fn learn(&self, site: u32, given: &Description, answers: Vec<PyRef<'_, Description>>) {
        let answers = answers.into_iter();
        let answers = answers.map(|answer| Arc::clone(&answer.0)).collect();
        self.lock()
            .learn(SiteId(site), Arc::clone(&given.0), answers);
    }

    /// The caller uses the values of a result that is elsewhere.
    fn wants(&self, site: u32) {
        self.lock().wants(SiteId(site));
    }

    /// The call has changed what a module keeps: from now on its caller waits for it.
    fn set_ordered(&self, site: u32) {
        self.lock().set_ordered(SiteId(site));
    }
}
