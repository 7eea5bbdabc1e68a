//! Why a process does not know its place.

use thiserror::Error;

/// Why a process does not know its place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// A variable is not set.
    #[error(
        "the environment variable {variable} is not set, although other variables of its launcher are"
    )]
    Missing {
        /// The variable.
        variable: &'static str,
    },
    /// A variable has no such number.
    #[error(
        "the environment variable {variable} is '{text}'; allowed: an integer of {least} or more"
    )]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        text: String,
        /// The least that is allowed.
        least: u32,
    },
    /// A number is beyond what is allowed.
    #[error("{variable} is {number}; allowed: {least} to {most}{}", of_job(*world_size))]
    TooLarge {
        /// The variable.
        variable: &'static str,
        /// Its value.
        number: u32,
        /// The least that is allowed.
        least: u32,
        /// The most that is allowed.
        most: u32,
        /// Of how many ranks the job is, where that is the reason.
        world_size: Option<u32>,
    },
    /// Local ranks that contradict each other.
    #[error(
        "rank {rank} is said to be local rank {local_rank} of {local_size} on its host, in a job of {world_size}"
    )]
    Local {
        /// The rank.
        rank: u32,
        /// Its local rank.
        local_rank: u32,
        /// Ranks on its host.
        local_size: u32,
        /// Ranks in the job.
        world_size: u32,
    },
    /// Slurm says how many tasks some nodes run, and this node is none of them.
    #[error("SLURM_NODEID is {node}, but '{text}' describes {count} nodes")]
    Node {
        /// The node.
        node: u32,
        /// What Slurm says.
        text: String,
        /// Of how many nodes.
        count: usize,
    },
    /// Slurm's numbers of tasks cannot be read.
    #[error("SLURM_STEP_TASKS_PER_NODE is '{text}'; expected numbers of tasks, such as '2(x3),1'")]
    Tasks {
        /// What Slurm says.
        text: String,
    },
    /// Slurm does not say how many ranks a host runs.
    #[error(
        "it is not known how many ranks this host runs; set SLURM_NTASKS_PER_NODE (srun --ntasks-per-node)"
    )]
    LocalSizeUnknown,
    /// Ranks on several hosts without an address.
    #[error(
        "rank {rank} does not know where the ranks meet, which are on several hosts: set MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) on every rank"
    )]
    NoAddress {
        /// The rank.
        rank: u32,
    },
    /// The script's own process group says something else than the launcher.
    #[error(
        "the environment variables {variables} say that this process is rank {rank} of {world_size}, and the process group that the script made with torch.distributed.init_process_group before smp.init says rank {group_rank} of {group_size}; give both the same, or remove the variables where the group is right"
    )]
    Contradicted {
        /// The launcher's variables.
        variables: &'static str,
        /// The rank that they say.
        rank: String,
        /// The number of ranks that they say.
        world_size: String,
        /// The rank that the group says.
        group_rank: u32,
        /// The number of ranks that the group says.
        group_size: u32,
    },
    /// There is nothing from which a port could be derived.
    #[error("rank {rank} does not know where the ranks meet: set MASTER_PORT on every rank")]
    NoPort {
        /// The rank.
        rank: u32,
    },
}

fn of_job(world_size: Option<u32>) -> String {
    world_size.map_or_else(String::new, |size| format!(" in a job of {size}"))
}
