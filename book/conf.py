"""Settings of the site: `make book` builds it from the notebooks, which have already run."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
import reference

# sphinx_external_toc looks at every object in memory, also at those of torch that are deprecated.
warnings.filterwarnings("ignore", category=FutureWarning, module="sphinx_external_toc")

project = "rlbook"
html_title = "rlbook"

extensions = [
    "chapters",
    "myst_nb",
    "sphinx_book_theme",
    "sphinx_copybutton",
    "sphinx_external_toc",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
]

# The source directory is the root of the repository, because _toc.yml says book/NAME.
include_patterns = ["book/*.ipynb", "reference/**.md"]
exclude_patterns = [".*", "_build", "bench", "rlbook*", "runs", "tests"]  # not even looked at
# The chapters of _toc.yml, and behind them the pages that are made from the library.
external_toc_path = str(reference.write_pages())
use_multitoc_numbering = False

nb_execution_mode = "off"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables and links to chapters in outputs
# No script from another host: the site works on a machine without a network.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_theme_options = {
    "show_toc_level": 2,
    "max_navbar_depth": 2,  # no page lies deeper
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "footer_content_items": [],
}
html_copy_source = True
html_show_search_summary = False  # a browser does not let a page from the disk read others
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# A docstring writes code between single backquotes, as a chapter does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
maximum_signature_line_length = 88
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
