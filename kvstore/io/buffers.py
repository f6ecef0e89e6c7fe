"""Memory for whole stripes that is used again: fresh pages cost more than the bytes that are put into them.

A page's first touch is a fault and a clearing, at half to a quarter of the speed of a copy into memory touched before.
So what a stripe leaves behind is kept for the next one, up to a bound. Nobody has to give anything back: a buffer
counts as idle when the last array or view of it is gone.
"""

import ctypes
import weakref
from threading import Lock

import numpy as np
from shoal.kvstore.core.stripe import Bytes

_ROUND_BYTES = 64 * 1024  # stripes differ a little in length; alike buffers fit more of them


class BufferPool:
    """Hands out arrays; keeps about `idle_bytes_max` of what is no longer referenced. Thread-safe."""

    def __init__(self, idle_bytes_max: int) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._idle: list[Bytes] = []
        self._lock = Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next stripes."""
        return sum(raw.nbytes for raw in tuple(self._idle))

    def take(self, size: int) -> Bytes:
        """A writable uint8 [size] of any content; its memory comes back when neither it nor a view of it is left."""
        raw = self._fitting(size)
        if raw is None:
            raw = np.empty(-(-size // _ROUND_BYTES) * _ROUND_BYTES, dtype=np.uint8)
        # Views of a numpy array refer to what the first array was made of: this object lives as long as the last view.
        lease = (ctypes.c_uint8 * size).from_buffer(raw.data)
        weakref.finalize(lease, self._give_back, raw).atexit = False
        return np.ctypeslib.as_array(lease)

    def _fitting(self, size: int) -> Bytes | None:
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                if size <= self._idle[place].nbytes <= 2 * size + _ROUND_BYTES:
                    return self._idle.pop(place)
        return None

    def _give_back(self, raw: Bytes) -> None:
        """Runs wherever the last view goes, even within `take`: so it takes no lock, and only ever appends."""
        if self.idle_bytes + raw.nbytes <= self._idle_bytes_max:
            self._idle.append(raw)
