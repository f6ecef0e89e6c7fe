"""Reference of the device's part in pipelined decode: correct lengths, gather tokens and look-backs.

Plain numpy, one function a kernel (engine runtime notes 6.4, 6.5); `verify.redistribution` spreads rows. R rows of this
step, P of the step before, n drafts; `previous` int [R] is the row in the step before, -1 = fresh (padding rows too).
"""

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_TOKEN = -1


def correct_lengths(base: Ints, q: Ints, previous: Ints, accepted: Ints, drafts: int) -> Ints:
    """Key lengths [R] with the drafts that the step before really accepted (int [P]); `base` as in Remap.

    base counts 1 + n tokens of the step before, it made 1 + accepted. Without drafts `base` is k: nothing to correct.
    """
    if not drafts:
        return base.copy()
    rejected = np.where(previous >= 0, drafts - accepted[np.maximum(previous, 0)], 0)
    return base + q - rejected


def gather_tokens(q: Ints, previous: Ints, sampled: Ints, made: Ints, fresh: Seq[Seq[int]]) -> Ints:
    """Input ids [sum q], packed: what the step before sampled (int [P]) and drafted (int [P, n]).

    A fresh row takes the first of the ids that the host gave: its last token and held drafts.
    """
    ids: list[int] = []
    for row, (count, before) in enumerate(zip(q.tolist(), previous.tolist(), strict=True)):
        given = fresh[row] if before < 0 else [int(sampled[before]), *made[before].tolist()]
        ids.extend(given[:count])
    return np.array(ids, dtype=np.int64)


def gather_lookback(
    q: Ints, previous: Ints, accepted: Ints, ids: Ints, windows: Seq[Seq[int]], drafts: int, reach: int
) -> Ints:
    """Ids [sum q, reach] before each input id, nearest first, NO_TOKEN where there is none.

    ids: as gathered. windows [R]: as `zos_remap.lookback_window`, newest last. A NO_TOKEN hides everything older.
    """
    found = np.full((len(ids), reach), NO_TOKEN, dtype=np.int64)
    first = 0
    for row, (count, before) in enumerate(zip(q.tolist(), previous.tolist(), strict=True)):
        rejected = drafts if before < 0 else drafts - int(accepted[before])
        window = windows[row]
        for j in range(count):
            for back in range(1, reach + 1):
                distance = rejected + back - j
                if back <= j:
                    token = int(ids[first + j - back])
                else:
                    token = window[-distance] if distance <= len(window) else NO_TOKEN
                if token == NO_TOKEN:
                    break
                found[first + j, back - 1] = token
        first += count
    return found
