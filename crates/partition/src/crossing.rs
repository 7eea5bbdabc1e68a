//! Calls that lead to another rank.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardwright_core::{ModuleId, PipelineRank};

use crate::PartitionRequest;
use crate::decision::ModulePlace;

/// Where the step function runs.
const STEP_FUNCTION_RANK: PipelineRank = PipelineRank(0);

/// A module that is called from another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crossing {
    /// The module whose forward makes the call; the step function itself where it is `None`.
    pub caller: Option<ModuleId>,
    /// The module called.
    pub callee: ModuleId,
    /// Where the call comes from.
    pub caller_rank: PipelineRank,
    /// Where it leads.
    pub callee_rank: PipelineRank,
    /// Calls of one microbatch.
    pub calls: u32,
    /// Whether the call goes out in the same request as that of the callee's predecessor in an
    /// `nn.Sequential`.
    pub same_request: bool,
}

/// All crossings, and the requests of one microbatch's forward.
pub(crate) fn crossings(
    request: &PartitionRequest,
    places: &[ModulePlace],
) -> (Vec<Crossing>, u64) {
    let calls = if request.calls.is_empty() {
        from_hierarchy(request)
    } else {
        traced(request)
    };
    let mut crossings: Vec<Crossing> = Vec::new();
    let mut requests = 0;
    if places[0].pp_rank != STEP_FUNCTION_RANK {
        requests += 1;
        crossings.push(Crossing {
            caller: None,
            callee: ModuleId(0),
            caller_rank: STEP_FUNCTION_RANK,
            callee_rank: places[0].pp_rank,
            calls: 1,
            same_request: false,
        });
    }
    // The rank of the run of children that an `nn.Sequential` is in, and its largest count.
    let mut run: Option<(ModuleId, PipelineRank, u32)> = None;
    for ((caller, callee), count) in calls {
        let (from, to) = (&places[caller.0 as usize], &places[callee.0 as usize]);
        let sequential = from.class_name == "Sequential";
        if count == 0 {
            continue;
        }
        if to.follows_caller || from.pp_rank == to.pp_rank {
            // Children without a rank of their own do not end a run: they run where it is.
            if !to.follows_caller {
                run = None;
            }
            continue;
        }
        let counted = match run {
            Some((running, rank, counted))
                if sequential && running == caller && rank == to.pp_rank =>
            {
                Some(counted)
            }
            _ => None,
        };
        requests += u64::from(count.saturating_sub(counted.unwrap_or(0)));
        run = sequential.then_some((caller, to.pp_rank, count.max(counted.unwrap_or(0))));
        crossings.push(Crossing {
            caller: Some(caller),
            callee,
            caller_rank: from.pp_rank,
            callee_rank: to.pp_rank,
            calls: count,
            same_request: counted.is_some(),
        });
    }
    (crossings, requests)
}

fn traced(request: &PartitionRequest) -> BTreeMap<(ModuleId, ModuleId), u32> {
    let mut counts = BTreeMap::new();
    for calls in &request.calls {
        *counts.entry((calls.caller, calls.callee)).or_default() += calls.count;
    }
    counts
}

/// Every executed module is called once by each module that contains it; a container that is never
/// executed itself hands its children on to its own callers.
fn from_hierarchy(request: &PartitionRequest) -> BTreeMap<(ModuleId, ModuleId), u32> {
    let executed = request.executed();
    let executed = |module: ModuleId| executed[module.0 as usize];
    let mut counts = BTreeMap::new();
    for (number, module) in request.modules.iter().enumerate() {
        let callee = ModuleId(number as u32);
        if !executed(callee) {
            continue;
        }
        let mut seen = std::collections::BTreeSet::new();
        let mut open: Vec<ModuleId> = module.parents.clone();
        while let Some(caller) = open.pop() {
            if !seen.insert(caller) {
                continue;
            }
            if executed(caller) {
                counts.insert((caller, callee), 1);
            } else {
                open.extend(&request.modules[caller.0 as usize].parents);
            }
        }
    }
    counts
}
