"""Files that are changed, cut, lost, exchanged or added, at random places: each is named and refused."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shardwright._core import CheckpointReader
from shardwright.errors import ShardwrightError

from tests.torn.states import commit, found, write

TAGS = ("one", "two")


def prepared(folder: Path) -> list[Path]:
    """Two checkpoints of both states: all files of the newest, its manifest and ``newest`` among them."""
    for step, tag in enumerate(TAGS):
        commit(folder, tag, step, [write(folder, tag, rank, step) for rank in range(2)])
    return [*sorted((folder / f"{TAGS[1]}_partial").iterdir()), folder / "newest"]


def complaints(folder: Path) -> list[str]:
    """What is said on opening, verifying and reading all of the newest checkpoint: of each, if it refuses."""
    try:
        reader = CheckpointReader(folder)
    except ShardwrightError as error:
        return [str(error)]
    said = ["; ".join(reader.verify())]
    try:
        found(folder, reader)
    except ShardwrightError as error:
        said.append(str(error))
    else:
        said.append("")
    return said


def flipped(path: Path, chance: random.Random) -> str:
    """One bit."""
    size = path.stat().st_size
    # Headers and ends are small, and everything in the middle is alike.
    place = min(
        chance.choice((chance.randrange(size), chance.randrange(300), size - 1 - chance.randrange(9))), size - 1
    )
    place = max(place, 0)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return path.name


def cut(path: Path, chance: random.Random) -> str:
    """Everything behind a place."""
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))
    return path.name


def longer(path: Path, chance: random.Random) -> str:
    """Bytes at the end."""
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 100)))
    return path.name


def missing(path: Path, _: random.Random) -> str:
    """The whole file."""
    path.unlink()
    return path.name


def swapped(path: Path, chance: random.Random) -> str:
    """Another file's contents: of the same checkpoint, or of the other one under the same name."""
    parts = sorted(path.parent.glob("part-*"))
    choices = [other for other in parts if other != path]
    other = path.parent.parent / f"{TAGS[0]}_partial" / path.name
    if other.exists():
        choices.append(other)
    if not choices:  # ``newest`` is alone
        choices.append(path.parent / f"{TAGS[1]}_partial" / "manifest.json")
    shutil.copyfile(chance.choice(choices), path)
    return path.name


def extra(path: Path, chance: random.Random) -> str:
    """A file that is not of the checkpoint."""
    name = chance.choice(("part-2.safetensors", ".hidden", "part-0.safetensors.old"))
    (path.parent / name).write_bytes(chance.randbytes(chance.randint(0, 9)))
    return name


KINDS: list[Callable[[Path, random.Random], str]] = [flipped, cut, longer, missing, swapped, extra]


def damages(folder: Path, count: int, seed: str, undetected: list[str]) -> Counter[str]:
    """Damage a checkpoint so many times; ``undetected`` takes what was not named, or not refused."""
    files = prepared(folder)
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    tried: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"{seed}/damage/{number}")
        path = chance.choice(files)
        kind = chance.choice(KINDS[:-1] if path.name == "newest" else KINDS)
        name = kind(path, chance)
        what = "a part" if path.name.startswith("part-") else path.name
        tried[kind.__name__ if kind is extra else f"{kind.__name__}: {what}"] += 1
        for said in complaints(folder):
            if name not in said:
                undetected.append(f"damage {number} of seed {seed} ({kind.__name__} {name}): {said or 'nothing'}")
        path.unlink(missing_ok=True)
        shutil.copyfile(kept / path.relative_to(folder), path)
        if kind is extra:
            (path.parent / name).unlink()
    if complaints(folder) != ["", ""]:
        undetected.append("the files as they were at first are refused")
    return tried
