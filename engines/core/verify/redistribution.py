"""Who gets the rows of a step whose number was fixed before the latest confidences were known."""

import numpy as np
from numpy.typing import NDArray
from shoal.engines.core.verify.allocation import split_places


def redistribute(confidences: NDArray[np.float32], remap: NDArray[np.integer], total_rows: int) -> NDArray[np.int64]:
    """Rows of each sequence, int64 [sequences], one at least (engine runtime notes 7.6).

    confidences: float32 [previous rows, drafts], raw, of the step before; remap [sequences]: each one's row there, -1
    for a sequence that was not in it, whose drafts have rate 0. Sums to `total_rows`; raises ValueError if that is not
    between one row and all rows a sequence. Rates are products in single precision, as on a device.
    """
    count, drafts = len(remap), confidences.shape[1]
    if not count <= total_rows <= count * (1 + drafts):
        raise ValueError(f"total_rows = {total_rows} for {count} sequences of {drafts} drafts")
    rates = np.zeros((count, drafts), np.float32)
    known = remap >= 0
    rates[known] = np.multiply.accumulate(confidences.astype(np.float32), axis=1)[remap[known]]
    return split_places(rates, total_rows - count) + 1
