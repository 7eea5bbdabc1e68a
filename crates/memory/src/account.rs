//! The categories of an account, and what is expected in each.

/// Bytes of a rank by category; `None` where they are not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Categories {
    /// Of the parameters that it holds.
    pub parameters: Option<u64>,
    /// Of their gradients.
    pub gradients: Option<u64>,
    /// Of the optimizer's tensors, such as momenta, and of float32 master weights.
    pub optimizer_state: Option<u64>,
    /// Of what forwards keep for their backwards, at the most full moment of a step.
    pub activations: Option<u64>,
    /// Of the modules' buffers.
    pub buffers: Option<u64>,
    /// Of host memory for the transfer of tensors.
    pub communication: Option<u64>,
}

impl Categories {
    /// The sum of what is known.
    pub fn total(&self) -> u64 {
        let all = [
            self.parameters,
            self.gradients,
            self.optimizer_state,
            self.activations,
            self.buffers,
            self.communication,
        ];
        all.into_iter().flatten().fold(0, u64::saturating_add)
    }
}

/// What is known of a rank before it has run a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Bytes of its parameters.
    pub parameter_bytes: u64,
    /// Bytes of the gradients of those that are trained.
    pub gradient_bytes: u64,
    /// Bytes of its buffers.
    pub buffer_bytes: u64,
    /// Bytes that one microbatch's forward keeps on it; `None` without a trace.
    pub activation_bytes: Option<u64>,
    /// How many microbatches are in flight on it at most.
    pub in_flight: u32,
    /// Bytes that the optimizer will keep for them on all ranks; `None` for an unknown optimizer.
    pub optimizer_bytes: Option<u64>,
    /// Bytes of the master weights that it will keep with them.
    pub master_bytes: u64,
    /// Over how many ranks the optimizer's state is sharded.
    pub optimizer_shards: u32,
}

impl Expected {
    /// The prediction. Communication depends on what crosses, and is not predicted.
    pub fn categories(&self) -> Categories {
        let shards = u64::from(self.optimizer_shards.max(1));
        let share = |bytes: u64| bytes.saturating_add(self.master_bytes).div_ceil(shards);
        let kept = |bytes: u64| bytes.saturating_mul(u64::from(self.in_flight));
        Categories {
            parameters: Some(self.parameter_bytes),
            gradients: Some(self.gradient_bytes),
            optimizer_state: self.optimizer_bytes.map(share),
            activations: self.activation_bytes.map(kept),
            buffers: Some(self.buffer_bytes),
            communication: None,
        }
    }
}
