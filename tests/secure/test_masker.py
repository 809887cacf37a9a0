"""What a client refuses: to take a step twice or out of order, and whatever would tell more than the sum."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from promptfed import UserError
from promptfed.clients.messages import Keys, Masks, Shares, Unmask
from promptfed.params import Params
from promptfed.secure import Secure, keys
from promptfed.secure.site import Masker
from promptfed.secure.tensors import raw, rows

CLIENTS = [0, 1, 2, 3, 4]
UP = {"w": torch.linspace(-1, 1, 50)}
ON = Secure(aggregation=True)
MASKS = Masks(clients=CLIENTS, total=50, largest=20)


class Round:
    """Five clients up to the point at which they have masked their updates."""

    def __init__(self, path: Path) -> None:
        self.masker = Masker(ON, 0, path)
        self.public = {c: self.answer(Keys(round=1), c) for c in CLIENTS}
        self.boxes = {c: self.answer(Shares(round=1, clients=CLIENTS), c, self.keys_for(c)) for c in CLIENTS}
        self.masked = {c: self.masker.mask(c, 1, UP, 10, MASKS, "context")["w"] for c in CLIENTS}

    def answer(self, task: Keys | Shares | Unmask, client: int, given: Params | None = None) -> torch.Tensor:
        (said,) = self.masker.answer(task, {client: given or {}})
        (tensor,) = said.values()
        return tensor

    def others(self, client: int) -> list[int]:
        return [other for other in CLIENTS if other != client]

    def keys_for(self, client: int) -> Params:
        return {"keys": torch.cat([self.public[other] for other in self.others(client)])}

    def boxes_for(self, client: int) -> Params:
        places = {other: self.others(other).index(client) for other in self.others(client)}
        return {"boxes": torch.stack([self.boxes[other][at] for other, at in places.items()])}

    def unmask(self, client: int, answered: list[int]) -> dict[int, bytes]:
        """-> the client's share of each secret"""
        found = self.answer(Unmask(round=1, answered=answered), client, self.boxes_for(client))
        return {owner: raw(share) for owner, share in zip([client, *self.others(client)], found, strict=True)}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Round]:
    found = Round(tmp_path)
    yield found
    found.masker.close()


def test_every_step_is_taken_once(held: Round) -> None:
    with pytest.raises(UserError, match="client 1 shares its secrets once in round 1"):
        held.answer(Shares(round=1, clients=CLIENTS), 1, held.keys_for(1))
    with pytest.raises(UserError, match="client 1 has masked an update in round 1 already"):
        held.masker.mask(1, 1, UP, 10, MASKS, "context")
    held.unmask(1, CLIENTS)
    with pytest.raises(UserError, match="client 1 is not ready for this message in round 1"):
        held.unmask(1, [0, 1, 2, 4])


def test_no_step_is_taken_before_its_time(held: Round) -> None:
    for round in (1, 2):
        if round == 1:
            held.answer(Keys(round=1), 0)  # the round is begun again
        with pytest.raises(UserError, match=f"client 0 is not ready for this message in round {round}"):
            held.masker.mask(0, round, UP, 10, MASKS, "context")
        with pytest.raises(UserError, match=f"client 0 is not ready for this message in round {round}"):
            held.masker.answer(Unmask(round=round, answered=CLIENTS), {0: held.boxes_for(0)})


def test_three_clients_restore_one_secret_and_two_restore_none(held: Round) -> None:
    """Client 4 is lost: of it the key of pairwise masks, of the others the seed of their own."""
    shares = {c: held.unmask(c, [0, 1, 2, 3]) for c in (0, 1, 2, 3)}
    for some in combinations(shares, 3):
        pair = keys.restore({holder: shares[holder][4] for holder in some})
        assert keys.public(pair) == raw(held.public[4][1])
    guessed = keys.restore({holder: shares[holder][4] for holder in (0, 1)})
    assert keys.public(guessed) != raw(held.public[4][1])
    own = {c: keys.restore({holder: shares[holder][c] for holder in (0, 1, 2)}) for c in (0, 1, 2, 3)}
    assert all(keys.public(secret) != raw(held.public[c][1]) for c, secret in own.items())
    assert len(set(own.values())) == 4


def test_no_two_groups_that_are_told_differently_are_both_large_enough(held: Round) -> None:
    """A server that claims to half of the clients that client 4 was lost, and to the others that it was not."""
    lost = [held.unmask(c, [0, 1, 2, 3])[4] for c in (0, 1)]
    there = [held.unmask(c, CLIENTS)[4] for c in (2, 3, 4)]
    assert len(lost) < ON.needed(5) <= len(there)


@pytest.mark.parametrize("answered", [[1, 2], [0, 2, 3, 4], []])
def test_masks_stay_if_too_few_have_answered_or_not_the_client_itself(held: Round, answered: list[int]) -> None:
    with pytest.raises(UserError, match=r"^secure.threshold = 0.6: of client 1 and its 4 neighbours, \d have answered"):
        held.unmask(1, answered)
    assert len(held.unmask(1, CLIENTS)) == 5  # nothing is lost by it


def test_a_client_masks_nothing_with_too_few_neighbours_or_in_a_sum_without_it(tmp_path: Path) -> None:
    held = Round(tmp_path)
    for c in CLIENTS:
        held.public[c] = held.answer(Keys(round=2), c)
    for c in CLIENTS:
        held.answer(Shares(round=2, clients=CLIENTS), c, held.keys_for(c))
    with pytest.raises(UserError, match="1 of the 4 neighbours of client 0 have shared their secrets, too few"):
        held.masker.mask(0, 2, UP, 10, Masks(clients=[0, 1], total=20, largest=10), "context")
    for masks in (Masks(clients=[1, 2, 3, 4], total=40, largest=10), Masks(clients=CLIENTS, total=50, largest=9)):
        with pytest.raises(UserError, match="client 0 is not among those whose updates are added up"):
            held.masker.mask(0, 2, UP, 10, masks, "context")
    held.masker.close()


def test_shares_of_another_client_are_refused(held: Round) -> None:
    """Such as its own, which would then be let go of as those of a client that was lost."""
    given = held.boxes_for(1)
    given["boxes"][0] = held.boxes[1][0]  # from client 1 to client 0
    with pytest.raises(UserError, match="the shares of client 0 cannot be decrypted"):
        held.masker.answer(Unmask(round=1, answered=[1, 2, 3, 4]), {1: given})


@pytest.mark.parametrize(
    "given",
    [{}, {"keys": rows([bytes(32)] * 7)}, {"keys": torch.zeros(8, 32)}, {"keys": rows([b"k" * 32] * 8), "x": UP["w"]}],
    ids=["none", "few", "type", "more"],
)
def test_malformed_messages_are_refused(tmp_path: Path, given: Params) -> None:
    masker = Masker(ON, 0, tmp_path)
    masker.answer(Keys(round=1), {0: {}})
    with pytest.raises(UserError, match=r"a message must hold keys of shape \(8, 32\), and nothing else"):
        masker.answer(Shares(round=1, clients=CLIENTS), {0: given})
    with pytest.raises(UserError, match="shares its secrets once in round 1, and with others"):
        masker.answer(Shares(round=1, clients=[0, 1, 1, 2]), {0: given})
    masker.close()
