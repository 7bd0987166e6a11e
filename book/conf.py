"""Settings of the site: `make book` builds it from the notebooks, which have already run."""

project = "rlbook"
html_title = "rlbook"

extensions = [
    "myst_nb",
    "sphinx_book_theme",
    "sphinx_copybutton",
    "sphinx_external_toc",
    "sphinx-mathjax-offline",
]

# The source directory is the root of the repository, because _toc.yml says book/NAME.
include_patterns = ["book/*.ipynb"]
external_toc_path = "_toc.yml"
use_multitoc_numbering = False

nb_execution_mode = "off"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_merge_streams = True
# No script from another host: the site works on a machine without a network.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "footer_content_items": [],
}
html_copy_source = True
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
