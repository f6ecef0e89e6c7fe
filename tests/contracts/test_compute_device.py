"""What every compute device promises: one suite for the worker thread, the CUDA stream and the one turned by hand."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal.engines.run.device import BrokenDeviceError, CudaDevice, Device, HostDevice, Launched, host_copy
from shoal.engines.run.sync_guard import EarlyReadError, HostGuard


@dataclass
class HandEvent:
    """Happens when somebody needs it to: work waits in a list, so a test sees what is done before its turn."""

    device: "HandDevice"
    has_happened: bool = False

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        while not self.has_happened:
            self.device.turn()


@dataclass
class HandDevice:
    """A device without threads, whose work is done one piece a `turn`."""

    turns: list[Callable[[], None]] = field(default_factory=list)
    guard: HostGuard = field(default_factory=HostGuard)
    broken_by: BaseException | None = None
    is_inside: bool = False
    is_closed: bool = False

    def turn(self) -> None:
        self.turns.pop(0)()

    def launch(self, work):
        if self.is_closed:
            raise ValueError("closed")
        event = HandEvent(self)
        launched = Launched(event, lambda: self.is_inside)

        def turn() -> None:
            self.is_inside = True
            self.broken_by = launched.run(work, self.broken_by)
            self.is_inside = False
            event.has_happened = True

        self.turns.append(turn)
        return launched

    def forbid_sync(self):
        return self.guard.forbid()

    def allow_sync(self):
        return self.guard.allow()

    def close(self) -> None:
        while self.turns:
            self.turn()
        self.is_closed = True


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = {"host": (HostDevice, "cpu"), "cuda": (CudaDevice, "cuda"), "by hand": (HandDevice, "cpu")}


@pytest.fixture(params=["host", pytest.param("cuda", marks=needs_cuda), "by hand"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Device, str]]:
    make, kind = DEVICES[request.param]
    device = make()
    yield device, kind
    device.close()


@pytest.fixture
def device(place: tuple[Device, str]) -> Device:
    return place[0]


def test_work_is_done_in_the_order_of_launching_and_each_result_is_its_own(device: Device) -> None:
    order: list[int] = []

    def work(i: int) -> Callable[[], int]:
        return lambda: order.append(i) or i * i

    launched = [device.launch(work(i)) for i in range(50)]
    assert launched[-1].wait() == 49 * 49
    assert order == list(range(50))
    assert [one.result() for one in launched] == [i * i for i in range(50)]
    assert all(one.is_done for one in launched)


def test_a_chain_of_steps_takes_its_inputs_on_the_device(place: tuple[Device, str]) -> None:
    """As decode does: each step's input is what the step before sampled, and the host never looks in between."""
    device, kind = place

    def step(before: Launched[torch.Tensor] | None) -> Callable[[], torch.Tensor]:
        return lambda: torch.ones(4, device=kind) if before is None else before.on_device() * 2

    with device.forbid_sync():
        launched = None
        for _ in range(10):
            launched = device.launch(step(launched))
        assert launched is not None
        told = device.launch(lambda: host_copy(launched.on_device()))
        copied = told.wait()
    assert copied.tolist() == [512.0] * 4


def test_a_copy_for_the_host_outlives_what_later_work_overwrites(place: tuple[Device, str]) -> None:
    device, kind = place
    memory = torch.zeros(8, device=kind)
    first = device.launch(lambda: host_copy(memory))
    device.launch(lambda: memory.fill_(7)).wait()
    assert first.result().tolist() == [0.0] * 8


def test_the_host_reaches_a_result_only_by_its_event(device: Device) -> None:
    launched = device.launch(lambda: torch.ones(1))
    with pytest.raises(EarlyReadError, match="the host calls wait"):
        launched.on_device()
    assert launched.wait().tolist() == [1.0]
    with pytest.raises(EarlyReadError, match="the host calls wait"):
        launched.on_device()  # not even then: what is right by luck is wrong on the next machine


def test_work_does_not_reach_what_is_launched_behind_it() -> None:
    device = HostDevice()
    gate = threading.Event()
    behind: list[Launched[int]] = []
    first = device.launch(lambda: gate.wait() and behind[0].on_device())
    behind.append(device.launch(lambda: 1))
    gate.set()
    with pytest.raises(EarlyReadError, match="work launched behind this one"):
        first.wait()
    device.close()


def test_a_result_that_is_not_there_is_not_given() -> None:
    gate = threading.Event()
    device = HostDevice()
    launched = device.launch(gate.wait)
    with pytest.raises(EarlyReadError, match="before its event: call wait"):
        launched.result()
    gate.set()
    assert launched.wait() is True
    device.close()


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": torch.Tensor.item,
    "tolist": torch.Tensor.tolist,
    "cpu": lambda t: t.cpu(),
    "bool": bool,
    "int": int,
    "float": float,
    "index": lambda t: [0, 1, 2][t.to(torch.int64)],
    "equal": lambda t: torch.equal(t, t.clone()),
    "nonzero": torch.nonzero,
    "print": repr,
}
HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {"numpy": torch.Tensor.numpy, "array": np.asarray}


@pytest.mark.parametrize("read", READS)
def test_no_read_where_waiting_is_forbidden(place: tuple[Device, str], read: str) -> None:
    device, kind = place
    tensor = torch.ones((), device=kind)
    with pytest.raises(EarlyReadError, match="allow_sync where waiting is meant"), device.forbid_sync():
        READS[read](tensor)
    READS[read](tensor)


@pytest.mark.parametrize("read", HOST_READS)
def test_host_memory_is_not_read_as_an_array_either(read: str) -> None:
    tensor = torch.ones(())
    with pytest.raises(EarlyReadError, match="allow_sync"), HostGuard().forbid():
        HOST_READS[read](tensor)
    HOST_READS[read](tensor)


def test_computing_is_not_reading(place: tuple[Device, str]) -> None:
    device, kind = place
    with device.forbid_sync():
        made = (torch.arange(6, device=kind).view(2, 3) + 1).sum(dim=1)[1:]
        assert made.shape == (1,)
        assert device.launch(lambda: None).wait() is None
    assert made.tolist() == [15]


def test_regions_nest_and_one_that_allows_counts(place: tuple[Device, str]) -> None:
    device, kind = place
    tensor = torch.ones((), device=kind)
    with device.forbid_sync():
        with device.allow_sync():
            assert tensor.item() == 1
            with pytest.raises(EarlyReadError), device.forbid_sync():
                tensor.item()
            assert tensor.item() == 1
        inside = threading.Event()
        leave = threading.Event()

        def allow_elsewhere() -> None:
            with device.allow_sync():
                inside.set()
                leave.wait()

        other = threading.Thread(target=allow_elsewhere)
        other.start()
        inside.wait()
        assert tensor.item() == 1
        leave.set()
        other.join()
        with pytest.raises(EarlyReadError), device.forbid_sync():
            tensor.item()
    assert tensor.item() == 1


def test_nothing_is_begun_behind_work_that_failed(device: Device) -> None:
    begun: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError("a step broke")

    before = device.launch(lambda: 1)
    failed = device.launch(fail)
    behind = [device.launch(lambda: begun.append(1)) for _ in range(3)]
    assert before.wait() == 1
    for one in behind:
        with pytest.raises(BrokenDeviceError) as told:
            one.wait()
        assert isinstance(told.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError, match="a step broke"):
        failed.result()
    assert begun == []


def test_closing_finishes_what_was_launched_and_refuses_more(device: Device) -> None:
    launched = [device.launch(lambda: 3) for _ in range(20)]
    device.close()
    assert [one.result() for one in launched] == [3] * 20
    with pytest.raises(ValueError, match="closed"):
        device.launch(lambda: 4)
    device.close()


def test_the_host_goes_on_while_its_device_computes() -> None:
    """The work ends only after the host, which does not wait for it, has done something."""
    device = HostDevice()
    moved_on = threading.Event()
    launched = device.launch(lambda: moved_on.wait(timeout=60))
    assert not launched.is_done
    moved_on.set()
    assert launched.wait() is True
    device.close()


@given(st.lists(st.integers(-3, 3), max_size=12), st.integers(1, 4))
def test_memory_written_step_by_step_is_what_one_loop_makes_of_it(factors: list[int], read_every: int) -> None:
    """Copies launched between writes see the memory of their place in the order, however late the host looks."""
    device, memory, plain = HandDevice(), torch.ones(2), torch.ones(2)
    seen: list[Launched[torch.Tensor]] = []
    wanted: list[list[float]] = []
    for i, factor in enumerate(factors):
        device.launch(lambda factor=factor: memory.mul_(factor).add_(1))
        plain = plain * factor + 1
        if i % read_every == 0:
            seen.append(device.launch(lambda: host_copy(memory)))
            wanted.append(plain.tolist())
    device.close()
    assert [one.result().tolist() for one in seen] == wanted
