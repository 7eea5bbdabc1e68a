"""The manifests of `examples/clusters`, as those read them who check or run them."""

from __future__ import annotations

from typing import Any

import yaml

from .running import RECIPES

#: By the file of a manifest: the kind of its job, and the label by which its controller marks the pods of a job.
KINDS = {
    "jobset.yaml": ("JobSet", "jobset.sigs.k8s.io/jobset-name"),
    "pytorchjob.yaml": ("PyTorchJob", "training.kubeflow.org/job-name"),
    "trainjob.yaml": ("TrainJob", "jobset.sigs.k8s.io/jobset-name"),
}
NAMES = sorted(KINDS)


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the documents of a manifest, by their kinds."""
    return {one["kind"]: one for one in yaml.safe_load_all((RECIPES / name).read_text())}


def job(name: str) -> dict[str, Any]:
    """Return the job of a manifest."""
    return documents(name)[KINDS[name][0]]


def hosts(name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return how many pods there are of which description, the first host's first."""
    spec = job(name)["spec"]
    if name == "jobset.yaml":
        return [
            (one["replicas"] * one["template"]["spec"]["completions"], one["template"]["spec"]["template"]["spec"])
            for one in spec["replicatedJobs"]
        ]
    if name == "trainjob.yaml":
        (described,) = documents(name)["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        return [(spec["trainer"]["numNodes"], described["template"]["spec"]["template"]["spec"])]
    replicas = spec["pytorchReplicaSpecs"]
    return [(replicas[role]["replicas"], replicas[role]["template"]["spec"]) for role in ("Master", "Worker")]


def number_of_hosts(name: str) -> int:
    """Return how many pods a job has."""
    return sum(count for count, _ in hosts(name))


def container(name: str) -> dict[str, Any]:
    """Return the container that every pod has."""
    first, *others = [pod["containers"] for _, pod in hosts(name)]
    assert all(other == first for other in others)
    (only,) = first
    return dict(only)


def variables_of_the_controller(name: str, host: int, address: str, port: int) -> dict[str, str]:
    """Return what the controller of a job sets in the pod of a host."""
    if name == "jobset.yaml":
        return {"JOB_COMPLETION_INDEX": str(host)}
    if name == "trainjob.yaml":
        trainer = job(name)["spec"]["trainer"]
        return {
            "JOB_COMPLETION_INDEX": str(host),
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": address,
            "PET_MASTER_PORT": str(port),
        }
    pods, ranks = number_of_hosts(name), job(name)["spec"]["nprocPerNode"]
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(pods * int(ranks)),
        "RANK": str(host),
        "PYTHONUNBUFFERED": "1",
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": ranks,
        "PET_NODE_RANK": str(host),
    }
