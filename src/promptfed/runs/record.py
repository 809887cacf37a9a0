"""A run's folder: what happened, and all that is needed to go on or to repeat it.

config.toml             the complete configuration
partition.json          who holds which samples
rounds.jsonl            one line per round
asked.jsonl             where there is privacy: who was asked to train, in rounds that were not completed too
checkpoint.safetensors  the server's state after the last completed round, with what config, split and rounds were then
checkpoint.previous.safetensors   that of the round before it, should the last one be damaged
clients/                what the clients remember
result.json             the numbers, once the run is done
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError

from .. import files, scoring
from .. import params as P
from ..clients.base import Notice
from ..clients.store import DATA, Store
from ..clients.wire import pack, unpack
from ..errors import UserError
from ..method import State
from ..server import Line, Recorder
from . import config as C

# As received from the server; after local training, of a round's participants; the same of everyone, at the end; the
# one global model of a personal method. Each also for newcomers alone, who are in none of the others.
_STAGES = ("aggregated", "after_local", "after_local_all", "common")
STAGES = (*_STAGES, *(f"newcomers_{stage}" for stage in _STAGES))
LAST = 10  # rounds that are averaged in `mean_of_last_10`


LAST_STATE, PREVIOUS_STATE = "checkpoint.safetensors", "checkpoint.previous.safetensors"
_PRECISION = "engine.precision"
ADJUSTABLE = ("rounds", "engine")  # settings that may change when a run is resumed, but for engine.precision


def decisive(complete: Mapping[str, Any]) -> dict[str, Any]:
    """Of all settings those that decide a result: of the engine only its precision."""
    return {**complete, "engine": {"precision": complete["engine"]["precision"]}}


class Busy(UserError):
    """Another process is at work in the folder."""


class View(Protocol):
    """Somebody who watches."""

    def begin(self, round: int, clients: Sequence[int]) -> None: ...

    def on_notice(self, notice: Notice) -> None:
        """Of a client that is asked or answers. May come from any thread."""
        return

    def end(self, line: Line) -> None: ...


class Folder(Recorder):
    """The recorder of a run. A round is completed by the checkpoint: it is replaced in one step, after everything else
    of the round is on disk, so a kill at any moment costs at most the round that was under way."""

    def __init__(self, path: Path, views: Sequence[View] = (), ledger: bool = False) -> None:
        self.path, self._views, self._ledger = path, views, ledger
        self._took: dict[int, dict[str, Any]] = {}  # of this round's clients
        self._not_scored: dict[int, str] = {}  # clients that could not be evaluated in this round, and why
        self._chain = ""  # the digest of all lines
        self._verified: Checkpoint | None = None
        self._open = ExitStack()  # holds the lock
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(files.lock(path / ".lock", seconds=0.2))  # at_work() holds it for an instant
        except files.Locked:
            raise Busy(f'--out = "{path}" is in use by another run') from None
        except OSError as error:
            raise UserError(f'--out = "{path}" cannot be written: {error.strerror}') from None

    def restore(self) -> tuple[int, State] | None:
        found = self.verify()
        if found:
            self._check_fixed(found)  # a split that was missing is drawn again by now
        self._verified = None
        done = found.round if found else 0
        # A line after the checkpoint belongs to a round that was not completed: it will be written again.
        kept = [line for line in self.lines() if line["round"] <= done]
        self._chain = chained(kept)
        files.write(self.path / "rounds.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        return (found.round, found.state) if found else None

    def verify(self) -> Checkpoint | None:
        """What the run goes on from. Refuses files that are not as they were at that round. Before clients are there,
        as it may have to look at what they remember."""
        if self._verified:
            return self._verified
        found, lines = read_checkpoint(self.path), self.lines()
        if found is None:
            if len(lines) > 1:  # one is of a round that was interrupted just before its checkpoint
                raise UserError(
                    f'"{self.path / LAST_STATE}" is missing, though "{self.path / "rounds.jsonl"}" has {len(lines)} '
                    "rounds: put it back from a copy, or begin anew with another --out"
                )
            return None
        if not found.last and Store.newest(self.path / "clients") > found.round + 1:
            raise UserError(
                f'"{self.path / LAST_STATE}" is damaged, and clients have gone on since '
                f'"{self.path / PREVIOUS_STATE}": put it back from a copy, or begin anew with another --out'
            )
        self._check_lines(found, lines)
        self._check_fixed(found)
        self._verified = found
        return found

    def _check_lines(self, found: Checkpoint, lines: Sequence[Line]) -> None:
        file, kept = self.path / "rounds.jsonl", [line for line in lines if line["round"] <= found.round]
        if found.note.get("lines") in (None, chained(kept)):
            return
        known = [line["round"] for line in kept]
        what = "was changed" if known and known[-1] == found.round else "is damaged"
        raise UserError(
            f'"{file}" {what} since round {found.round} ({len(known)} of {found.round} rounds can be read): put it '
            "back from a copy to resume; predict and export work without it"
        )

    def _check_fixed(self, found: Checkpoint) -> None:
        then, now = found.note.get("fixed"), self._fixed()
        if then is None:  # written before checkpoints recorded it
            return
        before = {_PRECISION: "fp32", **then["config"]}  # it may have been written before there was another
        if before != now["config"]:
            raise UserError(
                f'"{self.path / "config.toml"}" was changed since round {found.round}: '
                f"{difference(before, now['config'])}; change it back, or begin anew with another --out"
            )
        if now["partition"] not in (None, then["partition"]):
            raise UserError(
                f'"{self.path / "partition.json"}" was changed or damaged since round {found.round}: put it back '
                "from a copy, or delete it if the split was drawn from a seed, then resume"
            )
        if then["clients"] and not now["clients"]:
            raise UserError(
                f'"{self.path / "clients" / DATA}" is missing or empty, and with it what clients have kept to '
                "themselves: put it back from a copy, or begin anew with another --out"
            )

    def _fixed(self) -> dict[str, Any]:
        """What does not change while a run goes on, as it is now."""
        config, split = self.path / "config.toml", self.path / "partition.json"
        kept = self.path / "clients" / DATA
        settings = C.read(config) if config.exists() else {}
        precision = {_PRECISION: settings.get("engine", {}).get("precision", "fp32")}
        return {
            "config": {**{k: v for k, v in settings.items() if k not in ADJUSTABLE}, **precision},
            "partition": sha256(split.read_bytes()).hexdigest() if split.exists() else None,
            "clients": kept.exists() and kept.stat().st_size > 0,
        }

    def begin(self, round: int, clients: Sequence[int]) -> None:
        self._took, self._not_scored = {}, {}
        if self._ledger:
            # The line break comes first: a line that was cut off before stays on its own.
            files.append(self.path / "asked.jsonl", "\n" + json.dumps({"round": round, "clients": list(clients)}))
        for view in self._views:
            view.begin(round, clients)

    def on_notice(self, notice: Notice) -> None:
        if notice.ask == "train" and notice.seconds is not None:
            took = {"client": notice.client, "seconds": round(notice.seconds, 4), "samples": notice.samples}
            self._took[notice.client] = took
        if notice.ask == "evaluate" and notice.error:
            self._not_scored.setdefault(notice.client, notice.error)
        for view in self._views:
            view.on_notice(notice)

    def end(self, line: Line, state: State) -> None:
        if self._took:
            took = [self._took[client] for client in sorted(self._took)]
            line = {**line, "seconds": {**line["seconds"], "clients": took}}
        if self._not_scored:
            line = {**line, "not_scored": [{"client": c, "why": why} for c, why in sorted(self._not_scored.items())]}
        files.append(self.path / "rounds.jsonl", json.dumps(line, allow_nan=False) + "\n")
        self._chain = chained([line], self._chain)
        note = {"round": line["round"], "state": P.digest(state), "lines": self._chain, "fixed": self._fixed()}
        self._keep_previous()
        files.write(self.path / LAST_STATE, pack(state, note))
        for view in self._views:
            view.end(line)

    def _keep_previous(self) -> None:
        """By a second name of the last checkpoint, which thus is there at any moment."""
        last, part = self.path / LAST_STATE, self.path / f".{PREVIOUS_STATE}"
        if last.exists():
            part.unlink(missing_ok=True)
            part.hardlink_to(last)
            part.replace(self.path / PREVIOUS_STATE)

    def lines(self) -> list[Line]:
        return read_lines(self.path)

    def recorded(self) -> list[Line]:
        return self.lines()

    def asked(self) -> list[tuple[int, list[int]]]:
        """Every time clients were asked to train: the round, and who."""
        file, found = self.path / "asked.jsonl", []
        for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
            with suppress(json.JSONDecodeError, KeyError, TypeError):  # it was cut off, so nobody had been asked yet
                line = json.loads(text)
                found.append((line["round"], line["clients"]))
        for line in self.lines():
            if (line["round"], line["clients"]) not in found:
                raise UserError(
                    f'"{file}" is damaged: it does not tell who was asked in round {line["round"]}, so no '
                    "epsilon can be stated; put it back from a copy and resume"
                )
        return found

    def close(self) -> None:
        """Releases the folder; removes it if the run did not start."""
        if not (self.path / "config.toml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()
        self._open.close()


def visible(path: Path) -> list[str]:
    """What a folder holds, but for locks and files that were never finished."""
    return sorted(file.name for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else []


def begun(path: Path) -> bool:
    """Whether this is the folder of a run, or of one that is only being prepared."""
    return (path / "config.toml").exists() or (path / ".lock").exists()


def at_work(path: Path) -> bool:
    """Whether a process is at work in a run's folder."""
    try:
        with files.lock(path / ".lock", shared=True, seconds=0):
            return False
    except files.Locked:
        return True
    except OSError:
        return False


class Checkpoint(NamedTuple):
    round: int
    state: State
    note: dict[str, Any]
    last: bool = True  # else the one before


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The last completed round, and the server's state after it; of the round before where that is damaged."""
    last, previous = path / LAST_STATE, path / PREVIOUS_STATE
    try:
        if last.exists():
            return _read_checkpoint(last)
        if not previous.exists():
            return None
        why = f'the checkpoint "{last}" is missing'
    except UserError as error:
        if not previous.exists():
            raise
        why = str(error)
    found = _read_checkpoint(previous)._replace(last=False)
    warnings.warn(f"{why}; the one of round {found.round} is used", stacklevel=3)
    return found


def _read_checkpoint(file: Path) -> Checkpoint:
    try:
        state, note = unpack(file.read_bytes())
        if note.get("state") not in (None, P.digest(state)):
            raise ValueError("its checksum is wrong")
        return Checkpoint(int(note["round"]), state, note)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f'the checkpoint "{file}" is damaged: {error}') from None


def chained(lines: Iterable[Line], before: str = "") -> str:
    """A digest of lines that follow others. Without times, so that equal runs have equal checkpoints."""
    for line in lines:
        told = json.dumps({key: value for key, value in line.items() if key != "seconds"}, sort_keys=True)
        before = sha256(f"{before}{told}".encode()).hexdigest()
    return before


def difference(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """method.lr = 0.1, not 0.05: the first setting that differs."""
    key = next(key for key in {**then, **now} if then.get(key) != now.get(key))
    before, after = then.get(key), now.get(key)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return difference(before, after, f"{prefix}{key}.")
    return f"{prefix}{key} = {after}, not {before}"


def read_result(path: Path) -> dict[str, Any] | None:
    """result.json of a run's folder; None while the run is not finished."""
    file = path / "result.json"
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        why = f'"{file}" is not valid JSON: {error}'
        raise UserError(f"{why}; delete it and resume the run to write it again") from None
    return found


def unused(numbers: Mapping[str, Any]) -> str:
    """Why a result says nothing of its method: every update of every round was left out. Empty if some were used."""
    if numbers["communication"].get("client_rounds", 1):
        return ""
    first = next(iter(numbers.get("left_out", ())), None)
    why = f"; client {first['client']} in round {first['round']}: {first['why']}" if first else ""
    return f"no update used: every client failed in every round, and the model is the initial one{why}"


def read_lines(path: Path) -> list[Line]:
    """The rounds on record. A last line that was cut off is left out."""
    file = path / "rounds.jsonl"
    lines: list[Line] = []
    for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
            _ = int(line["round"])
        except (ValueError, KeyError, TypeError):
            break
        lines.append(line)
    return lines


def result(lines: Sequence[Line], about: dict[str, Any]) -> dict[str, Any]:
    """result.json: the numbers of a run, from its rounds."""
    seconds = [line["seconds"] for line in lines]
    stages = {stage: _stage(lines, stage, _all(about, stage.startswith("newcomers_"))) for stage in STAGES}
    last = next((line for line in reversed(lines) if "aggregated" in line), None)
    if last is None:
        raise UserError("no client has answered an evaluation: there is no result; resume the run when they are there")
    return {
        **about,
        "rounds": len(lines),
        "metrics": {stage: found for stage, found in stages.items() if found},
        "clients": {stage: last[stage]["clients"] for stage in stages if stage in last},
        **({"server": last["server"]} if "server" in last else {}),  # what the method says of its state
        "communication": _communication(lines),
        "passes": {
            "train": sum(line["passes"] for line in lines),
            # Outside training, before the last evaluation: to adapt, and for everyone's models after local training.
            "adapt_last": last["aggregated"]["passes"],
            "after_local_all": last["after_local_all"]["passes"] if "after_local_all" in last else 0,
        },
        "left_out": [{"round": line["round"], **who} for line in lines for who in line["left_out"]],
        "seconds": {
            "train": sum(s["train"] for s in seconds),
            "evaluate": sum(s.get("evaluate", 0.0) for s in seconds),
        },
        "versions": versions(),
    }


def _all(about: dict[str, Any], late: bool) -> dict[str, int]:
    """How many clients have test data, of those that came later or of the others; empty if nobody knows."""
    if "sites" not in about:
        return {}
    new = about["newcomers"]
    return {"of": sum(site["n_test"] != 0 and (site["client"] in new) is late for site in about["sites"])}


def _stage(lines: Sequence[Line], stage: str, all_: dict[str, int]) -> dict[str, Any] | None:
    """Metrics of the last evaluated round, of the mean of the last ten rounds' evaluations, and of the round that
    validation data choose. Test data choose nothing. Locally trained models are those of a round's participants: where
    these change, rounds are of different clients, and neither a mean over them nor a choice of one says anything."""
    known = [line for line in lines if stage in line]
    if not known:
        return None

    def of(line: Line) -> dict[str, Any]:
        return {"round": line["round"], **line[stage]["summary"], **all_}

    recent = [line for line in known if line["round"] > lines[-1]["round"] - LAST]
    found = {"last": of(known[-1])}
    who = {tuple(sorted(row["client"] for row in line[stage]["clients"])) for line in known}
    if stage.endswith("after_local") and len(who) > 1:
        return found
    if recent:
        rounds = [line["round"] for line in recent]
        mean = scoring.average([line[stage]["summary"] for line in recent])
        found[f"mean_of_last_{LAST}"] = {"rounds": rounds, **mean, **all_}
    judged = [line for line in known if line[stage]["summary"]["val"] is not None]
    if judged:
        best = max(judged, key=lambda line: (line[stage]["summary"]["val"], -line["round"]))
        found["chosen_on_validation"] = of(best)
    return found


def _communication(lines: Sequence[Line]) -> dict[str, Any]:
    total = {key: sum(line["bytes"][key] for line in lines) for key in lines[0]["bytes"]}
    turns = total.pop("clients")
    each = {key: value / turns if turns else 0 for key, value in total.items()}
    return {"per_client_and_round": each, "total": total, "client_rounds": turns}


def versions() -> dict[str, str]:
    packages = ("promptfed", "torch", "numpy", "safetensors", "pydantic")
    found = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    return {**found, "platform": f"{sys.platform}-{platform.machine()}"}
