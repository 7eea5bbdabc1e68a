//! Moves modules to other ranks, after the paper's algorithm, wherever the simulated step gets
//! faster.

mod line;
mod search;
mod units;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use shardwright_core::PipelineRank;

use crate::PartitionError;
use crate::assign::Places;
use crate::cost::NodeCosts;
use crate::measured::Measured;
use crate::node::{NodeId, Tree};
use crate::request::PartitionRequest;
use line::StretchSequence;
use search::Search;
use units::Units;

/// A refinement that gains less than this part of the step leaves everything where it was.
const LEAST_GAIN: f64 = 0.01;

/// What a refinement did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refinement {
    /// The simulated step before it, in seconds.
    pub seconds_before: f64,
    /// The simulated step after it, in seconds.
    pub seconds_after: f64,
    /// Nodes with parameters that it moved.
    pub moved_nodes: u64,
    /// Steps that were simulated for it.
    pub simulated_steps: u64,
}

/// The most bytes that a rank may hold, in those of the fullest rank before the refinement: with a
/// `memory_weight` of 1 as many, with 0 half as many again.
fn memory_tolerance(alpha: f64) -> f64 {
    1.0 + (1.0 - alpha) / 2.0
}

/// Moves nodes. `follows` says which modules run wherever they are called.
pub(crate) fn refine(
    request: &PartitionRequest,
    measured: &Measured,
    tree: &Tree,
    costs: &NodeCosts,
    pinned: &[Option<PipelineRank>],
    follows: &[bool],
    places: &mut Places,
) -> Result<Option<Refinement>, PartitionError> {
    let free = free_nodes(tree, pinned);
    let decides = |node| deciding_node(tree, pinned, &free, node);
    let undivided = node_sets(request, measured, tree, follows, decides);
    let before: Vec<PipelineRank> = places.iter().map(|devices| devices[0]).collect();
    let divided = |nodes: &Vec<NodeId>| nodes.windows(2).any(|pair| !together(&before, pair));
    if request.num_devices == 1 || measured.pieces.is_empty() || undivided.iter().any(divided) {
        // Where microbatches run one after another, no order of the modules is faster.
        return Ok(None);
    }
    let line = StretchSequence::new(request, measured, tree, follows);
    let mut time = vec![0.0; tree.len()];
    for stretch in &line.stretches {
        time[stretch.node.index()] += stretch.forward.as_secs_f64();
    }
    let units = Units::new(
        tree,
        &shares(&time),
        &shares(&costs.memory),
        &free,
        request.num_devices,
    );
    // What holds no parameters goes where its parent goes, so its bytes count there.
    let mut memory = vec![0.0; tree.len()];
    for &node in &tree.breadth_first {
        memory[decides(node).index()] += costs.memory[node.index()];
    }
    let mut search = Search::new(
        &line,
        &units,
        measured.schedule()?,
        measured.num_microbatches,
        request.num_devices,
        &memory,
        &undivided,
        holding(request, tree),
    );
    let best = search.run(&before, memory_tolerance(request.alpha));
    let mut refinement = Refinement {
        seconds_before: best.before.as_secs_f64(),
        seconds_after: best.before.as_secs_f64(),
        moved_nodes: 0,
        simulated_steps: search.simulated_steps(),
    };
    if best.after.as_secs_f64() < best.before.as_secs_f64() * (1.0 - LEAST_GAIN) {
        refinement.seconds_after = best.after.as_secs_f64();
        for &node in &tree.breadth_first {
            let number = node.index();
            if free[number] {
                if best.ranks[number] != before[number] {
                    places[number] = vec![best.ranks[number]];
                    refinement.moved_nodes += 1;
                }
            } else if let (None, Some(parent)) = (pinned[number], tree.parent[number]) {
                // What holds no parameters stays with its parent, as before.
                places[number] = vec![places[parent.index()][0]];
            }
        }
    }
    Ok(Some(refinement))
}

/// Nodes that hold parameters, at any depth, are not the root, and are neither placed by hand nor
/// below one that is.
fn free_nodes(tree: &Tree, pinned: &[Option<PipelineRank>]) -> Vec<bool> {
    let mut fixed = vec![false; tree.len()];
    for &node in &tree.breadth_first {
        let above = tree.parent[node.index()];
        fixed[node.index()] =
            pinned[node.index()].is_some() || above.is_some_and(|parent| fixed[parent.index()]);
    }
    fixed[0] = true;
    (0..tree.len())
        .map(|node| !fixed[node] && tree.holds_parameters[node])
        .collect()
}

/// Which nodes hold parameters themselves.
fn holding(request: &PartitionRequest, tree: &Tree) -> Vec<bool> {
    let holds = |modules: &Vec<shardwright_core::ModuleId>| {
        let mut modules = modules.iter();
        modules.any(|module| !request.modules[module.0 as usize].parameters.is_empty())
    };
    tree.modules.iter().map(holds).collect()
}

/// The node whose place is a node's too: what holds no parameters stays with its parent.
fn deciding_node(
    tree: &Tree,
    pinned: &[Option<PipelineRank>],
    free: &[bool],
    mut node: NodeId,
) -> NodeId {
    while let (false, None, Some(parent)) = (
        free[node.index()],
        pinned[node.index()],
        tree.parent[node.index()],
    ) {
        node = parent;
    }
    node
}

/// For each module that must not be divided, the nodes that decide where all is that is below it and has a place.
fn node_sets(
    request: &PartitionRequest,
    measured: &Measured,
    tree: &Tree,
    follows: &[bool],
    decides: impl Fn(NodeId) -> NodeId,
) -> Vec<Vec<NodeId>> {
    let children = request.children();
    let below = |top: usize| {
        let placed = |module: usize| !tree.containers[tree.node_of[module].index()];
        let mut found = BTreeSet::new();
        if placed(top) {
            found.insert(decides(tree.node_of[top]));
        }
        let mut seen = BTreeSet::new();
        let mut open = vec![top];
        while let Some(module) = open.pop() {
            if seen.insert(module) {
                if !follows[module] && placed(module) {
                    found.insert(decides(tree.node_of[module]));
                }
                open.extend(&children[module]);
            }
        }
        found.into_iter().collect()
    };
    let modules: BTreeSet<usize> = measured.undivided.iter().map(|m| m.0 as usize).collect();
    modules.into_iter().map(below).collect()
}

/// Whether nodes that follow one another in a list are on one rank.
fn together(ranks: &[PipelineRank], nodes: &[NodeId]) -> bool {
    let mut pairs = nodes.windows(2);
    pairs.all(|pair| ranks[pair[0].index()] == ranks[pair[1].index()])
}

fn shares(values: &[f64]) -> Vec<f64> {
    let whole: f64 = values.iter().sum();
    let share = |value: &f64| if whole > 0.0 { value / whole } else { 0.0 };
    values.iter().map(share).collect()
}
