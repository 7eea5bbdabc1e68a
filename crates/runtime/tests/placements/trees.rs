//! Programs as trees of calls, with the rank of every call.

/// What a microbatch calls: node 0 is the step function, the others are calls of modules. A module that is called several
/// times is several nodes, so placements of calls are more than those of modules.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    /// The calls that each call makes, in order.
    pub(crate) calls: Vec<Vec<usize>>,
    /// Where each runs.
    pub(crate) ranks: Vec<u32>,
    /// Whether it is given what its caller's last call gave; else what its caller was given.
    pub(crate) is_given_last: Vec<bool>,
    /// Whether its caller waits for the values of its result before it goes on.
    pub(crate) is_looked_at: Vec<bool>,
    /// Whether calls of which each is given what the last one gave are sent on from rank to rank.
    pub(crate) chains: bool,
}

/// All ordered trees with so many nodes, without places.
pub(crate) fn trees(nodes: usize) -> Vec<Program> {
    let mut depths = vec![0];
    let mut found = Vec::new();
    grow(&mut depths, nodes, &mut found);
    found
}

fn grow(depths: &mut Vec<usize>, nodes: usize, found: &mut Vec<Program>) {
    if depths.len() == nodes {
        found.push(tree_of(depths));
        return;
    }
    for depth in 1..=depths[depths.len() - 1] + 1 {
        depths.push(depth);
        grow(depths, nodes, found);
        depths.pop();
    }
}

/// The tree whose nodes, in the order in which they are called, are so deep.
fn tree_of(depths: &[usize]) -> Program {
    let nodes = depths.len();
    let mut calls = vec![Vec::new(); nodes];
    for (node, depth) in depths.iter().enumerate().skip(1) {
        let caller = depths[..node].iter().rposition(|other| other + 1 == *depth);
        calls[caller.expect("one node is less deep")].push(node);
    }
    Program {
        calls,
        ranks: vec![0; nodes],
        is_given_last: vec![false; nodes],
        is_looked_at: vec![false; nodes],
        chains: false,
    }
}

impl Program {
    /// The program with all placements over so many ranks; ranks that differ in name only count once.
    pub(crate) fn placed(&self, ranks: u32) -> Vec<Self> {
        let mut placed = vec![vec![0]];
        for _ in 1..self.calls.len() {
            placed = placed
                .iter()
                .flat_map(|places| {
                    let used = places.iter().max().expect("the step function has a rank");
                    (0..ranks.min(used + 2)).map(|rank| [places.as_slice(), &[rank]].concat())
                })
                .collect();
        }
        let with = |ranks| Self {
            ranks,
            ..self.clone()
        };
        placed.into_iter().map(with).collect()
    }

    /// The program with all that its calls may be given.
    pub(crate) fn given(&self) -> Vec<Self> {
        let later: Vec<usize> = self
            .calls
            .iter()
            .flat_map(|calls| calls.iter().skip(1).copied())
            .collect();
        (0_u32..1 << later.len())
            .map(|bits| {
                let mut program = self.clone();
                for (place, node) in later.iter().enumerate() {
                    program.is_given_last[*node] = bits >> place & 1 == 1;
                }
                program
            })
            .collect()
    }

    /// The program with these of its calls looked at.
    pub(crate) fn looking_at(&self, bits: u32) -> Self {
        let looked = (0..self.calls.len()).map(|node| bits >> node & 1 == 1);
        Self {
            is_looked_at: looked.collect(),
            ..self.clone()
        }
    }
}
