//! Who started this process, and as which rank: read from the launcher's environment variables.

mod error;
mod group;

pub use error::LaunchError;
pub use group::GroupMeeting;

use crate::derive_seed;

const LOOPBACK: &str = "127.0.0.1";
/// Below the ports that Linux hands out to outgoing connections, so that none of those is in the way.
const FIRST_DERIVED_PORT: u16 = 20_000;
const NUM_DERIVED_PORTS: u16 = 12_000;

/// This process's place among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// `torchrun`, `openmpi`, `srun`, `environment` (another one that sets the same variables as
    /// torchrun), `torch` (a process group that the script made), or `single`.
    pub launcher: &'static str,
    /// The global rank.
    pub rank: u32,
    /// Ranks in the job.
    pub world_size: u32,
    /// The rank among those on this host.
    pub local_rank: u32,
    /// Ranks on this host.
    pub local_size: u32,
    /// Where the ranks meet, host and port; `None` for a job of one rank.
    pub rendezvous: Option<(String, u16)>,
    /// Whether all ranks are known to be on this host.
    pub single_host: bool,
    /// The same text on all ranks, and another one for another job.
    pub job_id: String,
}

impl Launch {
    /// Finds out how this process was started: `RANK` and `WORLD_SIZE` (torchrun, and whoever sets
    /// the same) are looked at first, then the variables of Open MPI, then those of Slurm; a
    /// process with none of them is a job of one rank.
    ///
    /// # Errors
    ///
    /// Variables are missing, are no numbers, or contradict each other; or no address is known at
    /// which ranks on several hosts could meet.
    pub fn detect(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let environment = Environment(variable);
        if environment.has("RANK") || environment.has("WORLD_SIZE") {
            return environment.torchrun();
        }
        if environment.has("OMPI_COMM_WORLD_RANK") {
            return environment.open_mpi();
        }
        let counts = ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"];
        if environment.has("SLURM_PROCID") && counts.iter().any(|name| environment.has(name)) {
            return environment.srun();
        }
        Ok(Self {
            launcher: "single",
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_size: 1,
            rendezvous: None,
            single_host: true,
            job_id: "single".to_owned(),
        })
    }
}

/// What a launcher's variables say of ranks, before it is checked.
struct Ranks {
    launcher: &'static str,
    rank_variable: &'static str,
    rank: u32,
    world_size: u32,
    local_rank: u32,
    local_size: u32,
}

struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The first of some variables that is set and not empty.
    fn first_of(&self, names: &[&str]) -> Option<String> {
        names
            .iter()
            .find_map(|name| self.get(name).filter(|text| !text.is_empty()))
    }

    fn number(&self, variable: &'static str, least: u32) -> Result<u32, LaunchError> {
        let text = self
            .get(variable)
            .ok_or(LaunchError::Missing { variable })?;
        digits(text.trim())
            .filter(|number| *number >= least)
            .ok_or(LaunchError::NotANumber {
                variable,
                text,
                least,
            })
    }

    fn torchrun(&self) -> Result<Launch, LaunchError> {
        let run_id = self.get("TORCHELASTIC_RUN_ID");
        let (rank, world_size) = (self.number("RANK", 0)?, self.number("WORLD_SIZE", 1)?);
        let address = self.get("MASTER_ADDR");
        let loopback = matches!(address.as_deref(), Some(LOOPBACK | "localhost" | "::1"));
        let unsaid = !self.has("LOCAL_RANK") && !self.has("LOCAL_WORLD_SIZE");
        let (local_rank, local_size) = if unsaid && (loopback || world_size == 1) {
            (rank, world_size)
        } else {
            let local_rank = self.number("LOCAL_RANK", 0)?;
            (local_rank, self.number("LOCAL_WORLD_SIZE", 1)?)
        };
        let ranks = Ranks {
            launcher: if run_id.is_none() {
                "environment"
            } else {
                "torchrun"
            },
            rank_variable: "RANK",
            rank,
            world_size,
            local_rank,
            local_size,
        };
        let known = run_id.filter(|id| id != "none");
        self.launched(&ranks, known.map(|id| format!("torchrun/{id}")))
    }

    fn open_mpi(&self) -> Result<Launch, LaunchError> {
        let ranks = Ranks {
            launcher: "openmpi",
            rank_variable: "OMPI_COMM_WORLD_RANK",
            rank: self.number("OMPI_COMM_WORLD_RANK", 0)?,
            world_size: self.number("OMPI_COMM_WORLD_SIZE", 1)?,
            local_rank: self.number("OMPI_COMM_WORLD_LOCAL_RANK", 0)?,
            local_size: self.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)?,
        };
        let job_id = self.first_of(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]);
        self.launched(&ranks, job_id.map(|id| format!("openmpi/{id}")))
    }

    fn srun(&self) -> Result<Launch, LaunchError> {
        let size_variable = if self.has("SLURM_STEP_NUM_TASKS") {
            "SLURM_STEP_NUM_TASKS"
        } else {
            "SLURM_NTASKS"
        };
        let (rank, world_size) = (
            self.number("SLURM_PROCID", 0)?,
            self.number(size_variable, 1)?,
        );
        let local_rank = self.number("SLURM_LOCALID", 0)?;
        let ranks = Ranks {
            launcher: "srun",
            rank_variable: "SLURM_PROCID",
            rank,
            world_size,
            local_rank,
            local_size: self.slurm_local_size(rank, world_size, local_rank)?,
        };
        let job_id = self.first_of(&["SLURM_JOB_ID", "SLURM_JOBID"]);
        let step = self.first_of(&["SLURM_STEP_ID", "SLURM_STEPID"]);
        let step = step.unwrap_or_else(|| "0".to_owned());
        self.launched(&ranks, job_id.map(|id| format!("slurm/{id}.{step}")))
    }

    fn slurm_local_size(
        &self,
        rank: u32,
        world_size: u32,
        local_rank: u32,
    ) -> Result<u32, LaunchError> {
        if let Some(text) = self.first_of(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]) {
            let counts =
                slurm_counts(&text).ok_or_else(|| LaunchError::Tasks { text: text.clone() })?;
            let node = if counts.len() > 1 {
                self.number("SLURM_NODEID", 0)?
            } else {
                0
            };
            let count = counts.len();
            return counts.get(node as usize).copied().ok_or(LaunchError::Node {
                node,
                text,
                count,
            });
        }
        if self.has("SLURM_NTASKS_PER_NODE") {
            return Ok(self.number("SLURM_NTASKS_PER_NODE", 1)?.min(world_size));
        }
        let nodes = self.first_of(&[
            "SLURM_STEP_NUM_NODES",
            "SLURM_NNODES",
            "SLURM_JOB_NUM_NODES",
        ]);
        match nodes.as_deref() {
            Some("1") => Ok(world_size),
            None if local_rank == rank => Ok(world_size),
            _ => Err(LaunchError::LocalSizeUnknown),
        }
    }

    fn launched(&self, ranks: &Ranks, job_id: Option<String>) -> Result<Launch, LaunchError> {
        let (rank, world_size) = (ranks.rank, ranks.world_size);
        let (local_rank, local_size) = (ranks.local_rank, ranks.local_size);
        if rank >= world_size {
            return Err(LaunchError::TooLarge {
                variable: ranks.rank_variable,
                number: rank,
                least: 0,
                most: world_size - 1,
                world_size: Some(world_size),
            });
        }
        if local_rank >= local_size || local_size > world_size {
            return Err(LaunchError::Local {
                rank,
                local_rank,
                local_size,
                world_size,
            });
        }
        let single_host = local_size == world_size;
        let rendezvous = if world_size == 1 {
            None
        } else {
            Some(self.rendezvous(rank, single_host, job_id.as_deref())?)
        };
        let job = job_id.unwrap_or_else(|| {
            rendezvous
                .as_ref()
                .map_or_else(String::new, |(host, port)| format!("{host}:{port}"))
        });
        // Agents of several hosts count restarts each for itself: after one, their counts differ.
        let attempt = self
            .get("TORCHELASTIC_RESTART_COUNT")
            .filter(|_| single_host);
        Ok(Launch {
            launcher: ranks.launcher,
            rank,
            world_size,
            local_rank,
            local_size,
            rendezvous,
            single_host,
            job_id: format!("{job}/{}", attempt.as_deref().unwrap_or("0")),
        })
    }

    fn rendezvous(
        &self,
        rank: u32,
        single_host: bool,
        job_id: Option<&str>,
    ) -> Result<(String, u16), LaunchError> {
        let host = match self.first_of(&["MASTER_ADDR"]) {
            Some(host) => host,
            None if single_host => LOOPBACK.to_owned(),
            None => return Err(LaunchError::NoAddress { rank }),
        };
        if self.has("MASTER_PORT") {
            let number = self.number("MASTER_PORT", 1)?;
            let port = u16::try_from(number).map_err(|_| LaunchError::TooLarge {
                variable: "MASTER_PORT",
                number,
                least: 1,
                most: u16::MAX.into(),
                world_size: None,
            })?;
            return Ok((host, port));
        }
        let job_id = job_id.ok_or(LaunchError::NoPort { rank })?;
        // All ranks find the same port without a word, and jobs side by side most likely different ones.
        let mixed = job_id
            .bytes()
            .fold(0, |seed, byte| derive_seed(seed, byte.into()));
        let offset = mixed % u64::from(NUM_DERIVED_PORTS);
        let offset = u16::try_from(offset).expect("it is less than a number of ports");
        Ok((host, FIRST_DERIVED_PORT + offset))
    }
}

/// A number of ASCII digits and nothing else.
fn digits(text: &str) -> Option<u32> {
    let all = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| all)
}

/// `2(x3),1` is 2, 2, 2, 1.
fn slurm_counts(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, digits(times.strip_suffix(')')?)?),
            None => (part, 1),
        };
        counts.extend(std::iter::repeat_n(digits(count)?, times as usize));
    }
    Some(counts)
}
