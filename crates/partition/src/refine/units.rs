//! What a refinement may move: subtrees of the tree of nodes.

use shardwright_core::PipelineRank;

use crate::node::{NodeId, Tree};

/// Beside this part of the model's time and memory, a subtree is too small to be moved alone.
const LEAST_PART: f64 = 0.002;
/// The largest subtrees are moved; a model has more than these only if it is very large.
const MOST_UNITS: usize = 400;

/// A subtree that may go to another rank as a whole.
#[derive(Clone, Debug)]
pub(super) struct MovableUnit {
    /// Its topmost node.
    pub(super) node: NodeId,
    /// Its nodes that hold parameters, at any depth, and are not placed by hand.
    pub(super) nodes: Vec<NodeId>,
    /// Its part of the forward's time, from 0 to 1.
    pub(super) time: f64,
}

/// Units in the order of the tree, and rows of siblings that can be dealt out over ranks in turns.
#[derive(Clone, Debug)]
pub(super) struct Units {
    pub(super) movable: Vec<MovableUnit>,
    /// Nodes that are too small to be moved alone, each with its parent and after it.
    small: Vec<(NodeId, NodeId)>,
    /// Each a set of rows of units, by number.
    pub(super) rows: Vec<Vec<Vec<usize>>>,
}

impl Units {
    /// Of a tree with parts of time and memory by node, of which some may move.
    pub(super) fn new(
        tree: &Tree,
        time: &[f64],
        memory: &[f64],
        free: &[bool],
        num_devices: u32,
    ) -> Self {
        let (mut time_below, mut memory_below) = (time.to_vec(), memory.to_vec());
        for node in tree.bottom_up() {
            if let Some(parent) = tree.parent[node.index()] {
                time_below[parent.index()] += time_below[node.index()];
                memory_below[parent.index()] += memory_below[node.index()];
            }
        }
        let (mut candidates, small): (Vec<NodeId>, Vec<NodeId>) = depth_first(tree)
            .into_iter()
            .filter(|node| free[node.index()])
            .partition(|node| {
                time_below[node.index()] >= LEAST_PART || memory_below[node.index()] >= LEAST_PART
            });
        let small = small
            .into_iter()
            .filter_map(|node| Some((node, tree.parent[node.index()]?)))
            .collect();
        if candidates.len() > MOST_UNITS {
            let mut sizes: Vec<f64> = candidates
                .iter()
                .map(|node| time_below[node.index()].max(memory_below[node.index()]))
                .collect();
            sizes.sort_by(|left, right| right.total_cmp(left));
            let least = sizes[MOST_UNITS];
            candidates
                .retain(|node| time_below[node.index()].max(memory_below[node.index()]) > least);
        }
        let units: Vec<MovableUnit> = candidates
            .iter()
            .map(|&node| MovableUnit {
                node,
                nodes: free_below(tree, free, node),
                time: time_below[node.index()],
            })
            .collect();
        let mut rows: Vec<Vec<Vec<usize>>> = Vec::new();
        for parts in [num_devices, 2 * num_devices] {
            let found = rows_of(tree, &units, &time_below, 1.0 / f64::from(parts));
            if !found.is_empty() && !rows.contains(&found) {
                rows.push(found);
            }
        }
        Self {
            movable: units,
            small,
            rows,
        }
    }

    /// Puts what is too small to be moved alone where its parent is.
    pub(super) fn gather(&self, ranks: &mut [PipelineRank]) {
        for (node, parent) in &self.small {
            ranks[node.index()] = ranks[parent.index()];
        }
    }
}

/// Every node before its children, which are in order of execution.
fn depth_first(tree: &Tree) -> Vec<NodeId> {
    let mut found = Vec::with_capacity(tree.len());
    let mut open = vec![NodeId(0)];
    while let Some(node) = open.pop() {
        found.push(node);
        open.extend(tree.children[node.index()].iter().rev());
    }
    found
}

fn free_below(tree: &Tree, free: &[bool], top: NodeId) -> Vec<NodeId> {
    let mut found = Vec::new();
    let mut open = vec![top];
    while let Some(node) = open.pop() {
        // What is below a node that is placed by hand stays with it.
        if free[node.index()] {
            found.push(node);
            open.extend(&tree.children[node.index()]);
        }
    }
    found
}

/// Siblings that are small enough, with those that are not divided further; what takes no time has no turn.
fn rows_of(tree: &Tree, units: &[MovableUnit], time_below: &[f64], most: f64) -> Vec<Vec<usize>> {
    const LEAST_ROW: f64 = 0.1;
    // The same blocks, measured, differ a little.
    const SLACK: f64 = 1.05;
    let mut unit_of = vec![None; tree.len()];
    for (number, unit) in units.iter().enumerate() {
        unit_of[unit.node.index()] = Some(number);
    }
    let mut rows = Vec::new();
    let mut open = vec![NodeId(0)];
    while let Some(node) = open.pop() {
        let mut row = Vec::new();
        for &child in tree.children[node.index()].iter().rev() {
            let divisible = tree.children[child.index()]
                .iter()
                .any(|below| tree.holds_parameters[below.index()]);
            if divisible && time_below[child.index()] > most * SLACK {
                open.push(child);
            } else if let Some(unit) = unit_of[child.index()]
                && units[unit].time >= LEAST_PART
            {
                row.push(unit);
            }
        }
        row.reverse();
        let time: f64 = row.iter().map(|&unit: &usize| units[unit].time).sum();
        if row.len() > 1 && time >= LEAST_ROW {
            rows.push(row);
        }
    }
    rows
}

/// Deals the units of each row out in turns: `chunk` of them to a rank, then as many to the next.
pub(super) fn in_turns(
    units: &Units,
    rows: &[Vec<usize>],
    chunk: usize,
    first: u32,
    num_devices: u32,
    ranks: &mut [PipelineRank],
) {
    for row in rows {
        for (place, &unit) in row.iter().enumerate() {
            let turn = u32::try_from(place / chunk).expect("a model has fewer modules");
            let rank = PipelineRank((first + turn) % num_devices);
            for node in &units.movable[unit].nodes {
                ranks[node.index()] = rank;
            }
        }
    }
}
