//! Which back end of `torch.distributed` a job's collectives use, from what all ranks tell one another.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// What a rank tells the others about its collectives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankFacts {
    /// The name of its host.
    pub host: String,
    /// The UUID of its CUDA device, or of its part of one (MIG); `None` on a CPU rank.
    pub device: Option<String>,
    /// The address of the GPU that the device is, or is a part of, where it is known.
    pub gpu: Option<String>,
    /// Whether its torch was built with Gloo.
    pub has_gloo: bool,
    /// Whether its torch was built with NCCL.
    pub has_nccl: bool,
    /// The back ends of the process group that its script has made before, as `cpu:gloo,cuda:nccl`.
    pub group: Option<String>,
}

/// What the collectives of a job run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CollectiveBackEnd {
    /// Gloo, for tensors of every device.
    Gloo,
    /// NCCL for tensors of CUDA devices, and Gloo for those on the CPU.
    NcclAndGloo,
    /// The back ends of the process group that the script has made.
    OfScript(String),
}

impl CollectiveBackEnd {
    /// What `torch.distributed.init_process_group` calls it.
    pub fn name(&self) -> &str {
        match self {
            Self::Gloo => "gloo",
            Self::NcclAndGloo => "cpu:gloo,cuda:nccl",
            Self::OfScript(name) => name,
        }
    }
}

/// Why the collectives of a job cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CollectivesError {
    /// NCCL with ranks without a GPU.
    #[error(
        "NCCL is asked for ({asked}), but {} no GPU; allowed: {}",
        have(ranks),
        if *all { "\"ddp_dist_backend\" \"auto\" or \"gloo\"" } else { "a GPU for every rank, or \"ddp_dist_backend\" \"gloo\"" }
    )]
    NcclWithoutGpu {
        /// Who asks.
        asked: String,
        /// The ranks.
        ranks: Vec<usize>,
        /// Whether they are all ranks.
        all: bool,
    },
    /// NCCL with several ranks on one device.
    #[error(
        "NCCL is asked for ({asked}), but ranks {} of host {host:?} share the device {device}, which NCCL refuses; allowed: a device for every rank (CUDA_VISIBLE_DEVICES, or torch.cuda.set_device before smp.init), or \"ddp_dist_backend\" \"auto\" or \"gloo\"",
        listed(ranks)
    )]
    NcclSharedDevice {
        /// Who asks.
        asked: String,
        /// The host.
        host: String,
        /// The device's UUID.
        device: String,
        /// The ranks that use it.
        ranks: Vec<usize>,
    },
    /// NCCL, which is not there.
    #[error(
        "NCCL is asked for ({asked}), but the torch of {} was built without it; allowed: \"ddp_dist_backend\" \"auto\" or \"gloo\"",
        named(ranks)
    )]
    NcclNotBuilt {
        /// Who asks.
        asked: String,
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Gloo, which is not there.
    #[error(
        "the torch of {} was built without Gloo, which carries the job's tensors on CPUs",
        named(ranks)
    )]
    GlooNotBuilt {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Some ranks compute on GPUs and some on CPUs.
    #[error(
        "{} and {} a GPU: does CUDA_VISIBLE_DEVICES hide it there? Allowed with \"ddp\": a GPU on every rank or on none, or \"ddp_dist_backend\" \"gloo\", with which both may take part",
        have_no_gpu(without),
        have(with)
    )]
    MixedDevices {
        /// The ranks with a GPU.
        with: Vec<usize>,
        /// The ranks without one.
        without: Vec<usize>,
    },
    /// Only some ranks' scripts have made a process group.
    #[error(
        "the scripts of {} had called torch.distributed.init_process_group before smp.init, and those of {} had not; call it on every rank or on none",
        named(with),
        named(without)
    )]
    GroupOnSomeRanks {
        /// The ranks with one.
        with: Vec<usize>,
        /// The ranks without one.
        without: Vec<usize>,
    },
    /// The process groups of scripts differ.
    #[error(
        "torch.distributed.init_process_group was called before smp.init with the back ends {first} on rank 0 and {other} on rank {rank}; they have to be the same on every rank"
    )]
    GroupsDiffer {
        /// Those of rank 0.
        first: String,
        /// Those of another rank.
        other: String,
        /// That rank.
        rank: usize,
    },
    /// The script's process group has another back end than the configuration asks for.
    #[error(
        "the configuration key \"ddp_dist_backend\" is {asked:?}, but torch.distributed.init_process_group was called before smp.init with the back ends {group}; allowed: \"auto\", which takes that group, or a group with {asked:?} for {kind} tensors"
    )]
    GroupContradicts {
        /// What is asked for.
        asked: String,
        /// The group's back ends.
        group: String,
        /// The kind of device whose back end it is about.
        kind: &'static str,
    },
    /// The script's process group cannot carry tensors of the ranks' devices.
    #[error(
        "torch.distributed.init_process_group was called before smp.init with the back ends {group}, of which none is for {kind} tensors, which {} on; allowed: \"cpu:gloo,cuda:nccl\", or no group before smp.init",
        compute(ranks)
    )]
    GroupWithoutDevice {
        /// The group's back ends.
        group: String,
        /// The kind of device.
        kind: &'static str,
        /// The ranks that compute there.
        ranks: Vec<usize>,
    },
}

/// Decides which back end the collectives of a job use, given what each rank tells: all ranks find the same.
///
/// `asked` is the configuration key `ddp_dist_backend`. A process group that the script has made is used as it is.
/// Else `auto` takes NCCL where every rank has a GPU of its own, and Gloo otherwise. Parts of one GPU (MIG) are
/// devices of their own, but NCCL tells devices apart by their GPU's address: `auto` takes Gloo for them, and NCCL only
/// where it is asked for by name.
///
/// # Errors
///
/// What is asked for cannot work, or ranks contradict each other.
pub fn choose_collective_back_end(
    asked: &str,
    facts: &[RankFacts],
) -> Result<CollectiveBackEnd, CollectivesError> {
    let (grouped, ungrouped) = divided(facts, |rank| rank.group.is_some());
    if let Some(group) = facts.first().and_then(|rank| rank.group.clone()) {
        if !ungrouped.is_empty() {
            return Err(CollectivesError::GroupOnSomeRanks {
                with: grouped,
                without: ungrouped,
            });
        }
        check_group(asked, &group, facts)?;
        return Ok(CollectiveBackEnd::OfScript(group));
    }
    if !grouped.is_empty() {
        return Err(CollectivesError::GroupOnSomeRanks {
            with: grouped,
            without: ungrouped,
        });
    }
    let (_, ranks) = divided(facts, |rank| rank.has_gloo);
    if !ranks.is_empty() {
        return Err(CollectivesError::GlooNotBuilt { ranks });
    }
    if asked == "gloo" {
        return Ok(CollectiveBackEnd::Gloo);
    }
    if asked == "nccl" {
        check_nccl("the configuration key \"ddp_dist_backend\"", facts)?;
        return Ok(CollectiveBackEnd::NcclAndGloo);
    }
    let (with, without) = divided(facts, |rank| rank.device.is_some());
    if !with.is_empty() && !without.is_empty() {
        return Err(CollectivesError::MixedDevices { with, without });
    }
    let fits =
        check_nccl("auto", facts).is_ok() && shared(facts, |rank| rank.gpu.as_ref()).is_none();
    Ok(if fits {
        CollectiveBackEnd::NcclAndGloo
    } else {
        CollectiveBackEnd::Gloo
    })
}

/// Refuses a script's process group that cannot carry the job's tensors, or is not what is asked for.
fn check_group(asked: &str, group: &str, facts: &[RankFacts]) -> Result<(), CollectivesError> {
    let differing = facts
        .iter()
        .position(|rank| rank.group.as_deref() != Some(group));
    if let Some(rank) = differing {
        return Err(CollectivesError::GroupsDiffer {
            first: group.to_owned(),
            other: facts[rank].group.clone().unwrap_or_default(),
            rank,
        });
    }
    if asked == "nccl" {
        check_nccl("the configuration key \"ddp_dist_backend\"", facts)?;
    }
    let back_ends: BTreeMap<&str, &str> = group
        .split(',')
        .filter_map(|pair| pair.split_once(':'))
        .collect();
    let (with_device, without) = divided(facts, |rank| rank.device.is_some());
    for (kind, ranks) in [("cuda", with_device), ("cpu", without)] {
        if ranks.is_empty() {
            continue;
        }
        match back_ends.get(kind) {
            None => {
                return Err(CollectivesError::GroupWithoutDevice {
                    group: group.to_owned(),
                    kind,
                    ranks,
                });
            }
            Some(back_end) if asked != "auto" && *back_end != asked => {
                return Err(CollectivesError::GroupContradicts {
                    asked: asked.to_owned(),
                    group: group.to_owned(),
                    kind,
                });
            }
            Some(&"nccl") => {
                check_nccl(
                    "torch.distributed.init_process_group before smp.init",
                    facts,
                )?;
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Refuses NCCL where it cannot work.
fn check_nccl(asked: &str, facts: &[RankFacts]) -> Result<(), CollectivesError> {
    let asked = asked.to_owned();
    let (_, ranks) = divided(facts, |rank| rank.device.is_some());
    if !ranks.is_empty() {
        let all = ranks.len() == facts.len();
        return Err(CollectivesError::NcclWithoutGpu { asked, ranks, all });
    }
    let (_, ranks) = divided(facts, |rank| rank.has_nccl);
    if !ranks.is_empty() {
        return Err(CollectivesError::NcclNotBuilt { asked, ranks });
    }
    match shared(facts, |rank| rank.device.as_ref()) {
        Some((host, device, ranks)) => Err(CollectivesError::NcclSharedDevice {
            asked,
            host,
            device,
            ranks,
        }),
        None => Ok(()),
    }
}

/// The first thing of a host that several ranks have, with the host and the ranks.
fn shared(
    facts: &[RankFacts],
    thing: impl Fn(&RankFacts) -> Option<&String>,
) -> Option<(String, String, Vec<usize>)> {
    let mut users: BTreeMap<(&String, &String), Vec<usize>> = BTreeMap::new();
    for (rank, each) in facts.iter().enumerate() {
        if let Some(found) = thing(each) {
            users.entry((&each.host, found)).or_default().push(rank);
        }
    }
    let (&(host, found), ranks) = users.iter().find(|(_, ranks)| ranks.len() > 1)?;
    Some((host.clone(), found.clone(), ranks.clone()))
}

/// The ranks of which something is true, and the others.
fn divided(facts: &[RankFacts], is: impl Fn(&RankFacts) -> bool) -> (Vec<usize>, Vec<usize>) {
    (0..facts.len()).partition(|rank| is(&facts[*rank]))
}

fn listed(ranks: &[usize]) -> String {
    ranks
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

fn named(ranks: &[usize]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", listed(ranks))
}

fn have(ranks: &[usize]) -> String {
    let verb = if ranks.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", named(ranks))
}

fn have_no_gpu(ranks: &[usize]) -> String {
    format!("{} no GPU", have(ranks))
}

fn compute(ranks: &[usize]) -> String {
    let verb = if ranks.len() == 1 {
        "computes"
    } else {
        "compute"
    };
    format!("{} {verb}", named(ranks))
}
