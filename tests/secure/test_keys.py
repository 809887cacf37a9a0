"""Keys, encrypted shares and masks."""

import nacl.exceptions
import numpy as np
import pytest

from promptfed.secure import keys
from promptfed.secure.keys import Secrets

ANN, BOB = Secrets(b"a" * 32), Secrets(b"b" * 32)


def test_two_clients_and_whoever_restores_the_key_of_one_have_the_same_mask() -> None:
    seed = keys.pair_seed(ANN.pair, BOB.public[1], "round 3")
    assert seed == keys.pair_seed(BOB.pair, ANN.public[1], "round 3")
    assert seed != keys.pair_seed(ANN.pair, BOB.public[1], "round 4")
    shares = {holder: share[: keys.SHARE] for holder, share in ANN.shares([0, 1, 2, 3], 3).items()}
    assert keys.restore({holder: shares[holder] for holder in (3, 0, 2)}) == ANN.pair
    assert keys.public(ANN.pair) == ANN.public[1]


def test_public_keys_are_those_of_rfc_7748() -> None:
    """Section 6.1: Alice."""
    private = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    assert keys.public(private).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"


def test_masks_are_even_and_differ_by_name_and_seed() -> None:
    mask = keys.mask(b"s" * 32, "head.weight", 100_000)
    assert mask.dtype == np.uint32
    assert abs(mask.astype(np.float64).mean() / 2**31 - 1) < 0.01
    assert (np.bincount(mask >> np.uint32(28), minlength=16) > 6000).all()
    for other in (keys.mask(b"s" * 32, "head.bias", 100_000), keys.mask(b"t" * 32, "head.weight", 100_000)):
        assert (mask == other).mean() < 0.001


def test_shares_are_read_by_their_recipient_and_as_those_of_their_sender_only() -> None:
    shares = bytes(range(2 * keys.SHARE))
    box = ANN.encrypt(shares, BOB.public[0], 4, 7)
    assert len(box) == keys.BOX
    assert b"".join(BOB.decrypt(box, ANN.public[0], 4, 7)) == shares
    with pytest.raises(nacl.exceptions.CryptoError):
        Secrets(b"c" * 32).decrypt(box, ANN.public[0], 4, 7)
    with pytest.raises(nacl.exceptions.CryptoError):
        BOB.decrypt(box[:-1] + b"\x00", ANN.public[0], 4, 7)
    # The key of a pair is the same in both directions: sent back to Ann, the box opens.
    with pytest.raises(ValueError, match="shares of another client"):
        ANN.decrypt(box, BOB.public[0], 7, 4)
