"""The reference of settings and commands as Markdown, generated from the models and functions that define them."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from docutils import nodes
from docutils.statemachine import StringList
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer import Typer
from typer.models import ArgumentInfo, OptionInfo

from promptfed import methods
from promptfed.analysis import ANALYSES
from promptfed.cli.listing import LISTS, markdown
from promptfed.cli.main import app as commands
from promptfed.data import PARTITIONS
from promptfed.method import Method
from promptfed.runs import config

Fields = Mapping[str, FieldInfo]

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "none"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HIDDEN = ("tuning", "inner")  # chosen by the method's name, not set


def in_words(annotation: Any) -> str:
    """A setting's type, for readers."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(in_words(part) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {in_words(parts[0])}s"
    if origin is tuple:
        return f"{len(parts)} {in_words(parts[0])}s"
    raise TypeError(f"the reference has no words for {annotation}")


def allowed(field: FieldInfo) -> str:
    """A setting's type and range."""
    bounds = [
        f"{sign}\N{NO-BREAK SPACE}{value}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if (value := getattr(item, name, None)) is not None
    ]
    return ", ".join([in_words(field.annotation), *bounds])


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "none" if value is None else f"`{json.dumps(value)}`"


def settings(fields: Fields) -> str:
    """A table of the settings."""
    rows = [
        (f"`{key}`", default(field), allowed(field), field.description or "")
        for key, field in fields.items()
        if key not in _HIDDEN
    ]
    return table(("setting", "default", "allowed", "what it does"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ---- the configuration


def configuration() -> str:
    top = {key: field for key, field in config.Config.model_fields.items() if key not in config.SECTIONS}
    parts = ["## Top level", settings(top)]
    own = {"method": all_methods, "partition": all_partitions}
    for name, section in config.SECTIONS.items():
        about = _about(section).removeprefix(f"The [{name}] section").lstrip(".: ")
        parts += [f"## `[{name}]`", about[:1].upper() + about[1:]]
        parts += [settings(section.model_fields), own[name]() if name in own else ""]
    return "\n\n".join(parts)


def all_methods() -> str:
    parts = ["### Every method", "Methods may override these defaults, as shown in their tables below."]
    parts.append(settings(Method.model_fields))
    for name in methods.METHODS:
        parts += [f"### `{name}`", method(name)]
    for plugin, (tuning, given) in methods.TUNINGS.items():
        parts += [f"### `+{plugin}`", _plugin(tuning, given)]
    for plugin, prompt in methods.PROMPTS.items():
        parts += [f"### `+{plugin}`", _plugin(prompt, {})]
    for plugin, given in methods.FINE_TUNED.items():
        parts += [f"### `+{plugin}`", ", ".join(f"`{key} = {value}`" for key, value in given.items()) + "."]
    rows = [(f"`{name}`", f"`{meaning}`") for name, meaning in methods.ALIASES.items()]
    return "\n\n".join([*parts, "### Published names of compositions", table(("name", "stands for"), rows)])


def method(name: str) -> str:
    """A method's description, and its settings that differ from those of all methods."""
    made = methods.create(name)
    own = special(name)
    paper = f" ({made.paper})" if made.paper else ""
    lines = [f"{_what(type(made))}{paper}", f"Tunes {methods.tunes(made)}. Backbones: {methods.backbones(made)}."]
    return "\n\n".join([*lines, settings(own) if own else "It has no settings of its own."])


def _what(kind: type[Method]) -> str:
    """The first paragraph of the docstring of the method's module, or of its class where a module holds several."""
    several = ("shared_body", "server_optimizers", "own_model")
    shared = kind.__module__ in (Method.__module__, *(f"promptfed.methods.{module}" for module in several))
    return _about(kind if shared else sys.modules[kind.__module__]).split("\n\n")[0]


def special(name: str) -> Fields:
    common = Method.model_fields
    return {
        key: field
        for key, field in methods.fields(name).items()
        if key not in common or (default(field), allowed(field)) != (default(common[key]), allowed(common[key]))
    }


def _plugin(kind: type[BaseModel], given: Mapping[str, Any]) -> str:
    fields = {
        key: FieldInfo.merge_field_infos(field, default=given[key]) if key in given else field
        for key, field in kind.model_fields.items()
        if key not in _HIDDEN
    }
    return "\n\n".join([_about(kind), settings(fields) if fields else "It has no settings."])


def all_partitions() -> str:
    parts = []
    for name, kind in PARTITIONS.items():
        parts += [f"### `{name}`", _about(kind), settings(kind.model_fields)]
    return "\n\n".join(parts)


def _about(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")


# ---- the command line


def command_line() -> str:
    return "\n\n".join(part for words, function in functions(commands, ()) for part in _command(words, function))


def functions(app: Typer, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words and the function of each command, including those of groups."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__.replace("_", "-")), command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from functions(group.typer_instance, (*before, str(group.name or group.typer_instance.info.name)))


def _command(words: tuple[str, ...], function: Any) -> tuple[str, ...]:
    hints = get_type_hints(function, include_extras=True)
    given = [
        (*get_args(hints[name])[:2], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    arguments = [info.metavar or "WHAT" for _, info, _ in given if isinstance(info, ArgumentInfo)]
    usage = " ".join(["promptfed", *words, "[OPTIONS]", *arguments])
    rows = [_row(kind, info, value) for kind, info, value in given]
    shown = table(("", "takes", "default", "what it does"), rows) if rows else ""
    return f"## `{' '.join(words)}`", _about(function), f"```text\n{usage}\n```", shown


def _row(kind: Any, info: ArgumentInfo | OptionInfo, value: Any) -> tuple[str, str, str, str]:
    repeated = get_origin(_given(kind)) is list
    takes = "" if kind is bool else _type_name(kind) + ", repeatable" * repeated
    if isinstance(info, OptionInfo):
        flags = (info.default, *(info.param_decls or ()))  # typer takes the first flag as the default
        name = ", ".join(f"`{flag}`" for flag in flags if str(flag).startswith("--"))
    else:
        name = " ".join(f"`{word}`" for word in re.findall(r"\[[^]]*\]\S*|\S+", info.metavar or "WHAT"))
    bounds = [
        f"{sign}\N{NO-BREAK SPACE}{edge}" for edge, sign in ((info.min, "≥"), (info.max, "≤")) if edge is not None
    ]
    shown = "" if value in (None, "", False) else f"`{value}`"
    if value is inspect.Parameter.empty:
        shown = "required"
    return name, ", ".join([takes, *bounds]).lstrip(", "), shown, info.help or ""


def _given(kind: Any) -> Any:
    """The type without None."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    return parts[0] if get_origin(kind) in (Union, UnionType) else kind


def _type_name(kind: Any) -> str:
    kind = _given(kind)
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    return {"Path": "path"}.get(kind.__name__) or _WORDS[kind]


# ---- lists


def protocol_list() -> str:
    return markdown(LISTS["protocols"]())


def analysis_list() -> str:
    return table(("name", "of a", "shows"), [(f"`{name}`", one.of, one.about) for name, one in ANALYSES.items()])


def preset_list() -> str:
    return table(("preset", "what it is"), [(f"`{row['name']}`", row["about"]) for row in LISTS["presets"]()])


# ---- in the pages


class Generated(SphinxDirective):
    """Markdown that is generated when the page is read."""

    has_content = False
    optional_arguments = 1
    makes: ClassVar[dict[str, Any]] = {
        "config-reference": configuration,
        "cli-reference": command_line,
        "protocol-list": protocol_list,
        "analysis-list": analysis_list,
        "preset-list": preset_list,
        "method-settings": lambda name: settings(special(name)),
    }

    def run(self) -> list[nodes.Node]:
        text = self.makes[self.name](*self.arguments)
        box = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), self.name), 0, box, match_titles=True)
        return list(box.children)


def setup(app: Sphinx) -> dict[str, bool]:
    for name in Generated.makes:
        app.add_directive(name, Generated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
