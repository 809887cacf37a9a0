"""What lists say of a method. Nothing is written down for it: classes, roles and tunings know it."""

from collections.abc import Callable
from typing import NamedTuple

from ..method import Method
from ..tuning import FROZEN, GIVEN, Family, Transparent, Tuning, Wrapper
from . import ALIASES, METHODS, backbones, create, lacks_prompts, layers, tunes

REFERENCES = "reference baselines"


class Overview(NamedTuple):
    name: str
    family: str  # what is tuned, by which lists are grouped
    tunes: str
    travels: str
    stays: str
    backbones: str
    paper: str


def overviews() -> list[Overview]:
    """Of every registered name, grouped by what is tuned."""
    order = [*Family, REFERENCES]
    return sorted(map(overview, (*METHODS, *ALIASES)), key=lambda one: order.index(one.family))


def overview(name: str) -> Overview:
    method = create(name)
    stays = _words(method, method.stays_role)
    remembered = [f"{words} of its last round" for words in _words(method, method.remembers_role)]
    travels = _words(method, lambda role: not method.stays_role(role))
    travels = [tunes(method)] if lacks_prompts(method) else travels
    sums = ["sums of features"] if method.tuning.collects else []
    return Overview(
        name,
        REFERENCES if method.reference else family(method),
        tunes(method),
        _listed([*travels, method.sends, *sums]),
        _listed([*stays, method.keeps, *remembered]),
        backbones(method),
        paper(name),
    )


def family(method: Method) -> str:
    if lacks_prompts(method):
        return Family.TOKENS
    return next(layer.family for layer in layers(method.tuning) if layer.family)


def paper(name: str) -> str:
    """A method's, or of a published composition that of its tuning."""
    method = create(name)
    tuned = [layer.paper for layer in layers(method.tuning) if layer.paper] if name in ALIASES else []
    return next(iter(tuned), method.paper)


def names_classes(method: Method) -> bool:
    """Whether on a CLIP it can name classes that it was not trained on: it has no values for each class."""
    return "head" not in method.needs and not any(layer.per_class for layer in layers(method.tuning))


def _words(method: Method, chosen: Callable[[str], bool]) -> list[str]:
    """The parameters of some roles: of a layer all of whose roles are chosen, what it is about."""
    found = []
    for layer in layers(method.tuning):
        roles = _own_roles(layer)
        mine = [role for role in roles if chosen(role)]
        whole = [layer.about + _except(method, chosen)] if not isinstance(layer, Transparent) else [layer.about]
        found += whole if mine and mine == roles else [layer.role_words.get(role, role) for role in mine]
    return found


def _except(method: Method, chosen: Callable[[str], bool]) -> str:
    """What a wrapper that only gives roles takes out of the tuning that it is around."""
    apart = [layer for layer in layers(method.tuning) if isinstance(layer, Transparent) and not layer.roles]
    taken = [layer.about for layer in apart if not any(chosen(role) for role in _own_roles(layer))]
    return f" except {' and '.join(taken)}" if taken else ""


def _own_roles(layer: Tuning) -> list[str]:
    """Without those that are never trained, and those of what it is around."""
    inner = layer.inner.role_names() if isinstance(layer, Wrapper) else ()
    return [role for role in layer.role_names() if role not in (GIVEN, FROZEN, *inner)]


def _listed(words: list[str]) -> str:
    return ", ".join(filter(None, words)) or "nothing"
