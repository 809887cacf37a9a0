"""Links from the text to lines of the code.

In plain Markdown, a link such as [`FedProx.loss`](../../src/promptfed/methods/fedprox.py) opens the file. On the site
it opens a page with the source, at the line that defines the name. A name that the file does not define is a warning,
which fails the build.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "promptfed"

logger = logging.getLogger(__name__)


@cache
def definitions(path: Path) -> dict[str, int]:
    """Lines of classes, functions and assigned names in a file, by qualified name."""
    return dict(_defined(ast.parse(path.read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield prefix + name, node.lineno
                if isinstance(node, ast.ClassDef):
                    yield from _defined(node.body, f"{prefix}{name}.")
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield prefix + name, node.lineno


class SourceLinks(SphinxTransform):
    default_priority = 200  # before downloads are collected, at doctree-read

    def apply(self, **kwargs: Any) -> None:
        docname = self.env.docname
        for link in list(self.document.findall(addnodes.download_reference)):
            _, absolute = self.env.relfn2path(link["reftarget"], docname)
            path = Path(absolute).resolve()
            if path.suffix != ".py" or not path.is_relative_to(PACKAGE):
                continue
            self.env.note_dependency(str(path))
            text = link.astext()
            line = definitions(path).get(text)
            if line is None and text != path.name:
                logger.warning('"%s" is not defined in %s', text, path.relative_to(ROOT), location=link)
            pages(self.env).add(page(path))
            uri = f"{'../' * docname.count('/')}{page(path)}.html" + (f"#L-{line}" if line else "")
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True, classes=["source"]))


def page(path: Path) -> str:
    return f"source/{path.relative_to(PACKAGE).with_suffix('').as_posix()}"


def pages(env: Any) -> set[str]:
    """Source pages that some page links to."""
    if not hasattr(env, "source_pages"):
        env.source_pages = set()
    found: set[str] = env.source_pages
    return found


def written(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in sorted(pages(app.env)):
        path = PACKAGE / f"{name.removeprefix('source/')}.py"
        title = path.relative_to(ROOT).as_posix()
        code = highlight(path.read_text(), PythonLexer(), HtmlFormatter(linenos="inline", linespans="L"))
        yield name, {"title": title, "body": f'<h1>{title}</h1><div class="source">{code}</div>'}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(SourceLinks)
    app.connect("html-collect-pages", written)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
