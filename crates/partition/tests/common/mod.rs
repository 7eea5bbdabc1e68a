//! Models to divide.
#![allow(dead_code, reason = "every test file takes what it needs")]

pub(crate) mod drawn;

use std::num::NonZeroU32;

use shardwright_core::{ModuleId, PipelineRank};
use shardwright_partition::{
    Execution, FORMAT_VERSION, Measured, ModuleInput, ModuleInterval, ParameterInput,
    PartitionDecision, PartitionRequest, Pin,
};

/// A model under construction: modules in order of registration, executed in that order.
pub(crate) struct Model {
    pub(crate) request: PartitionRequest,
}

impl Model {
    pub(crate) fn new(class_name: &str, num_devices: u32) -> Self {
        let mut model = Self {
            request: PartitionRequest {
                format_version: FORMAT_VERSION,
                modules: Vec::new(),
                parameters: Vec::new(),
                joins: Vec::new(),
                pins: Vec::new(),
                calls: Vec::new(),
                num_devices,
                alpha: 0.8,
                auto: true,
                default_partition: PipelineRank(0),
                measured: None,
            },
        };
        model.push("", class_name, Vec::new());
        model
    }

    fn push(&mut self, name: &str, class_name: &str, parents: Vec<ModuleId>) -> ModuleId {
        let number = self.request.modules.len();
        let container = matches!(class_name, "ModuleList" | "ModuleDict");
        self.request.modules.push(ModuleInput {
            name: name.to_owned(),
            class_name: class_name.to_owned(),
            parents,
            parameters: Vec::new(),
            buffer_bytes: 0,
            has_forward: !container,
            execution_index: (!container).then_some(number as u64),
            own_seconds: None,
            own_activation_bytes: None,
        });
        ModuleId(number as u32)
    }

    pub(crate) fn child(&mut self, parent: ModuleId, name: &str, class_name: &str) -> ModuleId {
        let above = &self.request.modules[parent.0 as usize].name;
        let name = if above.is_empty() {
            name.to_owned()
        } else {
            format!("{above}.{name}")
        };
        self.push(&name, class_name, vec![parent])
    }

    /// A new parameter of 4-byte values.
    pub(crate) fn parameter(&mut self, module: ModuleId, name: &str, numel: u64) -> usize {
        let above = &self.request.modules[module.0 as usize].name;
        self.request.parameters.push(ParameterInput {
            names: vec![format!("{above}.{name}")],
            bytes: 4 * numel,
            numel,
        });
        let parameter = self.request.parameters.len() - 1;
        self.share(module, parameter);
        parameter
    }

    pub(crate) fn share(&mut self, module: ModuleId, parameter: usize) {
        let held = &mut self.request.modules[module.0 as usize].parameters;
        held.push(parameter);
    }

    /// A child with one parameter.
    pub(crate) fn leaf(
        &mut self,
        parent: ModuleId,
        name: &str,
        class_name: &str,
        numel: u64,
    ) -> ModuleId {
        let child = self.child(parent, name, class_name);
        self.parameter(child, "weight", numel);
        child
    }

    pub(crate) fn pin(&mut self, module: ModuleId, rank: u32) {
        self.request.pins.push(Pin {
            module,
            pp_rank: PipelineRank(rank),
        });
    }

    pub(crate) fn decide(&self) -> PartitionDecision {
        PartitionDecision::new(&self.request).expect("a good request")
    }
}

pub(crate) const ROOT: ModuleId = ModuleId(0);

pub(crate) fn rank_of(decision: &PartitionDecision, name: &str) -> u32 {
    let module = decision.modules.iter().find(|module| module.name == name);
    module
        .unwrap_or_else(|| panic!("no module {name}"))
        .pp_rank
        .0
}

/// The module tree of a `GPT2LMHeadModel` with its head tied to the embedding.
pub(crate) fn gpt2(num_layers: u64, hidden: u64, vocabulary: u64, num_devices: u32) -> Model {
    let mut model = Model::new("GPT2LMHeadModel", num_devices);
    let transformer = model.child(ROOT, "transformer", "GPT2Model");
    let words = model.child(transformer, "wte", "Embedding");
    let tied = model.parameter(words, "weight", vocabulary * hidden);
    model.leaf(transformer, "wpe", "Embedding", 1024 * hidden);
    model.child(transformer, "drop", "Dropout");
    let blocks = model.child(transformer, "h", "ModuleList");
    for number in 0..num_layers {
        let block = model.child(blocks, &number.to_string(), "GPT2Block");
        model.leaf(block, "ln_1", "LayerNorm", 2 * hidden);
        let attention = model.child(block, "attn", "GPT2Attention");
        model.leaf(attention, "c_attn", "Conv1D", 3 * hidden * (hidden + 1));
        model.leaf(attention, "c_proj", "Conv1D", hidden * (hidden + 1));
        model.child(attention, "attn_dropout", "Dropout");
        model.leaf(block, "ln_2", "LayerNorm", 2 * hidden);
        let mlp = model.child(block, "mlp", "GPT2MLP");
        model.leaf(mlp, "c_fc", "Conv1D", 4 * hidden * (hidden + 1));
        model.leaf(mlp, "c_proj", "Conv1D", hidden * (4 * hidden + 1));
        model.child(mlp, "act", "NewGELUActivation");
    }
    model.leaf(transformer, "ln_f", "LayerNorm", 2 * hidden);
    let head = model.child(ROOT, "lm_head", "Linear");
    model.share(head, tied);
    model
}

/// A forward in which every module calls its children in order of registration; each takes so many
/// seconds itself, half of them before and half after its children.
pub(crate) fn measured(
    request: &PartitionRequest,
    schedule: &str,
    num_microbatches: u32,
    seconds: impl Fn(&ModuleInput) -> f64,
) -> Measured {
    let mut forward = Forward {
        request,
        seconds,
        executions: vec![execution(ROOT, None)],
        pieces: vec![piece(0, 0.0)],
    };
    forward.run(ROOT, 0);
    Measured {
        schedule: schedule.to_owned(),
        num_microbatches: NonZeroU32::new(num_microbatches).expect("1 or more"),
        executions: forward.executions,
        pieces: forward.pieces,
        undivided: Vec::new(),
    }
}

struct Forward<'a, F> {
    request: &'a PartitionRequest,
    seconds: F,
    executions: Vec<Execution>,
    pieces: Vec<ModuleInterval>,
}

impl<F: Fn(&ModuleInput) -> f64> Forward<'_, F> {
    fn run(&mut self, module: ModuleId, caller: u32) {
        let input = &self.request.modules[module.0 as usize];
        if input.execution_index.is_none() {
            self.run_children(module, caller);
            return;
        }
        let number = self.executions.len() as u32;
        self.executions.push(execution(module, Some(caller)));
        self.pieces.push(piece(number, (self.seconds)(input) / 2.0));
        self.run_children(module, number);
        self.pieces.push(piece(number, (self.seconds)(input) / 2.0));
        self.pieces.push(piece(caller, 0.0));
    }

    fn run_children(&mut self, module: ModuleId, caller: u32) {
        for (number, child) in self.request.modules.iter().enumerate() {
            if child.parents.contains(&module) {
                self.run(ModuleId(number as u32), caller);
            }
        }
    }
}

fn execution(module: ModuleId, caller: Option<u32>) -> Execution {
    Execution {
        module,
        caller,
        argument_bytes: 1000,
        result_bytes: 1000,
    }
}

fn piece(execution: u32, seconds: f64) -> ModuleInterval {
    ModuleInterval { execution, seconds }
}
