"""Settings of Sphinx, which `make docs` runs.

The source folder is the repository's, not `docs/`, so that the links of a page lead to the README, notebooks, figures
and results on the site as they do on the repository page.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from zaya_jax import __version__  # noqa: E402

project = "zaya_jax"
author = "The zaya_jax authors"
copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docs._ext.generated",
]
root_doc = "docs/index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "notebooks/README.md",
                    "notebooks/*.ipynb"]  # fmt: skip
exclude_patterns = [".*", "build", "data", "runs", "tests", "zaya_jax", "pallas_kernels", "benchmarks", "configs"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries, whose sites are not read

myst_heading_anchors = 4  # links to headings, named as on the repository page
nb_execution_mode = "off"  # notebooks hold their outputs; tests run them

default_role = "code"
smartquotes = False  # --flags stay as they are
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"zaya_jax {version}"
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = "$ "
