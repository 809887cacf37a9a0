"""Methods by name: a base, and plug-ins after `+` that replace or wrap its tuning, or fine-tune its result."""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import PydanticUserError, ValidationError
from pydantic.fields import FieldInfo

from ..errors import UserError, nearest, one_sentence, unknown
from ..method import Method
from ..tuning import Full, PrivatePrompt, Tuning, Wrapper
from .catalogue import ALIASES, FINE_TUNED, METHODS, PROMPTS, TUNINGS
from .dp2fl import Dp2fl
from .dp2fl.sealed import SealedDp2fl

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Recipe(NamedTuple):
    """What a name stands for."""

    kind: type[Method]
    tuning: type[Tuning]
    wrappers: list[type[Wrapper]]  # from the inside out
    settings: dict[str, Any]


def parse(name: str) -> Recipe:
    """ "fedprox+pt+ft" -> FedProx of Full within a PixelPrompt, with {"finetune_epochs": 5}"""
    head, *plugins = name.split("+")
    base, *own = ALIASES.get(head, head).split("+")
    kind = _import(base) if ":" in base else METHODS.get(base)
    if kind is None:
        raise unknown("method.name", base, [*METHODS, *ALIASES])
    tunings: list[type[Tuning]] = []
    prompts: list[type[PrivatePrompt]] = []
    settings: dict[str, Any] = {}
    for plugin in own + plugins:
        if plugin in TUNINGS:
            tuning, given = TUNINGS[plugin]
            tunings.append(tuning)
            settings.update({key: value for key, value in given.items() if not _declares(kind, key)})
        elif plugin in PROMPTS:
            prompts.append(PROMPTS[plugin])
        elif plugin in FINE_TUNED:
            settings.update(FINE_TUNED[plugin])
        else:
            raise unknown(f'method.name = "{name}": plug-in', plugin, [*TUNINGS, *PROMPTS, *FINE_TUNED])
    for count, known in ((len(tunings), TUNINGS), (len(prompts), PROMPTS)):
        if count > 1:
            raise UserError(f'method.name = "{name}": at most one of {", ".join(f"+{p}" for p in known)} may be given')
    fixed = kind.model_fields["tuning"].annotation is not Tuning  # cannot be wrapped either
    if (tunings and kind.tuned is not Method.tuned) or (prompts and fixed):
        raise UserError(f'method.name = "{name}": {base} has a tuning of its own, and takes no other')
    wrappers = [*prompts, *([kind.wrapper] if kind.wrapper else [])]
    return Recipe(kind, tunings[0] if tunings else kind.tuned, wrappers, settings)


def reference(name: str) -> type[Method] | None:
    """The method of a name, if it is there to measure others by."""
    head = name.split("+")[0]
    kind = METHODS.get(ALIASES.get(head, head).split("+")[0])
    return kind if kind and kind.reference else None


def pooled(others: Iterable[str]) -> str:
    """The centralised row of a comparison with these methods: it tunes what the first of them does that names a tuning
    which others can have, or all weights."""
    for name in others:
        plugins = "+".join([ALIASES.get(part, part) for part in name.split("+")]).split("+")[1:]
        for plugin in plugins:
            if plugin in TUNINGS:
                return f"centralised+{plugin}"
    return "centralised"


def _declares(kind: type[Method], setting: str) -> bool:
    """Whether a method has a default of its own for a setting of every method."""
    return any(setting in vars(each).get("__annotations__", {}) for each in kind.__mro__[: kind.__mro__.index(Method)])


def _import(name: str) -> type[Method]:
    """ "my_module:MyMethod" -> the class"""
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except PydanticUserError as error:  # a class of the module is made otherwise than settings are
        what = error.message.split(". ")[0]
        raise UserError(
            f'method.name = "{name}" cannot be imported: {what} (a setting has its type with it: beta: float = 0.3)'
        ) from None
    except Exception as error:  # whatever the user's module raises
        raise UserError(f'method.name = "{name}" cannot be imported: {type(error).__name__}: {error}') from None
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f'method.name = "{name}" is not a class derived from promptfed.Method')
    _check_hooks(name, kind)
    return kind


def _check_hooks(name: str, kind: type[Method]) -> None:
    """Refuses a hook that is overridden with other arguments: calling it would fail in the middle of a run."""
    for hook, function in inspect.getmembers(Method, inspect.isfunction):
        if not callable(overridden := getattr(kind, hook)) or overridden is function:
            continue
        own = inspect.signature(overridden)
        given = [one.name for one in inspect.signature(function).parameters.values() if one.kind in _POSITIONAL]
        try:
            own.bind(*given)
        except TypeError:
            has = ", ".join(own.parameters)
            raise UserError(
                f'method.name = "{name}": {hook}({has}) must take the arguments {hook}({", ".join(given)})'
            ) from None


def fields(name: str) -> dict[str, FieldInfo]:
    """The settings of a method or composition: its own and its tuning's, in one flat namespace."""
    recipe = parse(name)
    kinds = (recipe.kind, recipe.tuning, *recipe.wrappers)
    found = {key: info for kind in kinds for key, info in kind.model_fields.items()}
    for key, value in recipe.settings.items():
        found[key] = FieldInfo.merge_field_infos(found[key], default=value)
    return {key: info for key, info in found.items() if key not in ("tuning", "inner")}


def create(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    recipe = parse(name)
    given = {**recipe.settings, **(settings or {})}
    allowed = fields(name)
    for key in given:
        if key not in allowed:
            known = ", ".join(sorted(allowed))
            raise UserError(f'method.{key} is not a setting of "{name}"{nearest(key, allowed)} (allowed: {known})')

    def of(kind: type[Tuning]) -> dict[str, Any]:
        return {key: given.pop(key) for key in list(given) if key in kind.model_fields}

    try:
        tuning = recipe.tuning(**of(recipe.tuning))
        for kind in recipe.wrappers:
            tuning = kind(inner=tuning, **of(kind))
        sealed = recipe.kind is Dp2fl and given.get("privacy") == "sealed"
        return (SealedDp2fl if sealed else recipe.kind)(tuning=tuning, **given)
    except ValidationError as error:
        raise one_sentence(error, "method") from None


def settings(method: Method) -> dict[str, Any]:
    """The complete flat settings of a method, such that create(name, settings(method)) makes it again."""
    found = method.model_dump(exclude={"tuning"})
    for layer in layers(method.tuning):
        found |= layer.model_dump(exclude={"inner"})
    return found


def layers(tuning: Tuning) -> list[Tuning]:
    """The wrappers around a tuning from the outside in, and at last what they are around."""
    found = [tuning]
    while isinstance(tuning, Wrapper):
        tuning = tuning.inner
        found.append(tuning)
    return found


def backbones(method: Method) -> str:
    """The backbones it runs on, in words."""
    needed = {layer.backbones for layer in layers(method.tuning)} | (
        {"transformers"} if lacks_prompts(method) else set()
    )
    return next(kind for kind in ("CLIP with a ViT", "CLIP", "transformers", "any") if kind in needed)


def tunes(method: Method) -> str:
    """What is trained, in words; of a method that cannot do with all weights what it needs."""
    if lacks_prompts(method):
        return method.takes
    return " + ".join(layer.about for layer in layers(method.tuning))


def why_not_cached(tuning: Tuning) -> str:
    """Why nothing is cached, if frozen_name() is empty."""
    return next(layer.uncached for layer in layers(tuning) if layer.uncached)


def lacks_prompts(method: Method) -> bool:
    """Whether its tuning has none, though the method is for prompts only."""
    return bool(method.takes) and type(layers(method.tuning)[-1]) is Full


__all__ = [
    "ALIASES",
    "FINE_TUNED",
    "METHODS",
    "PROMPTS",
    "TUNINGS",
    "Recipe",
    "backbones",
    "create",
    "fields",
    "lacks_prompts",
    "layers",
    "parse",
    "pooled",
    "reference",
    "settings",
    "tunes",
    "why_not_cached",
]
