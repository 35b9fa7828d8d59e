"""Sphinx configuration of the site that ``make docs`` builds: the pages of docs/, README and the notebooks."""

project = "Diptych"
author = "The Diptych developers"
copyright = "the Diptych developers"

extensions = ["myst_nb", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may start a section at any level, as GitHub allows
nb_execution_mode = "off"  # the notebooks are committed with their outputs

root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "notebooks/*.ipynb"]

html_theme = "furo"
html_title = "Diptych"
html_copy_source = False
html_show_sphinx = False

_TABLES_OF_CONTENTS = {
    "Introduction": ["docs/concepts", "docs/using", "docs/models", "docs/find", "docs/hardware"],
    "Comparison": ["docs/comparison", "docs/pairs"],
    "Techniques": [
        "docs/everywhere",
        "docs/hyper_connections",
        "docs/recompute",
        "docs/offload",
        "docs/pipeline",
        "docs/linear_attention",
        "docs/context_parallel",
        "docs/tensor_parallel",
        "docs/distributed_optimizer",
        "docs/fp8",
        "docs/activation_storage",
        "docs/kernels",
        "docs/planner",
    ],
    "The whole system": ["docs/architecture", "docs/composition", "docs/fault_injection", "docs/extending", "docs/api"],
    "Notebooks": ["notebooks/*"],
    "Records": ["docs/README", "docs/directions", "docs/history/*", "CONTRIBUTING", "CHANGELOG"],
}


def _add_tables_of_contents(app, page: str, source: list[str]) -> None:
    """Append the tables of contents of the sidebar to the first page, which GitHub shows without them."""
    if page != root_doc:
        return
    for caption, pages in _TABLES_OF_CONTENTS.items():
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *pages, "```\n"])


def setup(app) -> None:
    """Register the hook that Sphinx calls for each page it reads."""
    app.connect("source-read", _add_tables_of_contents)
