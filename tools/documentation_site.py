"""Builds the documentation's site from the pages in docs/, and checks every link within it.

usage: PYTHON_OF_THE_SITE tools/documentation_site.py OUTPUT

Pages stay where they are read in the repository. For Sphinx they are laid out in a folder of their own, in which links
to files that are no pages lead to pages that show those files. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
#: Pages that are not in docs/, and where the site has them.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benches/README.md": "benchmarks.md",
}
LANGUAGES = {".py": "python", ".rs": "rust", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".slurm": "bash"}
HOME = """
```{toctree}
:hidden:

guide/index
coming-from/index
api/index
design/index
measurements/index
zoo
benchmarks
examples/index
contributing
changelog
```
"""


class Layout:
    """The pages as Sphinx reads them."""

    def __init__(self, folder: Path) -> None:
        """Find the pages, which `write` lays out in ``folder``."""
        self.folder = folder
        #: Where the site has a page of the repository; both relative.
        self.pages = {name: target for name, target in ELSEWHERE.items() if (ROOT / name).exists()}
        for page in sorted((ROOT / "docs").glob("**/*.md")):
            inside = page.relative_to(SITE if page.is_relative_to(SITE) else ROOT / "docs")
            name = "index.md" if inside.name == "README.md" else inside.name
            self.pages[str(page.relative_to(ROOT))] = str(inside.with_name(name))
        #: Other files that pages link to.
        self.shown: dict[str, str] = {}

    def write(self) -> None:
        """Write all pages."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(ROOT / "docs" / "images", self.folder / "docs" / "images")
        for name, target in self.pages.items():
            text = self._with_links_of_the_site((ROOT / name).read_text(), name, target)
            if target == "index.md":
                text += HOME
            elif target.endswith("/index.md"):
                text += self._contents(name, target)
            self._put(target, text)
        entries = "\n".join(sorted(target.rpartition("/")[2].removesuffix(".md") for target in self.shown.values()))
        self._put(
            "examples/index.md", f"# Examples\n\nFiles that the pages refer to.\n\n```{{toctree}}\n{entries}\n```\n"
        )
        for name, target in self.shown.items():
            language = LANGUAGES.get(Path(name).suffix, "text")
            self._put(target, f"# {name}\n\n~~~~{language}\n{(ROOT / name).read_text()}~~~~\n")

    def _put(self, target: str, text: str) -> None:
        path = self.folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _contents(self, name: str, target: str) -> str:
        """The pages of a folder, in the order in which its index names them."""
        if "{toctree}" in (ROOT / name).read_text():
            return ""
        folder = str(Path(name).parent)
        named = [os.path.normpath(f"{folder}/{path}") for _, _, path, _ in LINK.findall((ROOT / name).read_text())]
        inside = dict.fromkeys(
            self.pages[page] for page in named if Path(page).parent == Path(folder) and page in self.pages
        )
        entries = "\n".join(Path(page).stem for page in inside if page != target)
        return f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"

    def _with_links_of_the_site(self, text: str, name: str, target: str) -> str:
        """The text of the page ``name``, whose links lead to where the site has what they mean."""

        def link(match: re.Match[str]) -> str:
            picture, label, path, anchor = match.groups()
            meant = os.path.normpath(ROOT / name / ".." / path)
            inside = os.path.relpath(meant, ROOT)
            if picture:
                return f"![{label}](/{inside})"
            if Path(meant).is_dir():
                inside = f"{inside}/README.md"
                if inside not in self.pages:
                    return label
            elif inside not in self.pages and Path(meant).is_file():
                self.shown[inside] = f"examples/{inside.removeprefix('examples/').replace('/', '-')}.md"
            there = self.pages.get(inside) or self.shown.get(inside)
            return f"[{label}](/{there or inside}{anchor or ''})"

        # Code stays as it is.
        parts = re.split(r"(^```.*?^```|`[^`\n]+`(?!\]))", text, flags=re.DOTALL | re.MULTILINE)
        return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


class Page(HTMLParser):
    """What a page of the site links to, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        """Read a page of HTML."""
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's links and its name."""
        given = dict(attrs)
        self.links += [link for name in ("href", "src") if (link := given.get(name))]
        self.anchors |= {name for key in ("id", "name") if (name := given.get(key))}


def broken_links(site: Path) -> list[str]:
    """Every link within the site that leads nowhere."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            meant = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            anchor = unquote(parts.fragment)
            if not meant.is_file() or (anchor and meant in pages and anchor not in pages[meant].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def main() -> int:
    """Build, check, and say what came of it."""
    output = Path(sys.argv[1]).resolve()
    source = output.with_name(f"{output.name}-source")
    Layout(source).write()
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "-d", f"{output}-trees"]
    built = subprocess.run([*command, "-c", str(SITE), str(source), str(output)], capture_output=True, text=True)
    print(built.stderr, end="", file=sys.stderr)
    warnings = len(re.findall(r"\b(?:WARNING|ERROR|CRITICAL):", built.stderr))
    broken = broken_links(output)
    print(*broken, sep="\n", file=sys.stderr, end="\n" if broken else "")
    print(json.dumps({"pages": len(list(output.rglob("*.html"))), "warnings": warnings, "broken_links": len(broken)}))
    return int(built.returncode != 0 or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
