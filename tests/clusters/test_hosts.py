"""The Slurm script, and what pods run, over hosts that are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.network import LINK, Network, missing

from .manifests import NAMES, container, number_of_hosts, variables_of_the_controller
from .running import LIMIT_SECONDS, SCRIPT, run_recipe, trained_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def test_the_slurm_script_trains_over_four_hosts(tmp_path: Path) -> None:
    with Network(4, delay_milliseconds=1.0) as network:
        hosts = range(network.hosts)
        done = run_recipe(
            "train.slurm",
            SCRIPT,
            *("--folder", tmp_path / "run", "--steps", "8", "--save-every", "4", "--width", "16", "--layers", "2"),
            folder=tmp_path,
            tasks=[1] * network.hosts,
            hosts=[network.address(host) for host in hosts],
            prefixes=[network.prefix(host) for host in hosts],
            SLURM_JOB_NODELIST="node-[0-3]",
            SLURM_CPUS_PER_TASK="1",
            SLURM_JOB_ID="79",
            GLOO_SOCKET_IFNAME=LINK,
        )
    assert done.returncode == 0, done.stderr
    assert trained_by(tmp_path / "run") == ({"from_step": 0, "ranks": 4, "stages": 2, "replicas": 2}, 8)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_pods_of_a_manifest_run_trains_over_its_hosts(name: str, tmp_path: Path) -> None:
    """With names of files and hosts, and the number of ranks, of this machine."""
    (line,) = container(name)["args"]
    steps = ("--steps", "8", "--save-every", "4", "--width", "16", "--layers", "2")
    with Network(number_of_hosts(name), delay_milliseconds=1.0) as network:
        first = network.address(0)
        for written, here in (
            ("exec torchrun", f"exec {sys.executable} -m torch.distributed.run"),
            ("shardwright-host-0-0.shardwright", first),
            ("--nproc-per-node 4", "--nproc-per-node 1"),
            ("train.py --folder /checkpoints/run", f"{SCRIPT} --folder {tmp_path / 'run'} {' '.join(steps)}"),
        ):
            assert written in line or "shardwright-host" in written
            line = line.replace(written, here)
        given = {one["name"]: one.get("value", "of the test") for one in container(name)["env"]}
        agents = [
            subprocess.Popen(
                [*network.prefix(host), *container(name)["command"], line],
                env={
                    **os.environ,
                    **variables_of_the_controller(name, host, first, 23456),
                    **given,
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": LINK,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(network.hosts)
        ]
        try:
            written_by = [agent.communicate(timeout=LIMIT_SECONDS)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(written_by)
    assert trained_by(tmp_path / "run") == ({"from_step": 0, "ranks": 2, "stages": 2, "replicas": 1}, 8)
