//! UCX in jobs of tests.

use std::sync::Arc;

use shardwright_ucx::testing::library;
use shardwright_ucx::{Options, Worker};

use super::transport::ready;
use crate::job::{JobOptions, TensorMemory};
use crate::layers::{Layer, Prepared};
use crate::start_error::StartError;
use crate::transport::Receiver;

/// UCX among the transports of a job, over some of its own.
pub(crate) struct Over(pub(crate) &'static str);

impl Layer for Over {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn prepare(
        &self,
        options: &JobOptions,
        _: &TensorMemory,
        receiver: &Arc<dyn Receiver>,
    ) -> Result<Option<Box<dyn Prepared>>, StartError> {
        let over = Options {
            transports: self.0.to_owned(),
            ..Options::default()
        };
        let worker = Worker::create(&library(), options.rank, &over).unwrap();
        ready(worker, options, Arc::clone(receiver)).map(Some)
    }
}
