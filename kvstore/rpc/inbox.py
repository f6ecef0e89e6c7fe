"""Objects of one put as their parts arrive: whole objects come out, and memory is taken before bytes are."""

from collections.abc import Iterable
from dataclasses import replace
from threading import Lock

from shoal.kvstore.core.records import StoredObject
from shoal.kvstore.errors import ObjectError
from shoal.kvstore.rpc import store_pb2 as pb
from shoal.kvstore.rpc.messages import head_of


class BudgetExceededError(Exception):
    """More bytes at once than the gateway may hold: the client should wait and put again, or put less."""


class Budget:
    """Bytes that all puts together may hold. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = 0
        self._lock = Lock()

    def take(self, count: int) -> None:
        """Reserve, or raise BudgetExceededError and reserve nothing."""
        with self._lock:
            if self.taken + count > self.bytes_max:
                raise BudgetExceededError(
                    f"{self.taken} bytes of puts are on their way and {count} more do not fit in {self.bytes_max}; "
                    "wait, or put fewer objects at once"
                )
            self.taken += count

    def give_back(self, count: int) -> None:
        """End a reservation."""
        with self._lock:
            self.taken -= count


class Inbox:
    """One put. Use `with`: its reservation ends with it."""

    def __init__(self, budget: Budget, object_bytes_max: int) -> None:
        self._budget = budget
        self._object_bytes_max = object_bytes_max
        self._reserved = 0
        self._objects: list[StoredObject] = []
        self._head: StoredObject | None = None
        self._length = 0
        self._filled = bytearray()

    def __enter__(self) -> "Inbox":
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.give_back(self._reserved)
        self._reserved = 0

    def take(self, parts: Iterable[pb.PutPart]) -> list[StoredObject]:
        """All objects of the put, complete; ObjectError or BudgetExceededError."""
        for part in parts:
            if part.HasField("head"):
                self._begin(part.head)
            self._add(part.data)
        self._expect_complete("the put ends")
        return self._objects

    def _begin(self, head: pb.ObjectHead) -> None:
        self._expect_complete(f"object {len(self._objects)} begins")
        item, length = head_of(head, len(self._objects), self._object_bytes_max)
        self._budget.take(length)
        self._reserved += length
        self._head, self._length, self._filled = item, length, bytearray()

    def _add(self, data: bytes) -> None:
        at = len(self._objects)
        if self._head is None:
            raise ObjectError(f"object {at}: bytes came before its head; the first part of an object carries `head`")
        if len(self._filled) + len(data) > self._length:
            got = len(self._filled) + len(data)
            raise ObjectError(f"object {at}: {got} bytes came, its head announced length = {self._length}")
        self._filled += data
        if len(self._filled) == self._length:
            self._objects.append(replace(self._head, payload=memoryview(self._filled)))
            self._head = None

    def _expect_complete(self, when: str) -> None:
        if self._head is not None:
            raise ObjectError(
                f"object {len(self._objects)}: {when} after {len(self._filled)} of length = {self._length} bytes"
            )
