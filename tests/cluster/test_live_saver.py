"""Saving in the background: bounded in bytes, idle only when nothing taken is unwritten."""

import threading
import time
from typing import cast

import pytest
from shoal.cluster.live import saver as module
from shoal.cluster.live.saver import Saver, ToSave
from shoal.cluster.live.submission import Origin
from shoal.kvstore.client import StoreClient
from shoal.kvstore.core.records import Kind, StoredObject, TrafficClass

GRAIN = bytes(400)


class SlowClient:
    """Takes objects when it is allowed to, and never has a stripe full."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.taken = 0

    def put(self, objects: list[StoredObject]) -> tuple[()]:
        """Wait, then take."""
        assert self.may_go.wait(10)
        self.taken += len(objects)
        return ()

    def flush(self, now_us: int) -> tuple[()]:
        """Nothing is due."""
        return ()


def item(number: int) -> ToSave:
    key = number.to_bytes(16, "big")
    stored = StoredObject(Kind.GRAIN, key, bytes(16), number, TrafficClass.CHAT, GRAIN)
    return ToSave(Origin("e", "r", 1, "chat", ""), stored)


def test_a_stalled_store_costs_grains_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 1000)
    client = SlowClient()
    saver = Saver(cast(StoreClient, client), lambda keys: (True,) * len(keys), lambda origin, grains, anchors: None)
    for number in range(5):
        saver.save([item(number)])
    assert saver.dropped == 3, "two grains of 400 bytes fit into 1000"
    assert not saver.is_idle
    client.may_go.set()
    deadline_s = time.monotonic() + 5
    while client.taken < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    saver.save([item(9)])
    while client.taken < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (client.taken, saver.dropped) == (3, 3)
