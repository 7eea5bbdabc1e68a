//! From costs to places: Algorithms 1 and 2 of the paper, and placement by hand.

use std::collections::BTreeSet;

use shardwright_core::PipelineRank;

use crate::allot::{Claim, dhondt, segments};
use crate::cost::NodeCosts;
use crate::node::{NodeId, Tree};

/// The devices of every node, ascending; the first is where the node itself goes.
pub(crate) type Places = Vec<Vec<PipelineRank>>;

/// Every node to its own place, else to that of the nearest one above that has one, else to `rest`.
pub(crate) fn by_hand(tree: &Tree, pinned: &[Option<PipelineRank>], rest: PipelineRank) -> Places {
    let mut places: Places = vec![Vec::new(); tree.len()];
    for &node in &tree.breadth_first {
        let above = tree.parent[node.index()].map(|parent| places[parent.index()][0]);
        places[node.index()] = vec![pinned[node.index()].or(above).unwrap_or(rest)];
    }
    places
}

/// Algorithm 1, with nodes that are placed by hand left where they are.
pub(crate) fn by_cost(
    tree: &Tree,
    costs: &NodeCosts,
    pinned: &[Option<PipelineRank>],
    num_devices: u32,
) -> Places {
    let dealer = Dealer {
        costs,
        capacity: capacities(tree, costs, pinned),
    };
    let mut places: Places = vec![Vec::new(); tree.len()];
    places[0] = pinned[0].map_or_else(
        || (0..num_devices).map(PipelineRank).collect(),
        |rank| vec![rank],
    );
    for &node in &tree.breadth_first {
        let devices = places[node.index()].clone();
        let mut free = Vec::new();
        for &child in &tree.children[node.index()] {
            match pinned[child.index()] {
                Some(rank) => places[child.index()] = vec![rank],
                None if tree.holds_parameters[child.index()] => free.push(child),
                None => places[child.index()] = vec![devices[0]],
            }
        }
        dealer.partition(&devices, &free, devices[0], &mut places);
    }
    places
}

/// How many devices each node can keep busy: those of its children, but at least its own.
///
/// The printed algorithm has no such limit and can give a leaf several devices, of which all but
/// the first would stay empty.
fn capacities(tree: &Tree, costs: &NodeCosts, pinned: &[Option<PipelineRank>]) -> Vec<usize> {
    let mut capacity = vec![0; tree.len()];
    for node in tree.bottom_up() {
        let below: usize = tree.children[node.index()]
            .iter()
            .filter(|child| tree.holds_parameters[child.index()])
            .filter(|child| pinned[child.index()].is_none() && costs.subtree[child.index()] > 0)
            .map(|child| capacity[child.index()])
            .sum();
        capacity[node.index()] = below.max(1);
    }
    capacity
}

struct Dealer<'a> {
    costs: &'a NodeCosts,
    capacity: Vec<usize>,
}

impl Dealer<'_> {
    /// Algorithm 2: deals `devices` to consecutive `nodes`; what gets none goes to `above`, the
    /// device of their parent, also within a segment that is divided again.
    fn partition(
        &self,
        devices: &[PipelineRank],
        nodes: &[NodeId],
        above: PipelineRank,
        places: &mut Places,
    ) {
        if devices.len() == 1 || nodes.len() == 1 {
            for node in nodes {
                places[node.index()] = devices.to_vec();
            }
            return;
        }
        let costs: Vec<u64> = nodes
            .iter()
            .map(|node| self.costs.subtree[node.index()])
            .collect();
        let segments = segments(&costs, devices.len());
        let claims: Vec<Claim> = segments
            .iter()
            .map(|segment| Claim {
                cost: costs[segment.clone()].iter().sum(),
                capacity: nodes[segment.clone()]
                    .iter()
                    .filter(|node| self.costs.subtree[node.index()] > 0)
                    .map(|node| self.capacity[node.index()])
                    .sum(),
            })
            .collect();
        for (segment, won) in segments.into_iter().zip(dhondt(devices, &claims)) {
            let nodes = &nodes[segment];
            if won.is_empty() {
                for node in nodes {
                    places[node.index()] = vec![above];
                }
            } else {
                self.partition(&won, nodes, above, places);
            }
        }
    }
}

/// Devices that no node went to.
pub(crate) fn unused(places: &Places, num_devices: u32) -> BTreeSet<PipelineRank> {
    let mut unused: BTreeSet<PipelineRank> = (0..num_devices).map(PipelineRank).collect();
    for devices in places {
        unused.remove(&devices[0]);
    }
    unused
}
