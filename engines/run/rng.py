"""Counter-based random words: a pure function of (seed, counter), so any engine continues any stream.

Source of the stream rule: the serving engine's sampler draws stream = f(seed, 3 * position + c), with c = 0 for the
draw itself, 1 for a residual draw and 2 for an acceptance uniform. Our f is two rounds of SplitMix64 (Steele, Lea and
Flood 2014): the seed is mixed into a key, the counter walks the golden-ratio sequence from that key, and the sum is
mixed again. All arithmetic is modulo 2**64 on numpy uint64 arrays, hence the same on every machine.
"""

import numpy as np
import numpy.typing as npt

DRAW, RESIDUAL, ACCEPT = 0, 1, 2
PURPOSES = 3
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
SEED_MASK = (1 << 64) - 1

DRAFT_SEED_OFFSET = 1_000_000_007
"""Added to a request's seed for the draws of its drafts, so that they are independent of what judges them."""

Words = npt.NDArray[np.uint64]


def mix64(words: Words) -> Words:
    """The SplitMix64 finaliser, a bijection of 64-bit words; `words` is not modified."""
    z = words.copy()
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def random_words(seeds: Words, positions: Words, purpose: int) -> Words:
    """One uniform 64-bit word for each (seed, position): uint64 [rows].

    Args:
        seeds: uint64 [rows], the requests' seeds.
        positions: uint64 [rows], absolute position of the token being drawn.
        purpose: DRAW, RESIDUAL or ACCEPT; each has its own word at a position.
    """
    assert 0 <= purpose < PURPOSES, f"purpose {purpose} must be in 0..{PURPOSES - 1}"
    counters = positions * np.uint64(PURPOSES) + np.uint64(purpose + 1)
    key = mix64(seeds + np.uint64(GOLDEN_GAMMA))
    return mix64(key + counters * np.uint64(GOLDEN_GAMMA))


def below(words: Words, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Scale each word to an integer in [0, bound): floor(word * bound / 2**64), exact; int64 [rows].

    The probability of each value differs from 1 / bound by less than bound / 2**64. Bounds must be in 1..2**31.
    """
    assert bool(((bounds >= 1) & (bounds <= 1 << 31)).all()), f"bounds {bounds} must be in 1..2**31"
    wide = bounds.astype(np.uint64)
    high = (words >> np.uint64(32)) * wide
    low = (words & np.uint64(0xFFFFFFFF)) * wide
    return ((high + (low >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def unit(words: Words) -> npt.NDArray[np.float64]:
    """Each word's upper 53 bits as a number in [0, 1), exact; float64 [rows]."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
