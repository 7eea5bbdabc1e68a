//! What a partition is decided from: a traced model as a value.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardwright_core::{ModuleId, PipelineRank};

use crate::PartitionError;
use crate::measured::Measured;

/// The newest format of [`PartitionRequest`] and [`PartitionDecision`](crate::PartitionDecision).
pub const FORMAT_VERSION: u32 = 3;

/// A parameter; its id is its place in [`PartitionRequest::parameters`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterInput {
    /// All its global names.
    pub names: Vec<String>,
    /// Bytes of its values.
    pub bytes: u64,
    /// Number of its values.
    pub numel: u64,
}

/// A module; its id is its place in [`PartitionRequest::modules`], which is that of `named_modules()`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleInput {
    /// Its name in `named_modules()`; empty for the root.
    pub name: String,
    /// The name of its class.
    pub class_name: String,
    /// Every module that has it as a child; none for the root.
    #[serde(default)]
    pub parents: Vec<ModuleId>,
    /// Parameters it holds itself.
    #[serde(default)]
    pub parameters: Vec<usize>,
    /// Bytes of buffers it holds itself.
    #[serde(default)]
    pub buffer_bytes: u64,
    /// Whether it can be executed; a list of modules cannot.
    #[serde(default = "yes")]
    pub has_forward: bool,
    /// When it was first executed, counted over all modules; `None` if it was not, or not traced.
    #[serde(default)]
    pub execution_index: Option<u64>,
    /// Seconds of its own code, without the modules it calls; `None` if not measured.
    #[serde(default)]
    pub own_seconds: Option<f64>,
    /// Bytes of activations it keeps that no other module kept before; `None` if not traced.
    #[serde(default)]
    pub own_activation_bytes: Option<u64>,
}

const fn yes() -> bool {
    true
}

/// How often one module calls another within a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    /// The module whose forward makes the call.
    pub caller: ModuleId,
    /// The module called.
    pub callee: ModuleId,
    /// Calls of one microbatch.
    pub count: u32,
}

/// A module placed by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The module.
    pub module: ModuleId,
    /// Where it goes, with all below it that is not placed itself.
    pub pp_rank: PipelineRank,
}

/// A model, and how to divide it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionRequest {
    /// The format; see [`FORMAT_VERSION`].
    pub format_version: u32,
    /// All modules in `named_modules()` order; the first is the root.
    pub modules: Vec<ModuleInput>,
    /// All parameters, each once.
    pub parameters: Vec<ParameterInput>,
    /// Pairs of modules that must share a rank though they share no parameter.
    #[serde(default)]
    pub joins: Vec<(ModuleId, ModuleId)>,
    /// Modules placed by hand.
    #[serde(default)]
    pub pins: Vec<Pin>,
    /// Calls seen in a trace; the hierarchy stands in where there are none.
    #[serde(default)]
    pub calls: Vec<Calls>,
    /// Stages of the pipeline.
    pub num_devices: u32,
    /// Weight of memory against computation, from 0 to 1.
    pub alpha: f64,
    /// Whether modules without a place are placed by cost, or go to `default_partition`.
    pub auto: bool,
    /// Where modules without a place go when `auto` is false.
    #[serde(default)]
    pub default_partition: PipelineRank,
    /// A measured forward, by which the division is refined; `None` leaves it as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// Reads the version first, so that a newer format is refused by name and not by its fields.
pub(crate) fn check_version(text: &str, what: &'static str) -> Result<(), PartitionError> {
    #[derive(Deserialize)]
    struct Versioned {
        format_version: u32,
    }
    let Versioned { format_version } = parse(text, what)?;
    if format_version > FORMAT_VERSION {
        return Err(PartitionError::NewerFormat {
            what,
            found: format_version,
            known: FORMAT_VERSION,
        });
    }
    Ok(())
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(
    text: &'a str,
    what: &'static str,
) -> Result<T, PartitionError> {
    serde_json::from_str(text).map_err(|error| PartitionError::Format {
        what,
        reason: error.to_string(),
    })
}

impl PartitionRequest {
    /// Reads a request written as JSON, and checks it.
    pub fn from_json(text: &str) -> Result<Self, PartitionError> {
        const WHAT: &str = "partition request";
        check_version(text, WHAT)?;
        let request: Self = parse(text, WHAT)?;
        request.check()?;
        Ok(request)
    }

    /// Refuses a request that names what it does not contain, or whose numbers make no sense.
    pub fn check(&self) -> Result<(), PartitionError> {
        if self.num_devices == 0 {
            return Err(not_allowed("num_devices", 0, "1 or more"));
        }
        if !(0.0..=1.0).contains(&self.alpha) {
            return Err(not_allowed("alpha (memory_weight)", self.alpha, "0 to 1"));
        }
        self.check_rank("default_partition", self.default_partition)?;
        self.check_hierarchy()?;
        self.check_parameters()?;
        let pairs = self.calls.iter().map(|calls| (calls.caller, calls.callee));
        for (first, second) in self.joins.iter().copied().chain(pairs) {
            self.check_module(first)?;
            self.check_module(second)?;
        }
        if let Some(measured) = &self.measured {
            measured.check(self.modules.len())?;
        }
        let mut placed: BTreeMap<ModuleId, PipelineRank> = BTreeMap::new();
        for pin in &self.pins {
            self.check_module(pin.module)?;
            let name = self.shown_name(pin.module);
            self.check_rank(&format!("the partition of module {name:?}"), pin.pp_rank)?;
            if let Some(other) = placed.insert(pin.module, pin.pp_rank)
                && other != pin.pp_rank
            {
                return Err(PartitionError::Conflict {
                    first: name.clone(),
                    first_rank: other.0,
                    second: name,
                    second_rank: pin.pp_rank.0,
                    reason: "they are the same module".to_owned(),
                });
            }
        }
        Ok(())
    }

    fn check_hierarchy(&self) -> Result<(), PartitionError> {
        let refused = |number: usize, problem| PartitionError::Hierarchy {
            module: self
                .modules
                .get(number)
                .map_or(String::new(), |module| module.name.clone()),
            number,
            problem,
        };
        if self.modules.is_empty() {
            return Err(refused(0, "is missing: the first module is the root"));
        }
        for (number, module) in self.modules.iter().enumerate() {
            if (number == 0) != module.parents.is_empty() {
                return Err(refused(
                    number,
                    "is not the first and has no parent, or is the first and has one",
                ));
            }
            for &parent in &module.parents {
                self.check_module(parent)?;
            }
            if let Some(seconds) = module.own_seconds
                && !(seconds.is_finite() && seconds >= 0.0)
            {
                let what = format!("own_seconds of module {:?}", module.name);
                return Err(not_allowed(what, seconds, "a finite number of 0 or more"));
            }
        }
        let children = self.children();
        let mut reached = vec![false; self.modules.len()];
        let mut open = vec![0];
        while let Some(module) = open.pop() {
            if !std::mem::replace(&mut reached[module], true) {
                open.extend(&children[module]);
            }
        }
        match reached.iter().position(|&reached| !reached) {
            Some(number) => Err(refused(number, "cannot be reached from the root")),
            None => Ok(()),
        }
    }

    fn check_parameters(&self) -> Result<(), PartitionError> {
        let mut held = vec![false; self.parameters.len()];
        for module in &self.modules {
            for &parameter in &module.parameters {
                let Some(held) = held.get_mut(parameter) else {
                    let what = format!("a parameter of module {:?}", module.name);
                    let allowed = format!("numbers below {}", self.parameters.len());
                    return Err(not_allowed(what, parameter, allowed));
                };
                *held = true;
            }
        }
        match held.iter().position(|&held| !held) {
            Some(number) => Err(PartitionError::Orphan {
                parameter: self.parameter_name(number),
            }),
            None => Ok(()),
        }
    }

    fn check_module(&self, module: ModuleId) -> Result<(), PartitionError> {
        let number = self.modules.len();
        if (module.0 as usize) < number {
            return Ok(());
        }
        Err(not_allowed(
            "a module's number",
            module,
            format!("numbers below {number}"),
        ))
    }

    fn check_rank(&self, what: &str, rank: PipelineRank) -> Result<(), PartitionError> {
        if rank.0 < self.num_devices {
            return Ok(());
        }
        Err(not_allowed(
            what,
            rank,
            format!("0 to {}", self.num_devices - 1),
        ))
    }

    /// The children of every module, in order of registration, each once.
    pub(crate) fn children(&self) -> Vec<Vec<usize>> {
        let mut children = vec![Vec::new(); self.modules.len()];
        for (number, module) in self.modules.iter().enumerate() {
            for parent in &module.parents {
                let siblings: &mut Vec<usize> = &mut children[parent.0 as usize];
                if siblings.last() != Some(&number) {
                    siblings.push(number);
                }
            }
        }
        children
    }

    /// Which modules are executed; without a trace, those that can be.
    pub(crate) fn executed(&self) -> Vec<bool> {
        let mut modules = self.modules.iter();
        let is_traced = modules.any(|module| module.execution_index.is_some());
        let executed = |module: &ModuleInput| {
            if is_traced {
                module.execution_index.is_some()
            } else {
                module.has_forward
            }
        };
        self.modules.iter().map(executed).collect()
    }

    /// A module's name; its class for the root, which has no name.
    pub(crate) fn shown_name(&self, module: ModuleId) -> String {
        let module = &self.modules[module.0 as usize];
        if module.name.is_empty() {
            module.class_name.clone()
        } else {
            module.name.clone()
        }
    }

    pub(crate) fn parameter_name(&self, parameter: usize) -> String {
        let first = self.parameters[parameter].names.first();
        first
            .cloned()
            .unwrap_or_else(|| format!("number {parameter}"))
    }
}

pub(crate) fn not_allowed(
    what: impl Into<String>,
    value: impl std::fmt::Display,
    allowed: impl Into<String>,
) -> PartitionError {
    PartitionError::NotAllowed {
        what: what.into(),
        value: value.to_string(),
        allowed: allowed.into(),
    }
}
