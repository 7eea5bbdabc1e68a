import pytest
from shardwright import _core
from shardwright.errors import ConfigError, PartitionError


def test_groups_of_two_pipelines() -> None:
    topology = _core.Topology(4, 2)
    assert (topology.world_size, topology.placement) == (4, "DPT")
    assert topology.groups("PP_GROUP") == [[0, 1], [2, 3]]
    assert topology.group("DP_GROUP", 3) == [1, 3]
    assert topology.rank_in("DP_GROUP", 3) == 1
    assert topology.global_rank("PP_GROUP", 3, 0) == 2
    assert topology.coordinates(3) == (1, 0, 1)
    assert topology.rank_at(pp_rank=1, tp_rank=0, rdp_rank=1) == 3
    assert topology.size("MP_GROUP") == 2


def test_check_world_gives_the_topology_of_the_configuration() -> None:
    config = _core.Config.parse('{"partitions": 2, "ddp": true, "placement_strategy": "spread"}')
    assert config.check_world(4) == _core.Topology(4, 2, 1, "TPD")
    with pytest.raises(ConfigError, match="3 is not divisible"):
        config.check_world(3)
    with pytest.raises(ConfigError, match='needs "ddp" to be true'):
        _core.Config.parse("{}").check_world(2)


def test_what_does_not_exist_is_refused_by_name() -> None:
    topology = _core.Topology(4, 2)
    with pytest.raises(ConfigError, match="rank 4 does not exist; allowed: 0 to 3"):
        topology.group("PP_GROUP", 4)
    with pytest.raises(ConfigError, match="there is no group"):
        topology.group("XP_GROUP", 0)
    with pytest.raises(ConfigError, match="permutation of the letters D, P, T"):
        _core.Topology(4, 2, 1, "DPX")


def test_fingerprints_differ_in_named_keys() -> None:
    first, second = (_core.Config.parse(text) for text in ('{"seed": 1}', '{"secret_file": "x"}'))
    assert _core.Config.difference(first.fingerprint(), second.fingerprint()) == ["seed: 1 and 0"]


def test_a_request_that_cannot_be_read_is_a_partition_error() -> None:
    with pytest.raises(PartitionError, match="format_version 9; this version of the library reads up to 3"):
        _core.partition('{"format_version": 9}')
