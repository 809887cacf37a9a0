"""What lists say of methods: every registered one says enough, and the page of methods says the same."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from fitting import SMALL
from promptfed import Method, UserError, methods
from promptfed.methods.overview import REFERENCES, Overview, names_classes, overview, overviews
from promptfed.models import CLIP, build
from promptfed.tuning import Family

ROOT = Path(__file__).parents[2]
NAMES = (*methods.METHODS, *methods.ALIASES)


def test_every_method_is_listed_once_and_by_what_is_tuned() -> None:
    listed = overviews()
    assert sorted(one.name for one in listed) == sorted(NAMES)
    families = list(dict.fromkeys(one.family for one in listed))
    assert families == [family for family in (*Family, REFERENCES) if family in families]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_says_what_a_list_needs(name: str) -> None:
    """A new one: `paper`; `about` and `family` of a tuning of its own; `sends` and `keeps` if there is more than
    parameters."""
    method, said = methods.create(name), overview(name)
    assert all(said)
    assert said.family != Family.OTHER
    kind = type(method)
    checked = kind.unusable is not Method.unusable and name != "fedem"  # FedEM checks that what it sends is empty
    if kind.enroll is not Method.enroll or checked:
        assert kind.sends
    if kind.keep is not Method.keep or kind.secrets is not Method.secrets:
        assert kind.keeps


def test_what_travels_and_what_stays() -> None:
    def said(name: str) -> tuple[str, str]:
        one: Overview = overview(name)
        return one.travels, one.stays

    assert said("fedavg") == ("all weights", "nothing")
    assert said("local") == ("nothing", "all weights")
    assert said("fedper") == ("body", "head")
    assert said("fedbn") == ("all weights except norms", "norms")
    assert said("fedper+vpt") == ("prompt tokens, sums of features", "head")
    assert said("pfedpt") == ("all weights", "private pixel prompt")
    assert said("ditto+promptfl") == ("text context", "model of its own")
    assert said("promptfolio") == ("text context", "second text context")
    assert said("scaffold") == ("all weights", "its control variate")
    assert said("fedproto") == ("sums of features and counts of each class", "all weights")
    assert said("moon") == ("all weights", "body of its last round")
    assert said("fedpr") == ("prompts (+vpt, +vpt-d or +promptfl)", "nothing")


def test_a_published_composition_has_the_paper_of_its_tuning() -> None:
    assert overview("promptfl").paper == "Guo et al., 2022"
    assert overview("kgcoop").paper == "Yao et al., CVPR 2023"
    assert overview("pfedpt-tokens").paper == "Li et al., TMLR 2024, Table 6"


def test_which_methods_can_name_unseen_classes() -> None:
    """On a CLIP: those whose parameters have the same shapes whatever the classes."""
    model = build("clip-mini", (3, 32, 32), 2, 0, ("circle", "star"))
    assert isinstance(model, CLIP)
    other = replace(model, classes=3, names=("ring", "moon", "oval"))
    for name in NAMES:
        if methods.tunes(methods.create(name)).endswith("all weights") and not methods.METHODS.get(name, Method).needs:
            continue  # a CLIP has no head: it is as with other tunings
        method = methods.create(name, SMALL.get(name, {}))
        try:
            method.tuning.check(model)
            init = method.tuning.init(model, 0)
            method.check(model, init)
        except UserError:
            able = False
        else:
            shapes = ({key: p.shape for key, p in made.items()} for made in (init, method.tuning.init(other, 0)))
            able = next(shapes) == next(shapes)
        assert able == names_classes(method) or name == "fedpr", name  # which needs a plug-in


def test_readme_and_the_page_of_methods_have_their_tables() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "method_table.py"))
    for page in script["PAGES"]:
        assert page.read_text() == script["filled"](page), "run: python scripts/method_table.py"
