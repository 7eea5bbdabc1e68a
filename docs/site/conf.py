"""What Sphinx needs to know to make the site: see `tools/documentation_site.py`, which lays out the pages."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The package and what it imports, such as torch, come from the project's own environment, after Sphinx's.
sys.path += [str(ROOT / "python"), *map(str, ROOT.glob(".venv/lib/python*/site-packages"))]

import shardwright  # noqa: E402

project = "Shardwright"
copyright = "the authors of Shardwright"
release = shardwright.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
# Values such as "auto" are to be copied.
smartquotes = False
autodoc_typehints = "signature"
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_mock_imports = ["ray"]  # which has an environment of its own
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Shardwright {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
