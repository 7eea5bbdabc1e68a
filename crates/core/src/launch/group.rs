//! The place of a process beside a process group that its script has made with torch.

use super::{Environment, Launch, LaunchError, digits};

/// Where the ranks of a process group meet that the script has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMeeting {
    /// The hosts of all ranks: equal texts for ranks of one host.
    pub hosts: Vec<String>,
    /// Where rank 0 can be reached.
    pub place: (String, u16),
    /// A text that no other job has.
    pub job_id: String,
}

impl Launch {
    /// As [`Launch::detect`], beside a process group that the script has made with torch: what it says of this
    /// process's rank and the number of ranks goes before a launcher of one process, and fills in what a launcher has
    /// not said. `None` where only the group knows the place, which [`Launch::of_group`] then makes.
    ///
    /// # Errors
    ///
    /// The launcher and the group contradict each other.
    pub fn beside_group(
        variable: &dyn Fn(&str) -> Option<String>,
        group_rank: u32,
        group_size: u32,
    ) -> Result<Option<Self>, LaunchError> {
        let contradicted = |variables, rank, world_size| LaunchError::Contradicted {
            variables,
            rank,
            world_size,
            group_rank,
            group_size,
        };
        match Self::detect(variable) {
            Ok(found) if (found.rank, found.world_size) == (group_rank, group_size) => {
                Ok(Some(found))
            }
            Ok(found) if found.world_size == 1 => Ok(None),
            Ok(found) => Err(contradicted(
                match found.launcher {
                    "openmpi" => "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
                    "srun" => "SLURM_PROCID and SLURM_NTASKS",
                    _ => "RANK and WORLD_SIZE",
                },
                found.rank.to_string(),
                found.world_size.to_string(),
            )),
            Err(_) => {
                let environment = Environment(variable);
                let (rank, size) = (environment.get("RANK"), environment.get("WORLD_SIZE"));
                let differs = |text: &Option<String>, number: u32| {
                    text.as_ref()
                        .is_some_and(|text| digits(text.trim()) != Some(number))
                };
                if differs(&rank, group_rank) || differs(&size, group_size) {
                    let said = |text: Option<String>| text.unwrap_or_else(|| "?".to_owned());
                    return Err(contradicted("RANK and WORLD_SIZE", said(rank), said(size)));
                }
                Ok(None)
            }
        }
    }

    /// The place of a rank of a process group that the script has made.
    ///
    /// # Panics
    ///
    /// There are fewer hosts than the rank, or more than numbers.
    pub fn of_group(rank: u32, meeting: GroupMeeting) -> Self {
        let world_size = u32::try_from(meeting.hosts.len()).expect("ranks have numbers");
        let own = &meeting.hosts[rank as usize];
        let count = |hosts: &[String]| {
            let beside = hosts.iter().filter(|host| *host == own).count();
            u32::try_from(beside).expect("no more than the ranks")
        };
        let (local_rank, local_size) = (
            count(&meeting.hosts[..rank as usize]),
            count(&meeting.hosts),
        );
        Self {
            launcher: "torch",
            rank,
            world_size,
            local_rank,
            local_size,
            rendezvous: (world_size > 1).then_some(meeting.place),
            single_host: local_size == world_size,
            job_id: format!("torch/{}", meeting.job_id),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// What a launcher sets for a rank of two.
    fn launcher(name: &str, rank: u32, size: u32) -> BTreeMap<&'static str, String> {
        let (rank, size) = (rank.to_string(), size.to_string());
        let address = ("MASTER_ADDR", "127.0.0.1".to_owned());
        let port = ("MASTER_PORT", "29500".to_owned());
        let variables: Vec<(&'static str, String)> = match name {
            "none" => vec![],
            "torchrun" => vec![
                ("RANK", rank.clone()),
                ("WORLD_SIZE", size.clone()),
                ("LOCAL_RANK", rank),
                ("LOCAL_WORLD_SIZE", size),
                address,
                port,
            ],
            "environment" => vec![("RANK", rank), ("WORLD_SIZE", size), address, port],
            "openmpi" => vec![
                ("OMPI_COMM_WORLD_RANK", rank.clone()),
                ("OMPI_COMM_WORLD_SIZE", size.clone()),
                ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", size),
                port,
            ],
            "srun" => vec![
                ("SLURM_PROCID", rank.clone()),
                ("SLURM_NTASKS", size),
                ("SLURM_LOCALID", rank),
                ("SLURM_NNODES", "1".to_owned()),
                port,
            ],
            // Lightning's subprocesses: no RANK; and a user's own: an address of another host, nothing local.
            "lightning" => vec![("WORLD_SIZE", size), ("LOCAL_RANK", rank), address, port],
            "by hand" => vec![
                ("RANK", rank),
                ("WORLD_SIZE", size),
                ("MASTER_ADDR", "10.0.0.1".to_owned()),
                port,
            ],
            other => panic!("{other}"),
        };
        variables.into_iter().collect()
    }

    const WHOLE: [&str; 4] = ["torchrun", "environment", "openmpi", "srun"];
    const PARTIAL: [&str; 2] = ["lightning", "by hand"];

    fn beside(
        name: &str,
        (rank, size): (u32, u32),
        group: (u32, u32),
    ) -> Result<Option<(u32, u32)>, LaunchError> {
        let variables = launcher(name, rank, size);
        Launch::beside_group(&|key| variables.get(key).cloned(), group.0, group.1)
            .map(|found| found.map(|launch| (launch.rank, launch.world_size)))
    }

    #[test]
    fn every_pair_of_a_launcher_and_a_group_agrees_is_filled_in_or_is_contradicted() {
        let places: Vec<(u32, u32)> = (1..4)
            .flat_map(|size| (0..size).map(move |rank| (rank, size)))
            .collect();
        for group in &places {
            let alone = beside("none", (0, 1), *group);
            assert_eq!(alone, Ok((group.1 == 1).then_some(*group)));
            for said in &places {
                for name in WHOLE {
                    let found = beside(name, *said, *group);
                    if said == group {
                        assert_eq!(found, Ok(Some(*group)), "{name}");
                    } else if said.1 == 1 {
                        assert_eq!(found, Ok(None), "{name}: a launcher of one process");
                    } else {
                        let text = found.expect_err("a contradiction").to_string();
                        let of_group = format!("rank {} of {}", group.0, group.1);
                        let of_launcher = format!("rank {} of {}", said.0, said.1);
                        assert!(
                            text.contains(&of_group) && text.contains(&of_launcher),
                            "{name}: {text}"
                        );
                    }
                }
                for name in PARTIAL {
                    let found = beside(name, *said, *group);
                    let ranks_differ = name != "lightning" && said.0 != group.0;
                    let whole = name == "by hand" && said.1 == 1; // it is a job of one rank, which is whole
                    if whole {
                        assert_eq!(found, Ok((said == group).then_some(*group)), "{name}");
                    } else if said.1 == group.1 && !ranks_differ {
                        assert_eq!(
                            found,
                            Ok(None),
                            "{name}: the group fills in what is missing"
                        );
                    } else {
                        assert!(found.is_err(), "{name} {said:?} {group:?} {found:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_of_a_group_count_those_of_their_host() {
        let hosts = ["a", "b", "a", "b", "b"].map(str::to_owned).to_vec();
        let place = |rank| {
            let meeting = GroupMeeting {
                hosts: hosts.clone(),
                place: ("h".to_owned(), 7),
                job_id: "x".to_owned(),
            };
            let launch = Launch::of_group(rank, meeting);
            assert!(!launch.single_host && launch.job_id == "torch/x");
            (launch.local_rank, launch.local_size)
        };
        assert_eq!(
            (0..5).map(place).collect::<Vec<_>>(),
            [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
        );
    }
}
