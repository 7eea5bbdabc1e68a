//! Every combination of what two and three ranks tell, against laws that are written down apart from the decision.

use super::*;

const ASKED: [&str; 3] = ["auto", "nccl", "gloo"];
const GROUPS: [Option<&str>; 5] = [
    None,
    Some("cpu:gloo,cuda:gloo"),
    Some("cuda:nccl"),
    Some("cpu:gloo,cuda:nccl"),
    Some("cpu:gloo"),
];
/// No device, two GPUs, and two parts of a third one.
const DEVICES: [Option<(&str, &str)>; 5] = [
    None,
    Some(("GPU-0", "0000:00")),
    Some(("GPU-1", "0000:01")),
    Some(("MIG-0", "0000:02")),
    Some(("MIG-1", "0000:02")),
];

fn all_facts(groups: &[Option<&str>]) -> Vec<RankFacts> {
    let mut all = Vec::new();
    for host in ["a", "b"] {
        for device in DEVICES {
            for (has_gloo, has_nccl) in [(true, true), (true, false), (false, true)] {
                for group in groups {
                    all.push(RankFacts {
                        host: host.to_owned(),
                        device: device.map(|(uuid, _)| uuid.to_owned()),
                        gpu: device.map(|(_, gpu)| gpu.to_owned()),
                        has_gloo,
                        has_nccl,
                        group: group.map(str::to_owned),
                    });
                }
            }
        }
    }
    all
}

/// Whether two ranks of a list have the same of something.
fn repeats<T: PartialEq>(facts: &[RankFacts], of: impl Fn(&RankFacts) -> T) -> bool {
    facts
        .iter()
        .enumerate()
        .any(|(rank, one)| facts[..rank].iter().any(|other| of(other) == of(one)))
}

/// Whether NCCL can carry tensors between devices of these ranks; `strictly`, between GPUs.
fn nccl_can(facts: &[RankFacts], strictly: bool) -> bool {
    facts
        .iter()
        .all(|rank| rank.device.is_some() && rank.has_nccl)
        && !repeats(facts, |rank| (rank.host.clone(), rank.device.clone()))
        && !(strictly && repeats(facts, |rank| (rank.host.clone(), rank.gpu.clone())))
}

fn expected(asked: &str, facts: &[RankFacts]) -> Option<&'static str> {
    let gpus = facts.iter().filter(|rank| rank.device.is_some()).count();
    let groups = facts.iter().filter(|rank| rank.group.is_some()).count();
    if groups > 0 {
        let same = facts.iter().all(|rank| rank.group == facts[0].group);
        let of_gpus = asked == "auto" || asked == "gloo";
        let for_gpus = asked == "auto" || asked == "nccl";
        let allowed = match facts[0].group.as_deref()? {
            "cpu:gloo,cuda:gloo" => of_gpus,
            "cuda:nccl" => gpus == facts.len() && for_gpus && nccl_can(facts, false),
            "cpu:gloo,cuda:nccl" if gpus == 0 => of_gpus,
            "cpu:gloo,cuda:nccl" => for_gpus && nccl_can(facts, false),
            _ => gpus == 0 && of_gpus,
        };
        return (same && allowed).then_some("of the script");
    }
    if facts.iter().any(|rank| !rank.has_gloo) {
        return None;
    }
    let mixed = gpus > 0 && gpus < facts.len();
    match asked {
        "gloo" => Some("gloo"),
        "nccl" => nccl_can(facts, false).then_some("cpu:gloo,cuda:nccl"),
        _ if mixed => None,
        _ if nccl_can(facts, true) => Some("cpu:gloo,cuda:nccl"),
        _ => Some("gloo"),
    }
}

fn check(asked: &str, facts: &[RankFacts]) {
    let decided = choose_collective_back_end(asked, facts);
    let name = decided.as_ref().ok().map(|back_end| match back_end {
        CollectiveBackEnd::OfScript(_) => "of the script",
        other => other.name(),
    });
    assert_eq!(
        name,
        expected(asked, facts),
        "{asked} {facts:#?} {decided:?}"
    );
    if let Err(error) = decided {
        let text = error.to_string();
        let helps = text.contains("rank") || text.contains("ddp_dist_backend");
        assert!(helps && text.len() < 400, "{text}");
    }
}

#[test]
fn every_combination_of_two_ranks_is_decided_by_the_laws() {
    let all = all_facts(&GROUPS);
    for one in &all {
        for other in &all {
            for asked in ASKED {
                check(asked, &[one.clone(), other.clone()]);
            }
        }
    }
}

#[test]
fn every_combination_of_three_ranks_without_a_group_is_decided_by_the_laws() {
    let all = all_facts(&[None]);
    for one in &all {
        for two in &all {
            for three in &all {
                for asked in ASKED {
                    check(asked, &[one.clone(), two.clone(), three.clone()]);
                }
            }
        }
    }
}

#[test]
fn a_refusal_names_the_ranks_the_device_and_what_is_allowed() {
    let of = |device: Option<usize>| RankFacts {
        host: "a".to_owned(),
        device: device.map(|number| format!("GPU-{number}")),
        gpu: None,
        has_gloo: true,
        has_nccl: true,
        group: None,
    };
    let said = |asked: &str, facts: &[RankFacts]| {
        choose_collective_back_end(asked, facts)
            .expect_err("to be refused")
            .to_string()
    };
    assert_eq!(
        said("nccl", &[of(Some(0)), of(Some(1)), of(Some(0))]),
        "NCCL is asked for (the configuration key \"ddp_dist_backend\"), but ranks 0, 2 of host \"a\" share the device GPU-0, which NCCL refuses; allowed: a device for every rank (CUDA_VISIBLE_DEVICES, or torch.cuda.set_device before smp.init), or \"ddp_dist_backend\" \"auto\" or \"gloo\""
    );
    assert_eq!(
        said("auto", &[of(Some(0)), of(None)]),
        "rank 1 has no GPU and rank 0 has a GPU: does CUDA_VISIBLE_DEVICES hide it there? Allowed with \"ddp\": a GPU on every rank or on none, or \"ddp_dist_backend\" \"gloo\", with which both may take part"
    );
    assert_eq!(
        said("nccl", &[of(None), of(None)]),
        "NCCL is asked for (the configuration key \"ddp_dist_backend\"), but ranks 0, 1 have no GPU; allowed: \"ddp_dist_backend\" \"auto\" or \"gloo\""
    );
}
