"""The documentation's code runs, its links lead somewhere, and its tables are those of the library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
JOB = re.compile(r"<!-- ranks: (\d+), pipeline_parallel_degree: (\d+) -->")
#: Says of a page that its code needs an environment of its own, in which this command runs it.
RUN_BY = re.compile(r"<!-- run by: make test-ray -->")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_run_here(page: Path) -> bool:
    text = page.read_text()
    return bool(CODE.search(text)) and not RUN_BY.search(text)


@pytest.mark.parametrize("page", [page for page in PAGES if is_run_here(page)], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    job = JOB.search(text)
    assert job, f"{name_of(page)} has code but does not say on how many ranks it runs"
    ranks, degree = job.groups()
    script = tmp_path / f"page_{page.stem.replace('-', '_')}.py"  # not by the name of a package, which it would hide
    script.write_text("\n\n".join(CODE.findall(text)))
    environment = {"SM_HP_MP_PARAMETERS": json.dumps({"pipeline_parallel_degree": int(degree)})}
    outputs_of_ranks(script, ranks=int(ranks), folder=tmp_path, environment=environment)


def test_pages_that_are_run_elsewhere_are_those_of_make_test_ray() -> None:
    assert [name_of(page) for page in PAGES if RUN_BY.search(page.read_text())] == ["docs/guide/ray.md"]


def test_the_readme_runs_as_it_says(tmp_path: Path) -> None:
    """Its script, by its command; the other pages' are forked."""
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "script.py").write_text("\n\n".join(CODE.findall(readme)))
    (command,) = re.findall(r"^shardwright run .* script\.py$", readme, re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 3  # of rank 0, a loss for each step


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def test_every_page_of_a_folder_is_in_its_index() -> None:
    for folder in ("guide", "design", "measurements", "coming-from"):
        index = ROOT / "docs" / folder / "README.md"
        linked = set(LINK.findall(index.read_text()))
        pages = {page.name for page in index.parent.glob("*.md")} - {"README.md"}
        assert pages <= linked


def test_the_table_of_configuration_keys_is_the_librarys() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "configuration_table.py", "--check"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stderr
