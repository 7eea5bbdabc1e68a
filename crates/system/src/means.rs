//! What a rank needs of the system, and has: file descriptors, address space, shared memory.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const MIB: u64 = 1 << 20;
/// Descriptors of a rank: its own, for each rank of the job, what process groups and UCX add; measured, with a margin.
const DESCRIPTORS: Need = Need::new(20, 3);
const DESCRIPTORS_OF_GROUPS: Need = Need::new(32, 5);
const DESCRIPTORS_OF_UCX: Need = Need::new(20, 2);
/// Address space that threads, their stacks and heaps take, likewise.
const SPACE: Need = Need::new(512 * MIB, 128 * MIB);
const SPACE_OF_GROUPS: u64 = 512 * MIB;
const SPACE_OF_UCX: u64 = 2048 * MIB;
/// Of what is left, buffers take so much at most.
const SHARE_OF_BUFFERS: u64 = 2;
/// A smaller buffer is none.
const LEAST_BUFFER_BYTES: u64 = 4 * MIB;

struct Need {
    once: u64,
    each: u64,
}

impl Need {
    const fn new(once: u64, each: u64) -> Self {
        Self { once, each }
    }

    const fn of(&self, world: u64) -> u64 {
        self.once + self.each * world
    }
}

/// What a rank is to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Ranks in the job.
    pub world: u32,
    /// Ranks on this host.
    pub local_size: u32,
    /// Whether there are process groups of `torch.distributed`.
    pub groups: bool,
    /// The size of a persistent buffer, if there is room; 0 for none.
    pub buffer_bytes: u64,
}

/// What a rank can do with what it has.
#[derive(Clone, Debug)]
pub struct Means {
    /// The size of its persistent buffer; 0 for none.
    pub buffer_bytes: u64,
    /// Whether there is enough for UCX.
    pub ucx: bool,
    /// What is missing for any job, as the rest of a sentence about the rank.
    pub lacks: Option<String>,
}

/// Looks at the limits of this process; the one of descriptors is raised as far as it may be, where that helps.
pub fn means(plan: Plan) -> Means {
    let world = u64::from(plan.world);
    let lacking = |lacks: String| Means {
        buffer_bytes: 0,
        ucx: false,
        lacks: Some(lacks),
    };
    let groups = u64::from(plan.groups);
    let descriptors =
        count_descriptors() + DESCRIPTORS.of(world) + groups * DESCRIPTORS_OF_GROUPS.of(world);
    let with_ucx = descriptors + DESCRIPTORS_OF_UCX.of(world);
    let limit = raise_descriptor_limit(with_ucx);
    if limit < descriptors {
        let with_groups = if plan.groups {
            " with process groups"
        } else {
            ""
        };
        return lacking(format!(
            "may open {limit} file descriptors, and needs {descriptors} in a job of {world} ranks{with_groups}: raise \
             the limit (ulimit -n {}) on every rank",
            with_ucx.max(1024)
        ));
    }
    let mut ucx = limit >= with_ucx;
    let mut wanted = plan.buffer_bytes;
    if let Some(total) = getrlimit(Resource::As).current {
        let space = total.saturating_sub(address_space_in_use());
        let needed = SPACE.of(world) + groups * SPACE_OF_GROUPS;
        if space < needed {
            return lacking(format!(
                "may use {} MiB of address space, of which {} MiB are free, and needs {} MiB more in a job of {world} \
                 ranks: raise the limit (ulimit -v {}) on every rank, or remove it",
                total / MIB,
                space / MIB,
                needed / MIB,
                (total - space + needed) / 1024
            ));
        }
        ucx = ucx && space >= needed + SPACE_OF_UCX;
        let left = (space - needed).saturating_sub(u64::from(ucx) * SPACE_OF_UCX);
        // A rank maps its own buffer and those of the other ranks of its host.
        wanted = wanted.min(left / SHARE_OF_BUFFERS / u64::from(plan.local_size.max(1)));
    }
    if let Some(largest) = getrlimit(Resource::Fsize).current {
        wanted = wanted.min(largest / 2);
    }
    let enough = wanted >= LEAST_BUFFER_BYTES.min(plan.buffer_bytes);
    Means {
        buffer_bytes: if enough { wanted } else { 0 },
        ucx,
        lacks: None,
    }
}

fn count_descriptors() -> u64 {
    match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.count() as u64,
        // There is none left to look with.
        Err(_) => getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX / 2),
    }
}

/// How many descriptors this process may have open.
fn raise_descriptor_limit(wanted: u64) -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let Some(soft) = current else { return wanted };
    if soft >= wanted {
        return soft;
    }
    let most = maximum.map_or(wanted, |hard| wanted.min(hard));
    let raised = Rlimit {
        current: Some(most),
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => most,
        Err(_) => soft,
    }
}

fn address_space_in_use() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = text
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
