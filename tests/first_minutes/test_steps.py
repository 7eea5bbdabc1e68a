"""The steps of the first minutes are judged by status and by what they say; the notebook's code works."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.first_minutes.steps import ROOT, Step, perform, prepare, transcript, written
from tests.jobs.ranks import outputs_of_ranks, run_ranks


def test_a_step_fails_by_its_status_and_by_what_it_does_not_say(tmp_path: Path) -> None:
    step = Step("Say", "echo one; echo two >&2; exit 3", status=3, told=("one", "two"))
    done = perform(step, tmp_path, os.environ)
    assert (done.why, done.output) == ("", "one\ntwo\n")
    assert perform(step._replace(status=0), tmp_path, os.environ).why == "it ended with 3, not 0"
    assert perform(step._replace(told=("three",)), tmp_path, os.environ).why == "it does not say 'three'"
    assert perform(step._replace(untold=("three", "two")), tmp_path, os.environ).why == "it says 'two'"


def test_the_transcript_shows_what_is_chosen_without_this_machines_paths(tmp_path: Path) -> None:
    step = Step("Say", f"echo {tmp_path}/a; echo b", shown=("/a",))
    page = transcript([perform(step, tmp_path, os.environ)], lambda text: text.replace(str(tmp_path), "."))
    assert page == "## Say\n\n```console\n$ echo ./a; echo b\n./a\n```\n"


def test_the_script_of_the_readme_trains_on_two_ranks_without_a_warning(tmp_path: Path) -> None:
    prepare(tmp_path)
    ended = run_ranks(tmp_path / "script.py", ranks=2, folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended[0].err
    assert len(list(map(float, ended[0].out.split()))) == 3
    assert ended[1].out == ""
    for one in ended:
        assert "differs" not in one.err, "every rank has to draw the same batch"
        assert "arning" not in one.err


def test_the_notebook_of_the_examples_works_as_a_script(tmp_path: Path) -> None:
    """`make first-minutes` runs it in a kernel."""
    prepare(tmp_path)
    notebook = json.loads((tmp_path / "notebook.ipynb").read_text())
    assert written(ROOT / "examples" / "notebook.ipynb") == "", "it is kept without outputs"
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    (told,) = outputs_of_ranks(tmp_path / "cells.py", ranks=0, folder=tmp_path)
    assert "rank 0 of 1 has 321 parameters" in told
    assert "[rank 1] rank 1 of 2 has " in told
    assert (tmp_path / "script.py").read_text().startswith("import torch")
