"""Shamir's sharing against known values, and against what it promises."""

from itertools import combinations
from random import Random

import pytest

from promptfed.secure import keys
from promptfed.secure.shamir import PRIME, SIZE, combine, split


def test_the_polynomial_1234_166x_94x2_modulo_1613_has_its_known_shares() -> None:
    # 1234 + 166 + 94 = 1494, 1234 + 332 + 376 = 1942 = 329 (mod 1613), and so on
    assert split(1234, [166, 94], range(1, 7), prime=1613) == {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    assert combine({2: 329, 4: 176, 5: 1188}, prime=1613) == 1234


def test_any_three_of_six_restore_the_secret() -> None:
    shares = split(1234, [166, 94], range(1, 7), prime=1613)
    assert all(combine({x: shares[x] for x in some}, prime=1613) == 1234 for some in combinations(shares, 3))


def test_two_of_them_say_nothing() -> None:
    """Each secret explains the same two shares by just as many polynomials of the same degree: exactly one."""
    prime, degree = 11, 2
    seen: dict[tuple[int, int], list[int]] = {}
    for secret in range(prime):
        for a in range(prime):
            for b in range(prime):
                shares = split(secret, [a, b], [3, 7], prime)
                seen.setdefault((shares[3], shares[7]), []).append(secret)
    assert len(seen) == prime**degree
    assert all(sorted(secrets) == list(range(prime)) for secrets in seen.values())


def test_the_field_is_the_smallest_that_holds_every_secret() -> None:
    witnesses = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)

    def probably_prime(n: int) -> bool:
        """Miller and Rabin's test."""
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for a in witnesses:
            powers = [pow(a, odd * 2**i, n) for i in range(twos)]
            if powers[0] != 1 and n - 1 not in powers:
                return False
        return True

    assert probably_prime(PRIME)
    assert not any(probably_prime(n) for n in range(2**256 + 1, PRIME, 2))
    assert len(keys.share_bytes(PRIME - 1)) == SIZE


def test_secrets_of_all_sizes_are_restored() -> None:
    random = Random(0)
    for secret in (bytes(32), b"\xff" * 32, random.randbytes(32)):
        coefficients = [random.randrange(PRIME) for _ in range(4)]
        shares = split(int.from_bytes(secret, "big"), coefficients, [1, 5, 9, 1000, 2**53 + 1, 77])
        held = {x - 1: keys.share_bytes(share) for x, share in list(shares.items())[:5]}
        assert keys.restore(held) == secret


def test_shares_that_do_not_belong_together_are_noticed_or_give_another_secret() -> None:
    shares = split(5, [1, 2], [1, 2, 3])
    assert combine({**shares, 3: shares[3] + 1}) != 5
    with pytest.raises(OverflowError):
        keys.restore({0: b"\x01" + bytes(32)})
