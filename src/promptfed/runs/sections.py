"""The sections of a configuration, each with its settings and its own checks."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .. import methods
from ..data import PARTITIONS, Partition
from ..errors import UserError, nearest, one_sentence, unknown
from ..method import Method
from ..precision import Precision

Table = dict[str, Any]
DEFAULT_METHOD = "pfedpt"
FILE = "file"  # partition.name of a split that is read, not drawn


def separated(value: Any) -> Any:
    """ "a, b" -> ["a", "b"]; everything else as it is"""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def counted(setting: str, value: Any, what: str) -> Any:
    """The value, if it is a positive number of something or `auto`."""
    if value == "auto" or (str(value).isdecimal() and int(value) > 0):
        return value
    raise UserError(f"{setting} = {value} must be a positive number of {what}, or auto")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Backbone(Section):
    """The [backbone] section."""

    name: str = Field(
        "cnn",
        description="a name of `promptfed list backbones`, a hub id, or a path; methods that need a transformer or a "
        "CLIP have vit-mini or clip-mini as default, and dataset.name shapes",
    )
    part: Literal["whole", "image"] = Field("whole", description="of a CLIP: all of it, or its image tower with a head")


class Evaluation(Section):
    """The [eval] section."""

    every: int | Literal["auto"] = Field(
        "auto",
        description="evaluate all clients every so many rounds, and after the last round; auto: so rarely that "
        "evaluation takes no more than about a fifth of the time, by samples passed, but ten times at least",
    )
    after_local: Literal["none", "participants", "all"] = Field(
        "participants",
        description="also score locally trained models: of no client, of clients that trained in an evaluated round, "
        "or (at the end, by a further round of local training that is thrown away) of all clients",
    )
    pooled: Literal["every", "last", "never"] = Field(
        "every",
        description="when personal models are scored on all clients' test data (costs clients x test set): at every "
        "evaluation, at the last one, or never (then there is no global accuracy)",
    )
    drift: bool = Field(
        False,
        description="record how far each client's parameters move in a round, by role (L2); norms of private ones too, "
        "which clients then tell the server",
    )
    novel: float | tuple[str, ...] = Field(
        (),
        description="classes that nobody trains on, and that the trained models are tested on too (base-to-novel): "
        "their names, or a share of all classes, the last ones",
    )
    datasets: tuple[str, ...] = Field(
        (), description="other datasets that the trained models are tested on, each by its own class names"
    )
    limit: int | None = Field(
        None, ge=1, description="test on a stratified subset of this many images of each of eval.datasets; none: on all"
    )
    leave_out: str = Field(
        "",
        description="with partition.name domain: a domain whose clients do not train, and are tested on all their "
        "images; in a comparison also `each`, one column per domain",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        return counted("eval.every", value, "rounds")

    @field_validator("novel", "datasets", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """The command line may give names separated by commas."""
        return separated(value)

    @field_validator("novel")
    @classmethod
    def _share_or_names(cls, novel: Any) -> Any:
        if isinstance(novel, tuple) or 0 < novel < 1:
            return novel
        raise UserError(f"eval.novel = {novel} must be a share between 0 and 1, or names of classes")


class Join(Section):
    """The [join] section: clients that are not there from the start. Results report them apart."""

    clients: int | tuple[int, ...] = Field((), description="who comes later: client numbers, or how many of the last")
    round: int = Field(0, ge=0, description="the first round they may train in; 0: they never train, only are served")

    def newcomers(self, count: int) -> tuple[int, ...]:
        """Their numbers, of so many clients."""
        few = isinstance(self.clients, int) and self.clients < 0
        late = tuple(range(count - self.clients, count)) if isinstance(self.clients, int) else self.clients
        if few or len(set(late)) < len(late) or not all(0 <= client < count for client in late) or len(late) >= count:
            raise UserError(
                f"join.clients = {self.clients} must be different clients out of 0 to {count - 1}, and not all of them"
            )
        return tuple(sorted(late))


class Engine(Section):
    """The [engine] section: where and how fast, never what."""

    name: Literal["local", "flower"] = Field("local", description="where the clients run")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    precision: Precision = Field(
        "fp32", description="of matrix products in passes through the model; what is trained stays in fp32"
    )
    workers: int = Field(0, ge=0, description="processes; 0: one per core on a CPU, one on an accelerator")
    block: int | Literal["auto"] = Field(
        1,
        description="clients trained as one stacked computation (for accelerators); auto: on an accelerator as many as "
        "its free memory holds, on a CPU one",
    )
    frozen_gb: float = Field(8.0, ge=0, description="disk space in GB for cached outputs of frozen layers")
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...] = Field(
        (), description="experiment trackers to write to"
    )
    threads: int = Field(1, ge=0, description="threads of each process on a CPU; 0: torch's default")
    deadline: float = Field(3600.0, gt=0, description="between sites: seconds an answer may take; a later one is lost")
    patience: float = Field(
        600.0, ge=0, description="between sites: seconds to wait for all; then only a resumed run goes on, without them"
    )

    @field_validator("block", mode="before")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        return counted("engine.block", value, "clients")

    @field_validator("trackers", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        """The command line may give them separated by commas."""
        return separated(value)


class Consortium(Section):
    """The [consortium] section: sites that hold their images themselves, and what they have agreed on."""

    clients: int = Field(ge=1, description="how many sites there are; they are clients 0, 1, ...")
    classes: tuple[str, ...] = Field(min_length=2, description="what is told apart; a site need not have all of them")
    address: str = Field("127.0.0.1:9092", description="where the sites find the server: host:port")
    answer_mb: int = Field(
        2047, ge=1, le=2047, description="MB that a site may send at once; promptfed flower init computes it"
    )
    key: str = Field("", description="public key of the server's requests, written by promptfed flower certs")

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not re.fullmatch(r"[^\s:/]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f'consortium.address (--address) = "{address}" must be host:port, with a port up to 65535')
        return address

    @field_validator("classes")
    @classmethod
    def _different(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(classes)) < len(classes):
            raise UserError("consortium.classes names one class twice")
        return classes


class MethodSection(BaseModel):
    """The [method] section: a name, and the settings of that method."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(DEFAULT_METHOD, description="a method's name with plug-ins: `promptfed list methods`")

    @property
    def method(self) -> Method:
        return methods.create(self.name, self.model_extra or {})

    @model_validator(mode="after")
    def _valid(self) -> MethodSection:
        assert self.method
        return self

    def complete(self) -> Table:
        return {"name": self.name, **methods.settings(self.method)}


class PartitionSection(BaseModel):
    """The [partition] section: a kind of split and its settings, or a file that holds one."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field("dirichlet", description="a kind of split: `promptfed list partitions`")
    seed: int | None = Field(None, ge=0, description="none: the run's seed")
    file: str | None = Field(None, description="a partition.json to use in place of drawing one")

    @property
    def partition(self) -> Partition:
        if self.name not in PARTITIONS:
            raise unknown("partition.name", self.name, PARTITIONS)
        kind = PARTITIONS[self.name]
        for key in self.model_extra or {}:
            if key not in kind.model_fields:
                allowed = sorted([*kind.model_fields, "seed", "file"])
                raise UserError(
                    f'partition.{key} is not a setting of "{self.name}"{nearest(key, allowed)} '
                    f"(allowed: {', '.join(allowed)})"
                )
        try:
            return kind(**(self.model_extra or {}))
        except ValidationError as error:
            raise one_sentence(error, "partition") from None

    @model_validator(mode="after")
    def _valid(self) -> PartitionSection:
        if self.name != FILE:
            assert self.partition
        elif self.file is None:
            raise UserError(f'partition.name = "{FILE}" needs partition.file, a saved split')
        elif self.model_extra:
            raise UserError(f"partition.{next(iter(self.model_extra))} cannot be set of a saved split, partition.file")
        return self

    def complete(self) -> Table:
        if self.file:  # nothing else says how it was made
            return {"name": FILE, "seed": self.seed, "file": self.file}
        return {"name": self.name, "seed": self.seed, "file": None, **self.partition.model_dump(mode="json")}
