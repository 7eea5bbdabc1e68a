"""The command line of a table of cases. Needs no torch."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterable, Sequence

from .cases import Case


def parser(
    module: str, description: str | None, patterns: str, *, partitions: bool = True, pairs: bool = True
) -> argparse.ArgumentParser:
    """The options that every table of cases has.

    Args:
        module: The module that is run.
        description: What it does.
        patterns: What its patterns are compared with.
        partitions: Whether it runs on random partitions too.
        pairs: Whether a pairwise choice can be run.
    """
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    result.add_argument("patterns", nargs="*", help=f"{patterns} to run, with * and ?; all by default")
    if pairs:
        result.add_argument("--pairwise", action="store_true", help="every problem, and every two settings together")
    result.add_argument("--list", action="store_true", help="only list the cases")
    result.add_argument("--logs", action="store_true", help="show the whole log of each job with a failed case")
    if partitions:
        result.add_argument(
            "--partitions",
            nargs="+",
            type=int,
            metavar="SEED",
            help="run on random partitions with these seeds instead",
        )
    return result


def chosen(
    cases: Iterable[Case],
    patterns: Sequence[str],
    names: Callable[[Case], tuple[str, ...]] = lambda case: (case.name,),
) -> list[Case]:
    """The cases of which a name is like one of the patterns; all if there are none."""
    return [
        case
        for case in cases
        if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names(case))
    ]


def print_names(cases: Sequence[Case]) -> int:
    """List the cases, or say that there are none; returns the exit status."""
    print("\n".join(case.name for case in cases) or "no case has such a name; see --list")
    return 0 if cases else 2
