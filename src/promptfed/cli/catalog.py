"""What `promptfed list` shows."""

from collections.abc import Callable
from typing import Any

from .. import methods
from ..data import CATALOGUE, PARTITIONS
from ..models import BACKBONES
from ..runs import config

Rows = list[dict[str, Any]]
PLUG_INS = (
    f"After a method's name: {', '.join(f'+{name}' for name in methods.TUNINGS)}, tuned in place of all weights; "
    f"{', '.join(f'+{name}' for name in methods.PROMPTS)}, a private prompt around what is tuned; "
    "+ft, fine-tuning of the result. For example fedprox+pt, fedper+vpt, fedavg+ft."
)


def list_methods() -> Rows:
    rows = []
    for name in (*methods.METHODS, *methods.ALIASES):
        method = methods.create(name)
        private = [*method.private, *(["prompt"] if "private" in method.tuning.role_names() else [])]
        travels = [role for role in method.roles() if role not in method.private]
        rows.append(
            {
                "name": name,
                "paper": methods.PAPERS.get(name, method.paper),
                "tunes": methods.tunes(method),
                "travels": " + ".join(travels) or "nothing",
                "private": " + ".join(private) or "nothing",
                "backbones": methods.backbones(method),
                "settings": {
                    key: {"default": info.default, "description": info.description}
                    for key, info in methods.fields(name).items()
                },
            }
        )
    return rows


def list_datasets() -> Rows:
    return [
        {
            "name": name,
            "title": entry.title,
            "classes": entry.classes,
            "size": entry.size,
            "source": entry.hub or ("embedded" if not entry.manual else "fetched by hand"),
        }
        for name, entry in CATALOGUE.items()
    ]


def list_backbones() -> Rows:
    return [{"name": name, "about": about} for name, (_, about) in BACKBONES.items()]


def list_partitions() -> Rows:
    return [
        {
            "name": name,
            "about": " ".join((kind.__doc__ or "").split()),
            "settings": {
                key: {"default": info.default, "description": info.description}
                for key, info in kind.model_fields.items()
            },
        }
        for name, kind in PARTITIONS.items()
    ]


def list_presets() -> Rows:
    return [{"name": name, "about": config.preset_about(name)} for name in config.presets()]


LISTS: dict[str, Callable[[], Rows]] = {
    "methods": list_methods,
    "datasets": list_datasets,
    "backbones": list_backbones,
    "partitions": list_partitions,
    "presets": list_presets,
}
