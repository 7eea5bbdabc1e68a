"""All keys of a file, and what becomes of them: each is in the result, known or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.convert.accelerate_keys import ACCELERATE, SAGEMAKER
from shardwright.convert.deepspeed_keys import DEEPSPEED, INLINE, OF_FILE
from shardwright.convert.deepspeed_planning import plan_alone
from shardwright.convert.engine_keys import FSDP, MEGATRON, PARALLELISM, clipping_told
from shardwright.convert.keys import Key, Outcome, Row, Told, drop, left_to_script
from shardwright.convert.plan import Engine, Plan
from shardwright.convert.planning import plan_accelerate
from shardwright.convert.rendering import refusal
from shardwright.convert.values import Section
from shardwright.errors import ConfigError

#: Mappings in a file of accelerate: the prefix that their keys may lack, their keys, and whose they are.
SECTIONS: dict[str, tuple[str, tuple[Key, ...], tuple[Engine, ...]]] = {
    "fsdp_config": ("fsdp_", FSDP, (Engine.FSDP,)),
    "parallelism_config": ("parallelism_config_", PARALLELISM, (Engine.FSDP, Engine.DEEPSPEED, Engine.PLAIN)),
    "deepspeed_config": ("", INLINE, (Engine.DEEPSPEED,)),
    "megatron_lm_config": ("megatron_lm_", MEGATRON, (Engine.MEGATRON,)),
}
_OF_ACCELERATE = ("distributed_type", "compute_environment")
#: Keys whose "auto" says more than that the script says it.
_AUTO = ("gradient_clipping", "enabled", "keep_in_fp32_modules")


@dataclass(frozen=True)
class Conversion:
    """A plan, and what became of each key."""

    plan: Plan
    rows: list[Row]

    @property
    def is_whole(self) -> bool:
        """Whether every key has a counterpart or needs none."""
        return all(row.outcome is not Outcome.NO_COUNTERPART for row in self.rows)


def is_of_accelerate(given: Mapping[str, Any]) -> bool:
    """Return whether a file is one of accelerate, and not of DeepSpeed by itself.

    Raises:
        ConfigError: It is neither.
    """
    if any(key in given for key in _OF_ACCELERATE):
        if "distributed_type" in given:
            return True
        raise ConfigError("the file has no distributed_type, without which accelerate takes it neither")
    known = {name.partition(".")[0] for each in DEEPSPEED for name in each.names}
    if known.isdisjoint(given):
        raise ConfigError(
            "the file is neither a configuration of accelerate, which has a distributed_type, nor one of DeepSpeed"
        )
    return False


def deepspeed_file(given: Mapping[str, Any]) -> str | None:
    """Return the path of the file of DeepSpeed that one of accelerate names; None if it names none that counts."""
    section = Section("deepspeed_config", given.get("deepspeed_config"))
    path = section.text("deepspeed_config_file", "none")
    is_used = str(given.get("distributed_type")).upper() == "DEEPSPEED"
    return path if is_used and path not in ("none", "no", "") else None


def convert(
    given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None = None, ranks: int | None = None
) -> Conversion:
    """Return what becomes of a configuration.

    Args:
        given: The keys of a file of accelerate, or of DeepSpeed by itself.
        deepspeed: Those of the file of DeepSpeed that the first names.
        ranks: How many processes there are, in place of what the file says.

    Raises:
        ConfigError: Accelerate or DeepSpeed would not take a value either; or the number of processes is missing.
    """
    if is_of_accelerate(given):
        plan = plan_accelerate(Section("", given), None if deepspeed is None else Section("", deepspeed), ranks)
        rows = list(_rows_of_accelerate(plan, given, deepspeed))
    else:
        plan = plan_alone(Section("", given), ranks)
        rows = list(_rows(plan, DEEPSPEED, given, ""))
    for key, what in plan.unsaid.items():
        outcome, text = clipping_told(plan, None)
        rows.append(Row(key, None, outcome, f"{text}: {what}"))
    why = refusal(plan)
    if why is not None:
        rows.append(Row("smp.init", None, Outcome.NO_COUNTERPART, f"the printed keys are refused: {why}"))
    return Conversion(plan, rows)


def _rows_of_accelerate(plan: Plan, given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> Iterator[Row]:
    for name, value in given.items():
        if name in SECTIONS and not value:
            yield Row(name, value, *drop("nothing is given"))
            continue
        if name not in SECTIONS or not isinstance(value, Mapping):
            yield from _rows(plan, (*ACCELERATE, *SAGEMAKER), {name: value}, "")
            continue
        prefix, keys, engines = SECTIONS[name]
        for key, inner in value.items():
            full = key if str(key).startswith(prefix) else f"{prefix}{key}"
            path = f"{name}.{key}"
            if plan.engine not in engines:
                yield Row(path, inner, *_not_read(keys, full, given))
            elif deepspeed is not None and name == "deepspeed_config" and full in OF_FILE:
                yield Row(path, inner, *drop("DeepSpeed's file says it; accelerate takes it in one place only"))
            else:
                yield _row(plan, keys, full, inner, path)
    if deepspeed is not None:
        yield from _rows(plan, DEEPSPEED, deepspeed, f"{deepspeed_file(given)}: ")


def _not_read(keys: tuple[Key, ...], name: str, given: Mapping[str, Any]) -> Told:
    """Return what becomes of a key of an engine that is not used."""
    if any(name in each.names for each in keys):
        return drop(f"accelerate does not read it with distributed_type {given.get('distributed_type')}")
    return _UNKNOWN


def _rows(plan: Plan, keys: tuple[Key, ...], given: Mapping[str, Any], before: str) -> Iterator[Row]:
    """Return a row for each value of nested mappings, by what is known of it or of the nearest mapping around it."""
    for path, value, around in _leaves(given, "", ()):
        known = _find(keys, path)
        if known is None:
            yield Row(before + path, value, *_UNKNOWN)
            continue
        key, name = known
        of_mapping = value if name == path else around[name.count(".")]
        yield Row(before + path, value, *_told(plan, key, of_mapping, name))


def _row(plan: Plan, keys: tuple[Key, ...], name: str, value: Any, path: str) -> Row:
    known = _find(keys, name)
    return Row(path, value, *(_UNKNOWN if known is None else _told(plan, known[0], value, name)))


def _told(plan: Plan, key: Key, value: Any, name: str) -> Told:
    says_more = name.endswith(_AUTO) or name.startswith("optimizer.")
    return (None if says_more else left_to_script(value)) or key.read(plan, value)


def _find(keys: tuple[Key, ...], path: str) -> tuple[Key, str] | None:
    """Return the key of the longest part of a path, and that part."""
    by_name = {name: each for each in keys for name in each.names}
    while path:
        if path in by_name:
            return by_name[path], path
        path = path.rpartition(".")[0]
    return None


def _leaves(given: Mapping[str, Any], path: str, around: tuple[Any, ...]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Return each value that is no mapping with its path, and the mappings of the parts of the path."""
    for key, value in given.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name, (*around, value))
        else:
            yield name, value, around


_UNKNOWN: Told = (Outcome.NO_COUNTERPART, "nobody knows this key here; look up what it does")
