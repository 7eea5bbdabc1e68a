"""The one question before every optimizer: may its update of an element depend on what this rank does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.optimizer.besides import NO_OPTIONS, own_attributes
from shardwright.optimizer.offloading import StateStorage
from shardwright.optimizer.reach.known import DECLARATION, Reach, declares_elements, known_reach
from shardwright.optimizer.reach.probe import Found, probe


class Verdict(NamedTuple):
    """How a step is to be made.

    Attributes:
        needs_whole: Whether it needs the whole of parameters of which ranks have slices or shards.
        is_watched: Whether it must draw no random numbers, which nobody knows of it.
    """

    needs_whole: bool = False
    is_watched: bool = False


#: What trials have found, by optimizer and its options.
_ANSWERS: Any = WeakIdKeyDictionary()
#: Optimizers of which it was said that their steps are made on whole tensors.
_TOLD: Any = WeakIdKeyDictionary()


class Division(NamedTuple):
    """A way in which this rank lacks elements of what an optimizer trains.

    Attributes:
        key: What divides it, as the configuration says it.
        means: What a rank has.
        most: How far a step may look.
        instead: What to do if it looks farther.
        exchanges: Whether optimizers of ``smp.optimizers`` exchange what they need over it.
        slices: Whether ranks have parts of parameters, which can be put together for a step.
    """

    key: str
    means: str
    most: Reach
    instead: str
    exchanges: bool = False
    slices: bool = False


def divisions(runtime: Runtime, models: Iterable[Any]) -> list[Division]:
    """Return the ways in which the ranks of a job divide what an optimizer trains, the strictest first; alike on all.

    Args:
        runtime: The rank.
        models: The placements of the models that it trains.
    """
    place, found = runtime.place, list[Division]()
    offloads = runtime.find(StateStorage) is not None
    if place.pp_size > 1:
        key = f"pipeline_parallel_degree {place.pp_size}"
        means = "each rank has some of the model's parameters"
        found.append(Division(key, means, Reach.PARAMETER, "pipeline_parallel_degree 1", True))
    if place.shards_parameters:
        # Whole tensors are put together for a step, but not chunk by chunk.
        most = Reach.ELEMENT if offloads else Reach.MODEL
        means = "each rank has shards of parameters: norms, factors or dot products would be those of a shard"
        key = "sharded_data_parallel_degree"
        found.append(Division(key, means, most, "sharded_data_parallel_degree 1", slices=True))
    if place.shards_optimizer_state:
        means = "each rank updates a share of the parameters"
        found.append(Division("shard_optimizer_state", means, Reach.PARAMETER, "shard_optimizer_state=False"))
    if offloads:
        means = "a step goes over the parameters in parts: norms or dot products over several would be those of a part"
        found.append(Division('"offload_optimizer"', means, Reach.PARAMETER, '"offload_optimizer": False'))
    shardings = [one for each in models if each.is_sharded for one in each.sharded.by_name().values()]
    if any(one.is_divided for one in shardings):
        key = f"tensor_parallel_degree {len(place.tp_ranks)}"
        alone = any(one.owner is not None for one in shardings)
        # Whole tensors are put together for a step, but not what one rank alone has, and not chunk by chunk.
        most = Reach.ELEMENT if offloads else Reach.PARAMETER if alone else Reach.MODEL
        means = "each rank has parts of parameters"
        found.append(Division(key, means, most, "tensor_parallel_degree 1", exchanges=True, slices=True))
    return sorted(found, key=lambda way: way.most)


def may_divide(runtime: Runtime) -> bool:
    """Whether the job divides models or the state of optimizers; looks at no model, since it is asked in every step."""
    place = runtime.place
    return (
        place.pp_size > 1
        or len(place.tp_ranks) > 1
        or place.shards_parameters
        or place.shards_optimizer_state
        or runtime.find(StateStorage) is not None
    )


def found_of(optimizer: Any, kind: type[Optimizer]) -> Found:
    """Return how far the step of an optimizer looks: what is known of its class, or what a probe finds.

    Args:
        optimizer: The optimizer. A probe is made again when its options are others.
        kind: Its class, before ``smp.DistributedOptimizer`` wrapped it.
    """
    known = known_reach(kind)
    if known is not None:
        return Found(known)
    attributes = own_attributes(optimizer)
    own = {name: vars(optimizer)[name] for name in attributes if name not in NO_OPTIONS}
    options = repr([_switches(each) for each in (own, *optimizer.param_groups)])
    answers: dict[str, Found] = _ANSWERS.setdefault(optimizer, {})
    if options not in answers:
        answers[options] = probe(optimizer, kind, attributes)
    return answers[options]


def _switches(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of options may switch a rule on: flags and names, and whether a number is 0."""
    return {
        key: value
        if isinstance(value, (bool, str, type(None)))
        else bool(value)
        if isinstance(value, (int, float))
        else type(value)
        for key, value in sorted(options.items(), key=lambda entry: str(entry[0]))  # loads give another order
        if key != "lr"
    }


def ask(optimizer: Any, runtime: Runtime, kind: type[Optimizer]) -> Verdict:
    """Check that the ranks' parts of an optimizer's step make up the step of one process. All ranks find the same.

    Args:
        optimizer: The optimizer.
        runtime: The rank.
        kind: Its class, before ``smp.DistributedOptimizer`` wrapped it.

    Returns:
        How the step is to be made.

    Raises:
        ConfigError: They do not.
    """
    if known_reach(kind) is Reach.ELEMENT or not may_divide(runtime):
        return Verdict()
    trains = getattr(optimizer, "trains", None)  # not before it is wrapped
    models = [model.placement for model in runtime[Models].alive if trains is not None and trains(model)]
    ways = divisions(runtime, models)
    if not ways:
        return Verdict()
    found = Found(Reach.MODEL) if _exchanges_norms(kind) else _judged(optimizer, kind)
    for way in ways:
        if _exchanges_norms(kind):
            if not way.exchanges:
                raise ConfigError(_words(kind, found, way))
            continue
        # One that was not tried may keep to a list of parameters of its own.
        most = way.most if known_reach(kind) is None else min(way.most, Reach.PARAMETER)
        if found.reach is None or found.is_random or found.reach > most:
            raise ConfigError(_words(kind, found, way))
    if _exchanges_norms(kind):
        return Verdict()
    if found.is_assumed and any(way.slices for way in ways):
        _tell(optimizer, kind, next(way for way in ways if way.slices), runtime)
    return Verdict(found.reach is not Reach.ELEMENT, known_reach(kind) is None)


def _tell(optimizer: Any, kind: type[Optimizer], way: Division, runtime: Runtime) -> None:
    """Say once that steps are made on whole tensors, for one that perhaps does not need it."""
    if optimizer in _TOLD:
        return
    _TOLD[optimizer] = True
    if runtime.place.rank == 0:
        runtime.logger.warning(
            "%s is not known to update each element of a parameter by itself: with %s its steps gather whole "
            "parameters, gradients and state, which takes their memory and time. If it does, set %s = True on the "
            "class that has its step",
            kind.__name__,
            way.key,
            DECLARATION,
        )


def _judged(optimizer: Any, kind: type[Optimizer]) -> Found:
    """How far a step looks, at most. A trial shows what it may not do, but not all that it will do later."""
    found = found_of(optimizer, kind)
    if known_reach(kind) is not None:
        return found
    if not declares_elements(optimizer, kind):
        return found._replace(reach=Reach.PARAMETER, is_assumed=True) if found.reach is Reach.ELEMENT else found
    if found.reach is None:
        return Found(Reach.ELEMENT)
    if found.reach is Reach.ELEMENT and not found.is_random:
        return found
    what = "draws random numbers" if found.is_random else "finds more than the element itself"
    raise ConfigError(
        f"{kind.__name__} declares {DECLARATION} = True, and a trial on small tensors shows that its step {what}: take "
        "the declaration out"
    )


def ask_unwrapped(optimizer: Optimizer, runtime: Runtime) -> None:
    """Check the step of an optimizer that ``smp.DistributedOptimizer`` does not wrap, whose tensors nobody makes whole.

    Args:
        optimizer: The optimizer.
        runtime: The rank.

    Raises:
        ConfigError: It may look at what this rank does not hold.
    """
    kind = type(optimizer)
    if known_reach(kind) is Reach.ELEMENT or _exchanges_norms(kind) or not may_divide(runtime):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [one for one in runtime[Models].placements if any(id(each) in own for each in one.owned_parameters())]
    ways = [way for way in divisions(runtime, trained) if way.exchanges]
    if trained and ways and (found := _judged(optimizer, kind)).reach is not Reach.ELEMENT:
        way = next((one for one in ways if one.slices), ways[0])
        if found.reach is None or found.is_random or found.reach > min(way.most, Reach.PARAMETER):
            raise ConfigError(_words(kind, found, way))
        if way.slices:
            raise ConfigError(
                f"{kind.__name__}.step of an optimizer that smp.DistributedOptimizer does not wrap, which "
                f"{'may look' if found.is_assumed else 'looks'} at whole parameters, and with {way.key} {way.means}: "
                "wrap it, optimizer = smp.DistributedOptimizer(optimizer), which puts them together"
            )


def _exchanges_norms(kind: type[Optimizer]) -> bool:
    """Whether an optimizer of ``smp.optimizers`` asks the other ranks of a model itself."""
    return bool(getattr(kind, "steps_on_all_ranks", False))


def _words(kind: type[Optimizer], found: Found, way: Division) -> str:
    name = kind.__name__
    by_itself = "element of a parameter" if way.most is Reach.ELEMENT else "parameter"
    if _exchanges_norms(kind):
        how = f"{name} exchanges norms of all parameters, and does not update each {by_itself} by itself"
    elif found.is_random:
        how = f"{name} draws random numbers in its step, which parts of it would not draw alike"
    elif found.reach is None:
        how = (
            f"{name} is not known to update each {by_itself} by itself, and its step could not be tried on small "
            f"tensors ({found.reason})"
        )
    elif found.is_assumed:
        how = (
            f"{name} is not known to update each {by_itself} by itself, which no trial can show for every step; set "
            f"{DECLARATION} = True on the class that has its step, if it does"
        )
    elif found.reason:
        how = (
            f"{name} does not update each {by_itself} by itself: what its step leaves in {found.reason} depends on "
            "which others it updates"
        )
    elif found.reach is Reach.MODEL:
        how = f"{name} does not update each {by_itself} by itself: its update of one depends on other parameters"
    else:
        how = f"{name} does not update each {by_itself} by itself, but by what it finds in the whole parameter"
    return f"{how}. With {way.key} {way.means}. Use an optimizer of torch.optim such as AdamW, or {way.instead}"
