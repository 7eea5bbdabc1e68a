//! The cost of a node (paper, appendix C.3), in exact integers, so that equal modules cost equally
//! and no sum depends on its order.

use crate::node::Tree;
use crate::request::PartitionRequest;

/// Costs are parts of this; the root's is about this much.
const UNIT: f64 = 1_125_899_906_842_624.0; // 2^50: integers of this size are exact in a float

/// Where the computation part of costs comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Computation {
    /// Measured seconds of forwards.
    MeasuredTime,
    /// Numbers of modules that are executed.
    NumberOfModules,
}

/// Costs of all nodes.
#[derive(Clone, Debug)]
pub(crate) struct NodeCosts {
    /// Of the node itself.
    pub(crate) own: Vec<u64>,
    /// Of the node and all below it.
    pub(crate) subtree: Vec<u64>,
    /// Bytes of the node itself.
    pub(crate) memory: Vec<f64>,
    /// Where computation comes from.
    pub(crate) computation: Computation,
}

impl NodeCosts {
    pub(crate) fn new(request: &PartitionRequest, tree: &Tree) -> Self {
        let modules = &request.modules;
        let measured = modules.iter().any(|module| module.own_seconds.is_some());
        let executed = request.executed();

        let mut memory = vec![0.0; tree.len()];
        let mut compute = vec![0.0; tree.len()];
        let mut counted = vec![false; request.parameters.len()];
        for (number, module) in modules.iter().enumerate() {
            let node = tree.node_of[number].index();
            for &parameter in &module.parameters {
                if !std::mem::replace(&mut counted[parameter], true) {
                    memory[node] += bytes(request.parameters[parameter].bytes);
                }
            }
            memory[node] += bytes(module.buffer_bytes);
            memory[node] += module.own_activation_bytes.map_or(0.0, bytes);
            compute[node] += match module.own_seconds {
                Some(seconds) => seconds,
                None if !measured && executed[number] => 1.0,
                None => 0.0,
            };
        }
        let (all_memory, all_compute): (f64, f64) = (memory.iter().sum(), compute.iter().sum());
        let own: Vec<u64> = memory
            .iter()
            .zip(&compute)
            .map(|(memory, compute)| {
                let memory = request.alpha * share(*memory, all_memory);
                parts(memory + (1.0 - request.alpha) * share(*compute, all_compute))
            })
            .collect();
        let mut subtree = own.clone();
        for node in tree.bottom_up() {
            if let Some(parent) = tree.parent[node.index()] {
                subtree[parent.index()] += subtree[node.index()];
            }
        }
        Self {
            own,
            subtree,
            memory,
            computation: if measured {
                Computation::MeasuredTime
            } else {
                Computation::NumberOfModules
            },
        }
    }

    /// A cost as a fraction of the root's.
    #[expect(clippy::cast_precision_loss, reason = "for people and reports only")]
    pub(crate) fn normalized(&self, cost: u64) -> f64 {
        share(cost as f64, self.subtree[0] as f64)
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a model below 8 PiB is counted exactly"
)]
fn bytes(bytes: u64) -> f64 {
    bytes as f64
}

#[expect(clippy::cast_sign_loss, reason = "shares are 0 or more")]
fn parts(share: f64) -> u64 {
    (share * UNIT).round() as u64
}
