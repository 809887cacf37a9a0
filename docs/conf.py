"""Configuration of the documentation (`make docs`). Building and reading it downloads nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "promptfed"
author = "the promptfed authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "mathml", "plain_docstrings", "reference", "source_links"]
exclude_patterns = ["_ext", "README.md"]

html_theme = "furo"
html_title = "promptfed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "tango"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# The notebook is executed in every build, so that it stays in step with the code.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_render_markdown_format = "myst"

smartquotes = False  # would turn --out into a dash
default_role = "code"  # docstrings write `names` with one backtick
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
nitpick_ignore_regex = [("py:.*", r".*")]  # types in signatures: other inventories would be downloaded
