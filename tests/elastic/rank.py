"""A rank of ``examples/elastic.py`` that stops in the middle of a step, to be killed there.

usage: python -m tests.elastic.rank READY VICTIM STEP ARGUMENTS...

The rank, or the node that ``ELASTIC_NODE`` names, VICTIM writes its process id into the file READY in its STEPth step.
With "saved STEP" it does so right after the save in the background that follows this step, of which it tells nobody.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from shardwright.checkpoints import background

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
#: It is killed long before.
STOPPED_SECONDS = 60.0


def example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("elastic_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def stops_in(module: Any, step: int, ready: Path) -> None:
    """Let the forward of a block stop in that step."""
    steps = [0]
    samples_from, forward = module.samples_from, module.Block.forward

    def counting(position: int, count: int) -> Any:
        steps[0] = position // count + 1
        return samples_from(position, count)

    def stopping(self: Any, x: Any) -> Any:
        if steps[0] == step:
            tell_and_stop(ready)
        return forward(self, x)

    module.samples_from, module.Block.forward = counting, stopping


def stops_after_save(module: Any, step: int, ready: Path) -> None:
    """Let the script stop once it has saved that step, and let the thread that writes stop before it tells rank 0."""
    save = module.smp.save_checkpoint

    def saving(folder: Any, tag: str, **given: Any) -> None:
        if tag == f"step{step}":
            background.BackgroundSave._run = lambda self: time.sleep(STOPPED_SECONDS)  # type: ignore[method-assign]
        save(folder, tag, **given)
        if tag == f"step{step}":
            tell_and_stop(ready)

    module.smp.save_checkpoint = saving


def tell_and_stop(ready: Path) -> None:
    """Say that this rank can be killed."""
    ready.with_suffix(".writing").write_text(str(os.getpid()))
    ready.with_suffix(".writing").rename(ready)
    time.sleep(STOPPED_SECONDS)
    raise TimeoutError("nobody has killed it")


def main() -> None:
    """Run the example with the other arguments."""
    ready, victim, step, *arguments = sys.argv[1:]
    module = example()
    if os.environ.get("ELASTIC_NODE", os.environ["RANK"]) == victim and not Path(ready).exists():
        stops = stops_after_save if step.startswith("saved ") else stops_in
        stops(module, int(step.removeprefix("saved ")), Path(ready))
    sys.argv = [str(EXAMPLE), *arguments]
    module.main()


if __name__ == "__main__":
    main()
