//! `Server`: the requests that a rank makes, and its answers.

use std::sync::Arc;

use pyo3::prelude::*;
use shardwright_core::{MicrobatchId, ModelId, ModuleId, Rank, RequestId, WorkerId};
use shardwright_runtime::{About, Expected, NewRequest, ServerError};
use shardwright_wire::{Body, HeldTensor, Value, Work, WorkKind};

use crate::answers::Answer;
use crate::calls::{BackwardCall, BackwardLink, ForwardCall, ForwardLink, Place};
use crate::description::Description;
use crate::error::server_error;
use crate::requests::Request;
use crate::server::{SLICE, Server, body};
use crate::server_types::parse_phase;
use crate::tensors::TensorParts;
use crate::values::Spec;

#[pymethods]
impl Server {
    /// Ask a rank of the pipeline to run a module forward; the request's id.
    ///
    /// With `hold` the results' tensors stay there until they are fetched or passed on. `expected` is what the answer
    /// is taken to be meanwhile; another one fails the step.
    #[pyo3(signature = (worker, to, place, call, spec, parts, *, hold=false, expected=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn send_forward(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        place: &Place,
        call: &ForwardCall,
        spec: &Spec,
        parts: &TensorParts,
        hold: bool,
        expected: Option<&Description>,
    ) -> PyResult<u64> {
        let request = NewRequest {
            hold,
            expected: expected.map(|expected| Expected::clone(&expected.0)),
            ..new_request(place, Work::Forward(Arc::clone(&call.0)), body(spec, parts))
        };
        self.send(py, worker, to, request)
    }

    /// Ask for the backward of an earlier forward, or for its end where there are no gradients; the request's id.
    #[pyo3(signature = (worker, to, place, call, parts))]
    fn send_backward(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        place: &Place,
        call: &BackwardCall,
        parts: &TensorParts,
    ) -> PyResult<u64> {
        let request = new_request(place, call.work(), tensors(parts));
        self.send(py, worker, to, request)
    }

    /// Ask for something that a rank's main thread does outside any microbatch; the request's id.
    #[pyo3(signature = (worker, to, place, name, spec, parts))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the interpreter and the server are two"
    )]
    fn send_control(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        place: &Place,
        name: String,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<u64> {
        let request = new_request(place, Work::Control { name }, body(spec, parts));
        self.send(py, worker, to, request)
    }

    /// Announce a forward that another rank asks for, with `send_forward_for`; its id. The answer comes here.
    #[pyo3(signature = (worker, *, to, model, module, microbatch, expected=None))]
    fn announce_forward(
        &self,
        worker: u32,
        to: u32,
        model: u32,
        module: u32,
        microbatch: u32,
        expected: Option<&Description>,
    ) -> PyResult<u64> {
        let about = About {
            kind: WorkKind::Forward,
            model: ModelId(model),
            module: Some(ModuleId(module)),
            forward: None,
            microbatch: MicrobatchId(microbatch),
        };
        let expected = expected.map(|expected| Expected::clone(&expected.0));
        self.announce(worker, to, &about, expected)
    }

    /// Announce a backward that another rank asks for, with `send_backward_for`; its id. The answer comes here.
    ///
    /// `forward` is the forward request; `closes` tells that no gradients are expected to reach it.
    #[pyo3(signature = (worker, *, to, model, module, microbatch, forward, closes))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn announce_backward(
        &self,
        worker: u32,
        to: u32,
        model: u32,
        module: u32,
        microbatch: u32,
        forward: u64,
        closes: bool,
    ) -> PyResult<u64> {
        let about = About {
            kind: if closes {
                WorkKind::Close
            } else {
                WorkKind::Backward
            },
            model: ModelId(model),
            module: Some(ModuleId(module)),
            forward: Some(RequestId(forward)),
            microbatch: MicrobatchId(microbatch),
        };
        self.announce(worker, to, &about, None)
    }

    /// Ask for the next forward of a chain, in the name of `like`'s requester, who has announced it.
    #[pyo3(signature = (worker, like, link, call, spec, parts))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the interpreter and the server are two"
    )]
    fn send_forward_for(
        &self,
        py: Python<'_>,
        worker: u32,
        like: &Request,
        link: &ForwardLink,
        call: &ForwardCall,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<()> {
        let work = Work::Forward(Arc::clone(&call.0));
        let request = like.followed_by(work, link.0.call, body(spec, parts));
        let announced = (like.key().0, link.0.request);
        self.send_for(py, worker, announced, link.0.rank, request)
    }

    /// Ask for the next backward of a chain, in the name of `like`'s requester, who has announced it.
    #[pyo3(signature = (worker, like, link, call, parts))]
    fn send_backward_for(
        &self,
        py: Python<'_>,
        worker: u32,
        like: &Request,
        link: &BackwardLink,
        call: &BackwardCall,
        parts: &TensorParts,
    ) -> PyResult<()> {
        let request = like.followed_by(call.work(), link.0.call, tensors(parts));
        let announced = (like.key().0, link.0.request);
        self.send_for(py, worker, announced, link.0.rank, request)
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
        let server = self.here()?;
        let tensor = HeldTensor {
            holder: Rank(holder),
            requester: Rank(self.rank),
            request: RequestId(request),
            index,
        };
        py.detach(|| server.fetch(WorkerId(worker), tensor))
            .map(|id| id.0)
            .map_err(|error| server_error(&error))
    }

    /// The tensors of a rank's answers to requests of this rank are needed no more.
    fn release(&self, holder: u32, requests: Vec<u64>) {
        if let Ok(server) = self.here() {
            let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
            server.release(Rank(holder), &requests);
        }
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
    ) -> PyResult<Vec<Answer>> {
        let server = self.here()?;
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        let found = match worker {
            Some(worker) => {
                let phase = parse_phase(phase)?;
                py.detach(|| server.wait(WorkerId(worker), &requests, phase))
            }
            None => self.wait_on_main(py, &requests)?,
        };
        let found = found.map_err(|error| server_error(&error))?;
        answers(py, found)
    }

    /// The answers to requests, in their order, if they are all there; else None.
    fn take_if_answered(
        &self,
        py: Python<'_>,
        requests: Vec<u64>,
    ) -> PyResult<Option<Vec<Answer>>> {
        let server = self.here()?;
        let requests: Vec<_> = requests.into_iter().map(RequestId).collect();
        let found = server.take_if_answered(&requests);
        found.map(|found| answers(py, found)).transpose()
    }

    /// Answer a request that this rank was given.
    fn respond(&self, py: Python<'_>, request: &Request, answer: &Answer) -> PyResult<()> {
        let server = self.here()?;
        let (requester, id) = request.key();
        let answer = answer.to_wire();
        py.detach(|| server.respond(requester, id, answer))
            .map_err(|error| server_error(&error))
    }
}

fn answers(py: Python<'_>, found: Vec<shardwright_wire::Answer>) -> PyResult<Vec<Answer>> {
    let found = found.into_iter();
    found.map(|answer| Answer::received(py, answer)).collect()
}

/// The body of gradients, whose numbers stand in the call.
fn tensors(parts: &TensorParts) -> Body {
    Body {
        value: Value::None,
        tensors: parts.take(),
    }
}

fn new_request(place: &Place, work: Work, body: Body) -> NewRequest {
    NewRequest {
        model: place.model,
        work,
        microbatch: place.microbatch,
        place: place.within,
        hold: false,
        expected: None,
        body,
    }
}

impl Server {
    fn send(
        &self,
        py: Python<'_>,
        worker: Option<u32>,
        to: u32,
        request: NewRequest,
    ) -> PyResult<u64> {
        let server = self.here()?;
        py.detach(|| server.send_request(worker.map(WorkerId), Rank(to), request))
            .map(|id| id.0)
            .map_err(|error| server_error(&error))
    }

    fn announce(
        &self,
        worker: u32,
        to: u32,
        about: &About,
        expected: Option<Expected>,
    ) -> PyResult<u64> {
        self.here()?
            .announce_request(WorkerId(worker), Rank(to), about, expected)
            .map(|id| id.0)
            .map_err(|error| server_error(&error))
    }

    fn send_for(
        &self,
        py: Python<'_>,
        worker: u32,
        announced: (Rank, RequestId),
        to: Rank,
        request: NewRequest,
    ) -> PyResult<()> {
        let server = self.here()?;
        py.detach(|| server.send_request_for(WorkerId(worker), announced, to, request))
            .map_err(|error| server_error(&error))
    }

    fn wait_on_main(
        &self,
        py: Python<'_>,
        requests: &[RequestId],
    ) -> PyResult<Result<Vec<shardwright_wire::Answer>, ServerError>> {
        let server = self.here()?;
        if let Err(error) = server.begin_main_wait(requests) {
            return Ok(Err(error));
        }
        loop {
            match py.detach(|| server.main_wait(requests, SLICE)).transpose() {
                Some(result) => return Ok(result),
                None => py.check_signals()?,
            }
        }
    }
}
