"""The manifests for Kubernetes start the ranks that they have to, and are what the schemas of their kinds allow."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import yaml

from .manifests import KINDS, NAMES, container, documents, hosts, job, number_of_hosts
from .schema import problems


@pytest.mark.parametrize("name", NAMES)
def test_every_document_is_what_the_schema_of_its_kind_allows(name: str) -> None:
    found = {kind: problems(one) for kind, one in documents(name).items()}
    assert {KINDS[name][0], "NetworkPolicy"} <= found.keys()
    assert not any(found.values()), found


def wrong(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> list[str]:
    """Return the problems of the PyTorchJob after a change of its spec and of its first host's container."""
    changed = copy.deepcopy(job("pytorchjob.yaml"))
    spec = changed["spec"]
    spec["pytorchReplicaSpecs"]["Worker"] = {}
    change(spec, spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0])
    return problems(changed)


def test_what_the_schemas_do_not_allow_is_found() -> None:
    place = "PyTorchJob.spec.pytorchReplicaSpecs.Master.template.spec.containers.0"
    assert wrong(lambda spec, container: None) == []
    assert wrong(lambda spec, container: spec.pop("runPolicy")) == ["PyTorchJob.spec lacks runPolicy"]
    assert wrong(lambda spec, container: spec.update(nprocPerNode=4)) == [
        "PyTorchJob.spec.nprocPerNode is 4; allowed: string"
    ]
    assert wrong(lambda spec, container: container.update(enviroment=[])) == [
        f"{place}.enviroment is not a field of io.k8s.api.core.v1.Container"
    ]
    assert wrong(lambda spec, container: container.update(args="torchrun")) == [
        f"{place}.args is 'torchrun', not a list"
    ]
    assert wrong(lambda spec, container: spec["runPolicy"].update(backoffLimit=True)) == [
        "PyTorchJob.spec.runPolicy.backoffLimit is True; allowed: integer"
    ]


def options(name: str) -> dict[str, str]:
    (line,) = container(name)["args"]
    words = shlex.split(line)
    assert words[:2] == ["exec", "torchrun"]
    script = words.index("train.py")
    return dict(zip(words[2:script:2], words[3:script:2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_there_are_as_many_agents_as_pods(name: str) -> None:
    assert int(options(name)["--nnodes"]) == number_of_hosts(name) == 2
    assert options(name)["--nproc-per-node"] == "4"
    assert container(name)["command"] == ["/bin/sh", "-c"]


def test_the_pods_of_a_jobset_meet_at_the_first() -> None:
    jobset = job("jobset.yaml")
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    name = jobset["metadata"]["name"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0
    assert spec["parallelism"] == spec["completions"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert options("jobset.yaml")["--node-rank"] == "$JOB_COMPLETION_INDEX"
    assert options("jobset.yaml")["--master-addr"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert 1024 < int(options("jobset.yaml")["--master-port"]) < 32768  # below the ports of outgoing connections


def test_the_pods_of_a_pytorchjob_meet_where_its_operator_says() -> None:
    found = job("pytorchjob.yaml")
    assert found["apiVersion"] == "kubeflow.org/v1"
    assert container("pytorchjob.yaml")["name"] == "pytorch"  # the operator sets its variables in no other
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert {one["restartPolicy"] for one in replicas.values()} == {"OnFailure"}
    assert all("restartPolicy" not in one["template"]["spec"] for one in replicas.values())  # the operator sets it
    assert options("pytorchjob.yaml") == {
        "--nnodes": "2",
        "--nproc-per-node": found["spec"]["nprocPerNode"],
        "--node-rank": "$RANK",
        "--master-addr": "$MASTER_ADDR",
        "--master-port": "$MASTER_PORT",
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_pods_get_the_secret_shared_memory_and_a_common_folder(name: str) -> None:
    variables = {one["name"]: one for one in container(name)["env"]}
    assert "secretKeyRef" in variables["SHARDWRIGHT_SECRET"]["valueFrom"]
    for _, pod in hosts(name):
        volumes = {one["name"]: one for one in pod["volumes"]}
        mounted = {one["mountPath"]: volumes[one["name"]] for one in container(name)["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounted["/checkpoints"]
        assert pod["securityContext"]["runAsNonRoot"]
    assert "--folder /checkpoints/" in container(name)["args"][0]


def test_the_pods_of_a_trainjob_are_those_of_its_runtime() -> None:
    found, runtime = job("trainjob.yaml"), documents("trainjob.yaml")["TrainingRuntime"]
    reference = found["spec"]["runtimeRef"]
    assert reference == {
        "apiGroup": runtime["apiVersion"].partition("/")[0],
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    (described,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": found["spec"]["trainer"]["numNodes"], "torch": {}}
    # By these names the controller finds the job and the container that it tells of ranks.
    assert described["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert described["name"] == container("trainjob.yaml")["name"] == "node"
    assert described["template"]["spec"]["backoffLimit"] == 0
    assert options("trainjob.yaml") == {
        "--nnodes": str(found["spec"]["trainer"]["numNodes"]),
        "--nproc-per-node": str(found["spec"]["trainer"]["numProcPerNode"]),
        "--node-rank": "$PET_NODE_RANK",
        "--master-addr": "$PET_MASTER_ADDR",
        "--master-port": "$PET_MASTER_PORT",
    }


def test_all_manifests_describe_the_same_pod() -> None:
    """But for how a host learns its number and where to meet."""

    def described(name: str) -> tuple[object, object]:
        own = {key: value for key, value in container(name).items() if key not in ("name", "args")}
        (pod, *_) = (spec for _, spec in hosts(name))
        return own, {key: value for key, value in pod.items() if key not in ("containers", "restartPolicy")}

    assert described("jobset.yaml") == described("pytorchjob.yaml") == described("trainjob.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_the_manifest_are_keys_of_the_library(name: str) -> None:
    (value,) = [one["value"] for one in container(name)["env"] if one["name"] == "SM_HP_MP_PARAMETERS"]
    smp.init(yaml.safe_load(value))
    try:
        assert smp.state.cfg.connect_timeout_seconds == 600
        assert smp.state.cfg.encrypt
    finally:
        smp.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_only_pods_of_the_job_reach_its_ports(name: str) -> None:
    kind, label = KINDS[name]
    kinds = documents(name)
    labels = {label: kinds[kind]["metadata"]["name"]}
    policy = kinds["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
