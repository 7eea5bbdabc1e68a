//! `ModuleNode`s: modules that must share a rank, and the tree they form (paper, appendix C.2).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use shardwright_core::{ModuleId, PipelineRank};

use crate::{PartitionError, PartitionRequest};

/// A node of the tree, numbered by its first module; the root is 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl NodeId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The tree of nodes.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    /// The modules of each node, ascending.
    pub(crate) modules: Vec<Vec<ModuleId>>,
    /// The node of each module.
    pub(crate) node_of: Vec<NodeId>,
    /// The one parent kept.
    pub(crate) parent: Vec<Option<NodeId>>,
    /// The children kept, in order of first execution, then those never executed as registered.
    pub(crate) children: Vec<Vec<NodeId>>,
    /// Every node after its parent.
    pub(crate) breadth_first: Vec<NodeId>,
    /// Whether a node or one below it holds a parameter.
    pub(crate) holds_parameters: Vec<bool>,
    /// Nodes that only hold other modules: they take no part in the tree but as leaves, and what
    /// they hold hangs below whoever holds them.
    pub(crate) containers: Vec<bool>,
}

impl Tree {
    pub(crate) fn new(request: &PartitionRequest) -> Self {
        let (modules, node_of) = components(request);
        let num_nodes = modules.len();

        let containers = containers(request, &modules, &node_of);
        let containing = containing(request, &modules, &node_of, &containers);
        let depth = depths(&containing);
        let mut parent: Vec<Option<NodeId>> = vec![None; num_nodes];
        let mut children = vec![Vec::new(); num_nodes];
        for node in 1..num_nodes {
            // Least depth first: fewest steps between a node and those who call it. It also cannot
            // close a cycle, since the depth of a parent is always one less.
            let kept = containing[node]
                .iter()
                .copied()
                .min_by_key(|outer| (depth[outer.index()], *outer))
                .expect("every node but the root has a parent, since every module is reachable");
            parent[node] = Some(kept);
            children[kept.index()].push(NodeId(node as u32));
        }
        let mut breadth_first = Vec::with_capacity(num_nodes);
        let mut queue = VecDeque::from([NodeId(0)]);
        while let Some(node) = queue.pop_front() {
            breadth_first.push(node);
            queue.extend(&children[node.index()]);
        }
        let mut tree = Self {
            holds_parameters: vec![false; num_nodes],
            containers,
            modules,
            node_of,
            parent,
            children,
            breadth_first,
        };
        tree.order_by_execution(request);
        tree.find_parameters(request);
        tree
    }

    pub(crate) fn len(&self) -> usize {
        self.modules.len()
    }

    /// Every node before its parent.
    pub(crate) fn bottom_up(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.breadth_first.iter().rev().copied()
    }

    /// Of a module that is never executed itself, the first descendant counts.
    fn order_by_execution(&mut self, request: &PartitionRequest) {
        let mut first = vec![None; self.len()];
        for node in self.breadth_first.iter().rev() {
            let own = self.modules[node.index()]
                .iter()
                .filter_map(|module| request.modules[module.0 as usize].execution_index);
            let below = self.children[node.index()]
                .iter()
                .filter_map(|child| first[child.index()]);
            first[node.index()] = own.chain(below).min();
        }
        for children in &mut self.children {
            children.sort_by_key(|child| {
                let first: Option<u64> = first[child.index()];
                (first.is_none(), first, *child)
            });
        }
        let mut queue = VecDeque::from([NodeId(0)]);
        self.breadth_first.clear();
        while let Some(node) = queue.pop_front() {
            self.breadth_first.push(node);
            queue.extend(&self.children[node.index()]);
        }
    }

    fn find_parameters(&mut self, request: &PartitionRequest) {
        for node in self.breadth_first.iter().rev() {
            let own = self.modules[node.index()]
                .iter()
                .any(|module| !request.modules[module.0 as usize].parameters.is_empty());
            let below = self.children[node.index()]
                .iter()
                .any(|child| self.holds_parameters[child.index()]);
            self.holds_parameters[node.index()] = own || below;
        }
    }

    /// Where each node is placed by hand.
    pub(crate) fn pinned(
        &self,
        request: &PartitionRequest,
    ) -> Result<Vec<Option<PipelineRank>>, PartitionError> {
        let mut pinned: BTreeMap<NodeId, (ModuleId, PipelineRank)> = BTreeMap::new();
        for pin in &request.pins {
            let node = self.node_of[pin.module.0 as usize];
            let (module, rank) = *pinned.entry(node).or_insert((pin.module, pin.pp_rank));
            if rank != pin.pp_rank {
                return Err(PartitionError::Conflict {
                    first: request.shown_name(module),
                    first_rank: rank.0,
                    second: request.shown_name(pin.module),
                    second_rank: pin.pp_rank.0,
                    reason: self.why_together(request, node),
                });
            }
        }
        let place = |node| pinned.get(&NodeId(node as u32)).map(|(_, rank)| *rank);
        Ok((0..self.len()).map(place).collect())
    }

    fn why_together(&self, request: &PartitionRequest, node: NodeId) -> String {
        let mut holders: BTreeMap<usize, usize> = BTreeMap::new();
        for module in &self.modules[node.index()] {
            for &parameter in &request.modules[module.0 as usize].parameters {
                *holders.entry(parameter).or_default() += 1;
            }
        }
        let shared: Vec<String> = holders
            .into_iter()
            .filter(|&(_, holders)| holders > 1)
            .map(|(parameter, _)| format!("{:?}", request.parameter_name(parameter)))
            .collect();
        if shared.is_empty() {
            "one needs what the other has".to_owned()
        } else {
            format!("they share the parameter {}", shared.join(", "))
        }
    }
}

/// Connected components over modules, parameters and joins; numbered by their first module.
fn components(request: &PartitionRequest) -> (Vec<Vec<ModuleId>>, Vec<NodeId>) {
    let mut union = UnionFind::new(request.modules.len());
    let mut holder: BTreeMap<usize, usize> = BTreeMap::new();
    for (number, module) in request.modules.iter().enumerate() {
        for &parameter in &module.parameters {
            union.join(*holder.entry(parameter).or_insert(number), number);
        }
    }
    for (first, second) in &request.joins {
        union.join(first.0 as usize, second.0 as usize);
    }
    let mut modules: Vec<Vec<ModuleId>> = Vec::new();
    let mut node_of: Vec<NodeId> = Vec::with_capacity(request.modules.len());
    for number in 0..request.modules.len() {
        let first = union.find(number);
        let node = if first == number {
            modules.push(Vec::new());
            NodeId(modules.len() as u32 - 1)
        } else {
            node_of[first]
        };
        modules[node.index()].push(ModuleId(number as u32));
        node_of.push(node);
    }
    (modules, node_of)
}

/// Nodes that are never executed, hold nothing but modules, and were not placed by hand: what is
/// never called is no part of a division.
fn containers(
    request: &PartitionRequest,
    modules: &[Vec<ModuleId>],
    node_of: &[NodeId],
) -> Vec<bool> {
    let executed = request.executed();
    let only_holds = |module: &ModuleId| {
        let number = module.0 as usize;
        let module = &request.modules[number];
        !executed[number] && module.parameters.is_empty() && module.buffer_bytes == 0
    };
    let mut containers: Vec<bool> = modules
        .iter()
        .map(|members| members.iter().all(only_holds))
        .collect();
    containers[0] = false;
    for pin in &request.pins {
        containers[node_of[pin.module.0 as usize].index()] = false;
    }
    containers
}

/// For each node the nodes that hold one of its modules, be it in containers.
fn containing(
    request: &PartitionRequest,
    modules: &[Vec<ModuleId>],
    node_of: &[NodeId],
    containers: &[bool],
) -> Vec<Vec<NodeId>> {
    let holders = |node: usize| {
        let parents = modules[node]
            .iter()
            .flat_map(|module| &request.modules[module.0 as usize].parents);
        parents.map(|parent| node_of[parent.0 as usize])
    };
    let of = |node: usize| {
        let mut found = Vec::new();
        let mut seen = BTreeSet::from([NodeId(node as u32)]);
        let mut open: Vec<NodeId> = holders(node).collect();
        while let Some(outer) = open.pop() {
            if !seen.insert(outer) {
                continue;
            }
            if containers[outer.index()] {
                open.extend(holders(outer.index()));
            } else {
                found.push(outer);
            }
        }
        found
    };
    (0..modules.len()).map(of).collect()
}

/// Steps from the root's node, over all containing nodes.
fn depths(containing: &[Vec<NodeId>]) -> Vec<u32> {
    let mut contained = vec![Vec::new(); containing.len()];
    for (node, outer) in containing.iter().enumerate() {
        for outer in outer {
            contained[outer.index()].push(node);
        }
    }
    let mut depth = vec![u32::MAX; containing.len()];
    depth[0] = 0;
    let mut queue = VecDeque::from([0]);
    while let Some(node) = queue.pop_front() {
        for &inner in &contained[node] {
            if depth[inner] == u32::MAX {
                depth[inner] = depth[node] + 1;
                queue.push_back(inner);
            }
        }
    }
    depth
}

/// Sets named by their smallest member.
struct UnionFind(Vec<usize>);

impl UnionFind {
    fn new(len: usize) -> Self {
        Self((0..len).collect())
    }

    fn find(&mut self, mut member: usize) -> usize {
        while self.0[member] != member {
            self.0[member] = self.0[self.0[member]];
            member = self.0[member];
        }
        member
    }

    fn join(&mut self, first: usize, second: usize) {
        let (first, second) = (self.find(first), self.find(second));
        self.0[first.max(second)] = first.min(second);
    }
}
