//! The decision as a value.

use serde::{Deserialize, Serialize};
use shardwright_core::{ModuleId, PipelineRank};

use crate::assign::{Places, by_cost, by_hand, unused};
use crate::cost::{Computation, NodeCosts};
use crate::crossing::{Crossing, crossings};
use crate::node::{NodeId, Tree};
use crate::refine::{Refinement, refine};
use crate::request::{FORMAT_VERSION, PartitionRequest, check_version, parse};
use crate::{PartitionError, table};

/// Where a module goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModulePlace {
    /// Its name in `named_modules()`.
    pub name: String,
    /// The name of its class.
    pub class_name: String,
    /// The rank it runs on.
    pub pp_rank: PipelineRank,
    /// Whether everything below it runs on that rank too; else it is spanning.
    pub whole: bool,
    /// Whether it holds nothing that ties it to a rank, so that it runs wherever it is called.
    pub follows_caller: bool,
    /// The node it belongs to.
    pub node: NodeId,
}

/// A node of the tree, with its costs as fractions of the root's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodePlace {
    /// Its modules.
    pub modules: Vec<ModuleId>,
    /// Its parent.
    pub parent: Option<NodeId>,
    /// The cost of the node and all below it.
    pub cost: f64,
    /// The cost of the node itself.
    pub own_cost: f64,
    /// Its place: the first of its devices.
    pub pp_rank: PipelineRank,
    /// The devices that were divided among what is below it; one where the refinement moved it.
    pub devices: Vec<PipelineRank>,
}

/// What one device holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLoad {
    /// The device.
    pub pp_rank: PipelineRank,
    /// Its part of the model's cost, from 0 to 1.
    pub cost: f64,
    /// Values of its parameters.
    pub parameters: u64,
    /// Bytes of its parameters.
    pub parameter_bytes: u64,
    /// Bytes of its buffers.
    pub buffer_bytes: u64,
    /// Bytes that one microbatch's forward keeps for its backward; `None` without a trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_bytes: Option<u64>,
    /// Its modules.
    pub modules: u64,
}

/// Which module runs on which rank, and what that costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionDecision {
    /// The format; see [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Stages of the pipeline.
    pub num_devices: u32,
    /// Weight of memory against computation.
    pub alpha: f64,
    /// Whether modules without a place of their own were placed by cost.
    pub auto: bool,
    /// Where the computation part of costs came from.
    pub computation: Computation,
    /// Every module, in `named_modules()` order.
    pub modules: Vec<ModulePlace>,
    /// The rank of every parameter.
    pub parameter_ranks: Vec<PipelineRank>,
    /// The tree that was divided; the root is the first.
    pub nodes: Vec<NodePlace>,
    /// What every device holds.
    pub devices: Vec<DeviceLoad>,
    /// Devices that no node went to: the model has too few parts.
    pub unused_devices: Vec<PipelineRank>,
    /// Calls that lead to another rank.
    pub crossings: Vec<Crossing>,
    /// Requests that one microbatch's forward makes; its backward makes as many.
    pub boundary_crossings_per_microbatch: u64,
    /// What the refinement did; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refinement: Option<Refinement>,
}

impl PartitionDecision {
    /// Decides where every module goes.
    pub fn new(request: &PartitionRequest) -> Result<Self, PartitionError> {
        request.check()?;
        let tree = Tree::new(request);
        let costs = NodeCosts::new(request, &tree);
        let pinned = tree.pinned(request)?;
        let below = all_below(request);
        let follows = followers(request, &tree, &pinned, &below);
        let mut places = if request.auto {
            by_cost(&tree, &costs, &pinned, request.num_devices)
        } else {
            by_hand(&tree, &pinned, request.default_partition)
        };
        let refinement = match &request.measured {
            Some(measured) if request.auto => refine(
                request,
                measured,
                &tree,
                &costs,
                &pinned,
                &follows,
                &mut places,
            )?,
            _ => None,
        };
        if request.auto {
            place_containers(&tree, &follows, &below, &mut places);
        }
        let modules = module_places(request, &tree, &places, &follows, &below);
        let (crossings, boundary_crossings_per_microbatch) = crossings(request, &modules);
        let mut parameter_ranks = vec![PipelineRank(0); request.parameters.len()];
        for (module, place) in request.modules.iter().zip(&modules) {
            for &parameter in &module.parameters {
                parameter_ranks[parameter] = place.pp_rank;
            }
        }
        Ok(Self {
            format_version: FORMAT_VERSION,
            num_devices: request.num_devices,
            alpha: request.alpha,
            auto: request.auto,
            computation: costs.computation,
            devices: device_loads(request, &tree, &costs, &places, &modules),
            unused_devices: unused(&places, request.num_devices).into_iter().collect(),
            nodes: node_places(&tree, &costs, places),
            modules,
            parameter_ranks,
            crossings,
            boundary_crossings_per_microbatch,
            refinement,
        })
    }

    /// Reads a decision written as JSON.
    pub fn from_json(text: &str) -> Result<Self, PartitionError> {
        const WHAT: &str = "partition decision";
        check_version(text, WHAT)?;
        parse(text, WHAT)
    }

    /// The decision as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers are finite and keys are text")
    }

    /// The decision as a table for people.
    pub fn to_table(&self) -> String {
        table::render(self)
    }
}

fn all_below(request: &PartitionRequest) -> Vec<Below> {
    let children = request.children();
    (0..request.modules.len())
        .map(|module| Below::of(request, &children, module))
        .collect()
}

/// Which modules run wherever they are called.
fn followers(
    request: &PartitionRequest,
    tree: &Tree,
    pinned: &[Option<PipelineRank>],
    below: &[Below],
) -> Vec<bool> {
    let follows_caller = |module: usize| {
        let one_parent = request.modules[module].parents.len() == 1;
        module != 0
            && !below[module].parameters
            && pinned[tree.node_of[module].index()].is_none()
            && tree.modules[tree.node_of[module].index()].len() == 1
            && (one_parent || !below[module].buffers)
    };
    (0..request.modules.len()).map(follows_caller).collect()
}

/// A container is with the first rank of those that what it holds is on.
fn place_containers(tree: &Tree, follows: &[bool], below: &[Below], places: &mut Places) {
    for node in (0..tree.len()).filter(|&node| tree.containers[node]) {
        let held = tree.modules[node]
            .iter()
            .flat_map(|module| &below[module.0 as usize].modules)
            .filter(|&&inner| !follows[inner])
            .map(|&inner| tree.node_of[inner])
            .filter(|inner| !tree.containers[inner.index()]);
        if let Some(first) = held.map(|inner| places[inner.index()][0]).min() {
            places[node] = vec![first];
        }
    }
}

fn module_places(
    request: &PartitionRequest,
    tree: &Tree,
    places: &Places,
    follows: &[bool],
    below: &[Below],
) -> Vec<ModulePlace> {
    let rank = |module: usize| places[tree.node_of[module].index()][0];
    // A container runs nowhere, so nothing is divided by where it is said to be.
    let anywhere = |module: usize| follows[module] || tree.containers[tree.node_of[module].index()];
    let place = |(number, module): (usize, &crate::ModuleInput)| ModulePlace {
        name: module.name.clone(),
        class_name: module.class_name.clone(),
        pp_rank: rank(number),
        whole: below[number]
            .modules
            .iter()
            .all(|&inner| anywhere(inner) || rank(inner) == rank(number)),
        follows_caller: follows[number],
        node: tree.node_of[number],
    };
    request.modules.iter().enumerate().map(place).collect()
}

/// What a module contains, itself included.
struct Below {
    modules: Vec<usize>,
    parameters: bool,
    buffers: bool,
}

impl Below {
    fn of(request: &PartitionRequest, children: &[Vec<usize>], root: usize) -> Self {
        let mut below = Self {
            modules: Vec::new(),
            parameters: false,
            buffers: false,
        };
        let mut seen = std::collections::BTreeSet::new();
        let mut open = vec![root];
        while let Some(module) = open.pop() {
            if seen.insert(module) {
                below.modules.push(module);
                below.parameters |= !request.modules[module].parameters.is_empty();
                below.buffers |= request.modules[module].buffer_bytes > 0;
                open.extend(&children[module]);
            }
        }
        below
    }
}

fn node_places(tree: &Tree, costs: &NodeCosts, places: Places) -> Vec<NodePlace> {
    let place = |(number, devices): (usize, Vec<PipelineRank>)| NodePlace {
        modules: tree.modules[number].clone(),
        parent: tree.parent[number],
        cost: costs.normalized(costs.subtree[number]),
        own_cost: costs.normalized(costs.own[number]),
        pp_rank: devices[0],
        devices,
    };
    places.into_iter().enumerate().map(place).collect()
}

fn device_loads(
    request: &PartitionRequest,
    tree: &Tree,
    costs: &NodeCosts,
    places: &Places,
    modules: &[ModulePlace],
) -> Vec<DeviceLoad> {
    let mut loads: Vec<DeviceLoad> = (0..request.num_devices)
        .map(|rank| DeviceLoad {
            pp_rank: PipelineRank(rank),
            ..DeviceLoad::default()
        })
        .collect();
    let mut cost = vec![0; loads.len()];
    for node in 0..tree.len() {
        cost[places[node][0].0 as usize] += costs.own[node];
    }
    for (load, cost) in loads.iter_mut().zip(cost) {
        load.cost = costs.normalized(cost);
    }
    let mut counted = vec![false; request.parameters.len()];
    for (module, place) in request.modules.iter().zip(modules) {
        let load = &mut loads[place.pp_rank.0 as usize];
        load.modules += 1;
        load.buffer_bytes += module.buffer_bytes;
        if let Some(bytes) = module.own_activation_bytes {
            load.activation_bytes = Some(load.activation_bytes.unwrap_or(0) + bytes);
        }
        for &parameter in &module.parameters {
            if !std::mem::replace(&mut counted[parameter], true) {
                load.parameters += request.parameters[parameter].numel;
                load.parameter_bytes += request.parameters[parameter].bytes;
            }
        }
    }
    loads
}
