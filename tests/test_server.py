"""The round loop, with clients that answer whatever a test wants."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.aggregation import Aggregation
from promptfed.clients.base import Clients, Take
from promptfed.clients.messages import Masks
from promptfed.errors import UserError
from promptfed.intake import Intake
from promptfed.method import FedAvg, Method, State
from promptfed.methods import create
from promptfed.models import Model
from promptfed.params import Params
from promptfed.phases import Holdings, Update
from promptfed.scoring import Score, Scores
from promptfed.server import Line, Plan, Recorder, run, screen
from tiny import linear

MODEL = linear()
NAN = float("nan")


def w(*values: float) -> Params:
    return {"body.w": torch.tensor(values, dtype=torch.float32)}


def score(hits: int, n: int) -> Score:
    wrong = n - hits
    return Score(n, float(n), np.array([hits, 0, 0]), np.array([0, wrong, 0]), np.array([wrong, 0, 0]))


Answer = Callable[[int, Params, int], Update | None]


def plus(client: int, sent: Params, round: int) -> Update:
    """Adds the client's number to what it received; has as many samples."""
    up = {name: p + client for name, p in sent.items() if not name.startswith("mean.")}
    return Update(client, sent, up, client, loss=client / 10, passes=2 * client, bytes_down=100, bytes_up=10)


@dataclass
class Fake(Clients):
    """Clients by number of samples."""

    counts: dict[int, int]
    answer: Answer = plus
    order: int = 1
    log: list[Any] = field(default_factory=list)

    def ids(self) -> list[int]:
        return list(self.counts)

    def sizes(self) -> dict[int, int]:
        return self.counts

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        self.log.append(("enroll", list(clients)))
        return {client: {"hello": torch.tensor(float(client))} for client in clients}

    def train(
        self,
        sent: Mapping[int, Params],
        round: int,
        score: bool,
        take: Take = lambda update: update,
        masks: Masks | None = None,
    ) -> tuple[list[Update], list[Scores]]:
        self.log.append(("train", round, sorted(sent), score))
        answers = [self.answer(client, params, round) for client, params in sent.items()]
        updates = [take(update) for update in answers[:: self.order] if update is not None]
        return updates, self._scores([u.client for u in updates]) if score else []

    def evaluate(self, sent: Mapping[int, Params], *, as_of: int, pooled: bool, after_local: bool) -> list[Scores]:
        value = {client: p["body.w"].tolist() for client, p in sent.items()}
        self.log.append(("evaluate", as_of - 1, value, pooled, after_local))
        return self._scores(list(sent))

    def _scores(self, clients: Sequence[int]) -> list[Scores]:
        return [Scores(client, {"test": score(client, 10), "val": score(1, 2)}, passes=client) for client in clients]

    def close(self) -> None: ...

    def asked(self, what: str) -> list[Any]:
        return [entry[1:] for entry in self.log if entry[0] == what]


@dataclass
class Notes(Recorder):
    restored: tuple[int, State] | None = None
    begun: list[tuple[int, list[int]]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def restore(self) -> tuple[int, State] | None:
        return self.restored

    def begin(self, round: int, clients: Sequence[int]) -> None:
        self.begun.append((round, list(clients)))

    def end(self, line: Line, state: State) -> None:
        json.dumps(line)  # is recorded as such
        self.lines.append(line)
        self.states.append(state)


def go(clients: Fake, rounds: int = 1, method: Method | None = None, notes: Notes | None = None, **plan: Any) -> Notes:
    notes = notes or Notes()
    plan = {"fraction": 1.0, "seed": 0, **plan}
    run(method or FedAvg(), MODEL, w(0.0, 8.0), clients, Plan(rounds, **plan), notes)
    return notes


# ---- screen


def screened(
    updates: Sequence[Update], asked: Sequence[int], shared: Params
) -> tuple[list[Update], list[dict[str, Any]]]:
    intake = Intake(FedAvg(), shared, shared, dict.fromkeys(asked, 5))
    return screen([intake.take(update) for update in updates], asked)


def test_screen_tells_what_can_be_used_from_what_cannot() -> None:
    updates = [
        Update(8, {}, w(1.0), 5),
        Update(2, {}, w(NAN), 5),
        Update(3, {}, w(1.0), 5, error="out of memory"),
        Update(4, {}, w(1.0), 5, stats={"s": torch.tensor(float("inf"))}),
        Update(6, {}, {}, 5, error="non-finite loss"),
        Update(7, {}, {}, 5),
        Update(9, {}, w(1.0), 0),
        Update(10, {}, w(1.0), 5, loss=NAN),
        Update(1, {}, w(2.0), 5),
    ]
    used, left_out = screened(updates, [8, 1, 2, 3, 4, 5, 6, 7, 9, 10], w(0.0))
    assert [update.client for update in used] == [1, 8]
    assert left_out == [
        {"client": 2, "why": "non-finite update"},
        {"client": 3, "why": "out of memory"},
        {"client": 4, "why": "non-finite update"},
        {"client": 5, "why": "no answer"},
        {"client": 6, "why": "non-finite loss"},
        {"client": 7, "why": "names or shapes differ from the shared parameters"},
        {"client": 9, "why": "no samples"},
        {"client": 10, "why": "non-finite update"},
    ]


def test_a_client_cannot_choose_its_own_weight() -> None:
    used, left_out = screened([Update(1, {}, w(1.0), 5), Update(2, {}, w(1.0), 1 << 53)], [1, 2], w(0.0))
    assert [update.client for update in used] == [1]
    why = "it says it has 9007199254740992 training samples, and was introduced with 5"
    assert left_out == [{"client": 2, "why": why}]


def test_an_answer_nobody_asked_for_is_not_used() -> None:
    used, left_out = screened([Update(1, {}, w(1.0), 5), Update(2, {}, w(1.0), 5)], [1], w(0.0))
    assert [update.client for update in used] == [1]
    assert left_out == []


def test_a_client_that_has_nothing_to_send_can_be_used() -> None:
    """Local: nothing travels."""
    used, left_out = screened([Update(1, {}, {}, 5)], [1], {})
    assert len(used) == 1
    assert left_out == []


# ---- run


class Forgetful(FedAvg):
    """Forgets to return, as one does in a method of one's own."""

    hook: str = "begin"

    def begin(self, *given: Any) -> State:
        return None if self.hook == "begin" else super().begin(*given)  # type: ignore[return-value]

    def down(self, *given: Any) -> Params:
        return [1] if self.hook == "down" else super().down(*given)  # type: ignore[return-value]

    def aggregate(self, *given: Any) -> State:
        return {"body.w": 3.0} if self.hook == "aggregate" else super().aggregate(*given)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("hook", "says"),
    [("begin", ", not NoneType"), ("down", ", not list"), ("aggregate", ", and 'body.w' in it is of type float")],
)
def test_what_a_hook_returns_is_looked_at(hook: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^Forgetful\.{hook}\(\) must return a dict of tensors{says}$"):
        go(Fake({1: 1}), method=Forgetful(hook=hook))


def test_rounds_average_by_samples_and_go_on_from_the_average() -> None:
    clients = Fake({1: 1, 3: 3, 0: 0})
    notes = go(clients, rounds=2)
    # (1 x 1 + 3 x 3) / 4 = 2.5 a round
    assert [state["body.w"].tolist() for state in notes.states] == [[2.5, 10.5], [5.0, 13.0]]
    assert notes.begun == [(1, [1, 3]), (2, [1, 3])]
    first = notes.lines[0]
    assert (first["round"], first["clients"], first["left_out"]) == (1, [1, 3], [])
    assert first["train_loss"] == pytest.approx((1 * 0.1 + 3 * 0.3) / 4)
    assert first["passes"] == 2 * 1 + 2 * 3
    assert first["bytes"] == {"clients": 2, "up": 20, "down": 200, "parameters_up": 4, "parameters_down": 4}


def test_everyone_is_evaluated_on_the_new_state() -> None:
    clients = Fake({1: 1, 3: 3, 0: 0})
    notes = go(clients, rounds=1)
    new = [2.5, 10.5]
    assert clients.asked("evaluate") == [(1, {1: new, 3: new, 0: new}, False, False)]
    line = notes.lines[0]
    assert line["aggregated"]["summary"]["local"]["mean"] == pytest.approx((0.1 + 0.3 + 0.0) / 3)
    assert line["aggregated"]["summary"]["global"] == pytest.approx(4 / 30)  # one model, everybody's test data
    assert [row["client"] for row in line["aggregated"]["clients"]] == [1, 3, 0]
    assert line["aggregated"]["passes"] == 4
    assert [row["client"] for row in line["after_local"]["clients"]] == [1, 3]
    assert line["after_local"]["summary"]["global"] is None


def broken(client: int, sent: Params, round: int) -> Update | None:
    """Client 1 answers well, 2 sends NaN, 3 an error, 4 nothing."""
    update = plus(client, sent, round)
    if client == 2:
        return Update(client, sent, w(NAN, 0.0), 1000, loss=5.0, passes=77, bytes_up=1, bytes_down=1)
    if client == 3:
        return Update(
            client, sent, w(1e6, 1e6), 1000, loss=NAN, passes=77, bytes_up=1, bytes_down=1, error="non-finite loss"
        )
    return None if client == 4 else update


def test_updates_left_out_are_recorded_and_not_aggregated() -> None:
    notes = go(Fake({1: 1, 2: 2, 3: 3, 4: 4, 5: 5}, broken))
    # (1 x 1 + 5 x 5) / 6
    assert notes.states[0]["body.w"].tolist() == pytest.approx([26 / 6, 8 + 26 / 6])
    line = notes.lines[0]
    assert line["clients"] == [1, 2, 3, 4, 5]
    assert line["left_out"] == [
        {"client": 2, "why": "non-finite update"},
        {"client": 3, "why": "non-finite loss"},
        {"client": 4, "why": "no answer"},
    ]
    assert line["train_loss"] == pytest.approx((1 * 0.1 + 5 * 0.5) / 6)
    assert line["passes"] == 12
    assert line["bytes"]["clients"] == 2
    assert line["bytes"]["up"] == 20


def test_a_round_without_a_good_update_changes_nothing_and_the_run_goes_on() -> None:
    def second_round_fails(client: int, sent: Params, round: int) -> Update | None:
        good = plus(client, sent, round)
        return good if round != 2 else (Update(client, sent, w(NAN, NAN), 5) if client == 1 else None)

    notes = go(Fake({1: 1, 3: 3}, second_round_fails), rounds=3)
    assert [state["body.w"].tolist() for state in notes.states] == [[2.5, 10.5], [2.5, 10.5], [5.0, 13.0]]
    bad = notes.lines[1]
    assert (bad["train_loss"], bad["passes"], bad["bytes"]["clients"], bad["bytes"]["up"]) == (None, 0, 0, 0)
    assert [who["client"] for who in bad["left_out"]] == [1, 3]


def huge(client: int, sent: Params, round: int) -> Update:
    return replace(plus(client, sent, round), up=w(3e38, -3e38)) if client == 2 else plus(client, sent, round)


def test_one_huge_finite_update_does_not_end_learning_where_norms_are_bounded() -> None:
    clients = Fake({client: client for client in range(1, 6)}, huge)
    notes = go(clients, rounds=2, aggregation=Aggregation(name="norm-bound", bound=1.0))
    assert notes.states[-1]["body.w"].abs().max() < 30
    rows = notes.lines[0]["aggregation"]["clients"]
    assert [row["client"] for row in rows if row["factor"] < 1] == [2, 5]  # the median norm is that of client 4
    assert rows[0] == {"client": 1, "norm": pytest.approx(2**0.5), "factor": 1.0}


def test_a_round_with_too_few_updates_for_its_rule_changes_nothing() -> None:
    def three(client: int, sent: Params, round: int) -> Update | None:
        return plus(client, sent, round) if client < 3 else None

    notes = go(Fake({1: 1, 2: 2, 3: 3}, three), aggregation=Aggregation(name="krum", malicious=0.0))
    assert notes.states[0]["body.w"].tolist() == [0.0, 8.0]
    assert notes.lines[0]["left_out"][1] == {"client": 1, "why": "2 updates are too few for krum"}


def test_the_order_of_updates_does_not_matter() -> None:
    def awkward(client: int, sent: Params, round: int) -> Update:
        return Update(client, sent, w(10.0**client / 3, -1 / (client + 1)), client, loss=1 / client)

    counts = {client: client for client in range(1, 9)}
    forwards, backwards = go(Fake(counts, awkward), 2), go(Fake(counts, awkward, order=-1), 2)
    for a, b in zip(forwards.states, backwards.states, strict=True):
        assert torch.equal(a["body.w"], b["body.w"])
    for a, b in zip(forwards.lines, backwards.lines, strict=True):
        assert a["train_loss"] == b["train_loss"]


def test_evaluation_falls_due_every_so_many_rounds_and_after_the_last() -> None:
    clients = Fake({1: 1})
    notes = go(clients, rounds=7, eval_every=3)
    assert [line["round"] for line in notes.lines if "aggregated" in line] == [3, 6, 7]
    assert [entry[0] for entry in clients.asked("evaluate")] == [3, 6, 7]
    assert [entry[2] for entry in clients.asked("train")] == [r in (3, 6, 7) for r in range(1, 8)]
    assert all(("evaluate" in line["seconds"]) == ("aggregated" in line) for line in notes.lines)


@pytest.mark.parametrize(
    ("after_local", "scored", "asked"),
    [
        ("none", [False, False], [False, False]),
        ("participants", [True, True], [False, False]),
        ("all", [True, True], [False, False, True]),
    ],
)
def test_locally_trained_models_of_whom(after_local: str, scored: list[bool], asked: list[bool]) -> None:
    clients = Fake({1: 1, 2: 2, 3: 3})
    notes = go(clients, rounds=2, fraction=0.4, after_local=after_local)
    assert [entry[2] for entry in clients.asked("train")] == scored
    assert [entry[3] for entry in clients.asked("evaluate")] == asked
    rows = [len(line["after_local"]["clients"]) if "after_local" in line else 0 for line in notes.lines]
    assert rows == {"none": [0, 0], "participants": [1, 1], "all": [1, 1]}[after_local]
    everyone = [len(line["after_local_all"]["clients"]) for line in notes.lines if "after_local_all" in line]
    assert everyone == ([3] if after_local == "all" else [])


@pytest.mark.parametrize(
    ("name", "pooled", "expected"),
    [
        ("fedavg", "every", [False] * 2),
        ("fedper", "every", [True] * 2),
        ("fedper", "never", [False] * 2),
        ("fedper", "last", [False, True]),
    ],
)
def test_personal_models_are_scored_on_everybodys_data_where_wanted(
    name: str, pooled: str, expected: list[bool]
) -> None:
    clients = Fake({1: 1})
    go(clients, rounds=2, method=create(name), pooled=pooled)
    assert [entry[2] for entry in clients.asked("evaluate")] == expected


class Welcoming(FedAvg):
    """Counts those who joined."""

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        raise AssertionError("the fake clients say hello by themselves")

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        return {**state, "sum": state.get("sum", torch.tensor(0.0)) + hello["hello"]}

    def down(self, state: State, client: int) -> Params:
        return {name: p for name, p in state.items() if name != "sum"}


def test_everyone_is_admitted_before_the_first_round() -> None:
    clients = Fake({1: 1, 2: 0, 4: 1})
    notes = go(clients, rounds=2, method=Welcoming())
    assert clients.asked("enroll") == [([1, 2, 4],)]
    assert notes.states[-1]["sum"].item() == 7


def test_a_restored_run_goes_on_behind_its_last_round() -> None:
    whole = go(Fake({client: client for client in range(1, 7)}), rounds=5, fraction=0.5)
    clients = Fake({client: client for client in range(1, 7)})
    rest = go(clients, rounds=5, fraction=0.5, notes=Notes(restored=(3, whole.states[2])))
    assert clients.asked("enroll") == []
    assert [line["round"] for line in rest.lines] == [4, 5]
    assert [line["clients"] for line in rest.lines] == [line["clients"] for line in whole.lines[3:]]
    assert torch.equal(rest.states[-1]["body.w"], whole.states[-1]["body.w"])
    assert go(Fake({1: 1}), rounds=3, notes=Notes(restored=(3, w(1.0)))).lines == []


def test_clients_of_a_method_with_models_of_their_own_receive_their_own() -> None:
    seen: dict[int, list[float]] = {}

    def note(client: int, sent: Params, round: int) -> Update:
        seen[client] = sent["body.w"].tolist()
        return plus(client, sent, round)

    go(Fake({1: 1, 3: 3}, note), rounds=2, method=create("fedmtl"))
    assert seen == {1: [1, 9], 3: [3, 11]}


def test_seconds_are_measured() -> None:
    line = go(Fake({1: 1})).lines[0]
    assert set(line["seconds"]) == {"train", "evaluate"}
    assert all(math.isfinite(value) and value >= 0 for value in line["seconds"].values())


class Overflowing(FedAvg):
    def aggregate(self, state: State, updates: list[Update]) -> State:
        return {**state, "body.w": state["body.w"] * math.inf}


def test_a_round_whose_aggregate_is_not_finite_counts_for_nothing() -> None:
    notes = go(Fake({1: 1, 2: 2}), method=Overflowing())
    assert notes.states[0]["body.w"].isfinite().all()
    assert [entry["why"] for entry in notes.lines[0]["left_out"]] == ["aggregated to something not finite"] * 2
