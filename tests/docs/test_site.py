"""The site has every public name and page, and finds links that lead nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import shardwright as smp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documentation_site", ROOT / "tools" / "documentation_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "site" / "api").glob("*.md")]
    documented: list[str] = []
    for page in pages:
        for part in page.split(".. currentmodule:: ")[1:]:
            module, _, rest = part.partition("\n")
            names = re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", rest, re.MULTILINE)
            documented += [name if module == "shardwright" else f"{module}.{name}" for name in names]
    modules = ("amp", "model", "nn", "notebook", "optimizers")  # whose names have entries of their own
    public = [name for name in smp.__all__ if name not in (*modules, "__version__")]
    for folder in (smp.amp, smp.nn, smp.optimizers):
        listed = [name for name in folder.__all__ if not isinstance(getattr(folder, name), ModuleType)]
        public += [f"{folder.__name__}.{name}" for name in listed]
    assert set(public) <= set(documented)
    assert len(documented) == len(set(documented))


def test_links_to_files_that_are_no_pages_lead_to_pages_that_show_them(site: ModuleType, tmp_path: Path) -> None:
    layout = site.Layout(tmp_path / "source")
    layout.write()
    text = (tmp_path / "source" / "guide" / "clusters.md").read_text()
    assert "[train.slurm](/examples/clusters-train.slurm.md)" in text
    assert "[failures](/guide/failures.md)" in text
    shown = (tmp_path / "source" / "examples" / "clusters-train.slurm.md").read_text()
    assert (ROOT / "examples" / "clusters" / "train.slurm").read_text() in shown
    home = (tmp_path / "source" / "index.md").read_text()
    assert "(/guide/index.md)" in home
    for page in (ROOT / "docs").glob("**/*.md"):
        assert (tmp_path / "source" / layout.pages[str(page.relative_to(ROOT))]).exists()


def test_links_that_lead_nowhere_are_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="#here">x</a><a href="https://x.org/y">x</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="c.html">x</a><img src="picture.png">')
    assert site.broken_links(tmp_path) == ["a.html: #here", "b.html: c.html", "b.html: picture.png"]
