"""The Slurm script over four hosts, which are network namespaces of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import LINK, Network, missing

from .running import SCRIPT, run_recipe, trained_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
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
