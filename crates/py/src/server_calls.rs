//! `Server`: the requests that a rank makes, and its answers.

use pyo3::prelude::*;
use shardwright_core::{CallId, MicrobatchId, ModelId, Rank, RequestId, WorkerId};
use shardwright_runtime::{NewRequest, ServerError};
use shardwright_wire::{Body, HeldTensor, Place, TaskContext};

use crate::description::Description;
use crate::error::server_error;
use crate::requests::{Request, work};
use crate::server::{SLICE, Server, body};
use crate::server_types::parse_phase;
use crate::tensors::TensorParts;
use crate::values::Spec;

#[pymethods]
impl Server {
    /// Make a request of a rank of the pipeline; its id.
    ///
    /// With `hold` the results' tensors stay there until they are fetched or passed on. `expected` is what the answer
    /// is taken to be meanwhile; another one fails the step.
    #[pyo3(signature = (worker, *, to, kind, model, module, range, forward, control, microbatch, parent, call,
                        grad_mode, inference_mode, autocast, checkpointing, spec, parts, hold=false, expected=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "one for each field of appendix B"
    )]
    fn send_request(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        kind: &str,
        model: u32,
        module: u32,
        range: Option<(u32, u32)>,
        forward: Option<u64>,
        control: Option<String>,
        microbatch: u32,
        parent: Option<u64>,
        call: u32,
        grad_mode: bool,
        inference_mode: bool,
        autocast: Vec<(String, String, bool)>,
        checkpointing: bool,
        spec: &Spec,
        parts: &TensorParts,
        hold: bool,
        expected: Option<&Description>,
    ) -> PyResult<u64> {
        let request = NewRequest {
            model: ModelId(model),
            work: work(kind, module, range, forward, control)?,
            microbatch: MicrobatchId(microbatch),
            place: Place {
                parent: parent.map(RequestId),
                call: CallId(call),
            },
            context: TaskContext {
                grad_mode,
                inference_mode,
                autocast,
                checkpointing,
            },
            hold,
            expected: expected.map(|expected| expected.0.clone()),
            body: body(spec, parts),
        };
        py.detach(|| {
            self.server
                .send_request(worker.map(WorkerId), Rank(to), request)
        })
        .map(|id| id.0)
        .map_err(|error| server_error(&error))
    }

    /// Make a request that another rank of the pipeline sends, with `send_request_for`; its id. The answer comes here.
    #[pyo3(signature = (worker, *, to, kind, model, module, microbatch, range=None, forward=None,
                        expected=None))]
    #[expect(clippy::too_many_arguments, reason = "what the answer will be about")]
    fn announce_request(
        &self,
        worker: u32,
        to: u32,
        kind: &str,
        model: u32,
        module: u32,
        microbatch: u32,
        range: Option<(u32, u32)>,
        forward: Option<u64>,
        expected: Option<&Description>,
    ) -> PyResult<u64> {
        let work = work(kind, module, range, forward, None)?;
        self.server
            .announce_request(
                WorkerId(worker),
                Rank(to),
                ModelId(model),
                &work,
                MicrobatchId(microbatch),
                expected.map(|expected| expected.0.clone()),
            )
            .map(|id| id.0)
            .map_err(|error| server_error(&error))
    }

    /// Send a request that `like`'s requester has announced: of the same model and microbatch, in the same context.
    #[pyo3(signature = (worker, like, *, id, to, kind, module, call, spec, parts, range=None, forward=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of appendix B that differ from the request served"
    )]
    fn send_request_for(
        &self,
        py: Python<'_>,
        worker: u32,
        like: &Request,
        id: u64,
        to: u32,
        kind: &str,
        module: u32,
        call: u32,
        spec: &Spec,
        parts: &TensorParts,
        range: Option<(u32, u32)>,
        forward: Option<u64>,
    ) -> PyResult<()> {
        let request = like.followed_by(
            work(kind, module, range, forward, None)?,
            CallId(call),
            body(spec, parts),
        );
        let announced = (like.key().0, RequestId(id));
        py.detach(|| {
            self.server
                .send_request_for(WorkerId(worker), announced, Rank(to), request)
        })
        .map_err(|error| server_error(&error))
    }

    /// Have a tensor sent that another rank holds: one of its answer to a request of this rank. An id to wait for.
    fn fetch(
        &self,
        py: Python<'_>,
        worker: u32,
        holder: u32,
        request: u64,
        index: u32,
    ) -> PyResult<u64> {
        let tensor = HeldTensor {
            holder: Rank(holder),
            requester: Rank(self.rank),
            request: RequestId(request),
            index,
        };
        py.detach(|| self.server.fetch(WorkerId(worker), tensor))
            .map(|id| id.0)
            .map_err(|error| server_error(&error))
    }

    /// The tensors of a rank's answers to requests of this rank are needed no more.
    fn release(&self, holder: u32, requests: Vec<u64>) {
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        self.server.release(Rank(holder), &requests);
    }

    /// Wait for the answers to requests, in their order. A worker is PENDING meanwhile.
    ///
    /// `worker` is None on the main thread; `phase` is that of the task which waits.
    fn wait(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        requests: Vec<u64>,
        phase: &str,
    ) -> PyResult<Vec<(Spec, TensorParts)>> {
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        let bodies = match worker {
            Some(worker) => {
                let phase = parse_phase(phase)?;
                py.detach(|| self.server.wait(WorkerId(worker), &requests, phase))
            }
            None => self.wait_on_main(py, &requests)?,
        };
        let bodies = bodies.map_err(|error| server_error(&error))?;
        Ok(answers(bodies))
    }

    /// The answers to requests, in their order, if they are all there; else None.
    fn take_if_answered(&self, requests: Vec<u64>) -> Option<Vec<(Spec, TensorParts)>> {
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        self.server.take_if_answered(&requests).map(answers)
    }

    /// Answer a request that this rank was given.
    fn respond(
        &self,
        py: Python<'_>,
        request: &Request,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<()> {
        let (requester, id) = request.key();
        let body = body(spec, parts);
        py.detach(|| self.server.respond(requester, id, body))
            .map_err(|error| server_error(&error))
    }
}

fn answers(bodies: Vec<Body>) -> Vec<(Spec, TensorParts)> {
    bodies
        .into_iter()
        .map(|body| (Spec(body.value), TensorParts::received(body.tensors)))
        .collect()
}

impl Server {
    fn wait_on_main(
        &self,
        py: Python<'_>,
        requests: &[RequestId],
    ) -> PyResult<Result<Vec<Body>, ServerError>> {
        if let Err(error) = self.server.begin_main_wait(requests) {
            return Ok(Err(error));
        }
        loop {
            match py
                .detach(|| self.server.main_wait(requests, SLICE))
                .transpose()
            {
                Some(result) => return Ok(result),
                None => py.check_signals()?,
            }
        }
    }
}
