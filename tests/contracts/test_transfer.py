"""The transfer port's contract, run on the in-process hub and on NIXL between two processes."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from shoal.cluster.core.transfer_plan import Pieces
from shoal.cluster.live.transfer_in_process import Fault, InProcessHub, InProcessTransfer
from shoal.cluster.transfer import Done, Lost, NotPosted, Pending

from tests.contracts.transfer_peer import POOL_BYTES, End, Remote, World

IMPLEMENTATIONS = ("in process", "nixl")


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


@pytest.fixture(scope="module")
def peers(world: World) -> dict[str, Remote]:
    """`steady` serves all tests that leave it alive; the others are each for one test. Started together."""
    return {role: world.start(role) for role in ("steady", "slow", "leaving", "doomed")} | {
        "reborn": world.start("doomed")
    }


@pytest.fixture(scope="module")
def peer(world: World, peers: dict[str, Remote]) -> Remote:
    return world.introduce(peers["steady"])


def noise(length: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes()


def test_bytes_land_and_then_the_notification(world: World, peer: Remote) -> None:
    raw = noise(4 << 20, 1)
    world.here.fill(0, raw)
    handle = world.write(peer.name, [(0, 8192, len(raw))], b"first")
    message, digest = peer.call("note_and_digest", [(8192, len(raw))])
    assert message == b"first"
    assert digest == world.here.digest([(0, len(raw))])
    assert handle.wait(10) == Done()
    assert handle.state() == Done()


def test_a_big_scattered_write_equals_its_source(world: World, peer: Remote) -> None:
    """Odd lengths, shuffled on both sides, several buffers' worth of pieces."""
    rng = np.random.default_rng(2)
    unit, count = 9_217, 2_000
    world.here.fill(0, noise(unit * count, 3))
    sources, targets = rng.permutation(count) * unit, rng.permutation(count) * unit
    spans = [(int(s), int(t), unit) for s, t in zip(sources, targets, strict=True)]
    assert world.write(peer.name, spans).wait(20) == Done()
    expected = world.here.digest([(s, n) for s, _, n in spans])
    assert peer.call("digest", [(t, n) for _, t, n in spans]) == expected


def test_bytes_outside_the_pieces_stay(world: World, peer: Remote) -> None:
    peer.call("fill", 0, b"\x55" * 300)
    world.here.fill(0, b"\xaa" * 100)
    assert world.write(peer.name, [(0, 100, 100)]).wait(10) == Done()
    assert peer.call("read", 0, 300) == b"\x55" * 100 + b"\xaa" * 100 + b"\x55" * 100


def test_zero_pieces_are_done_and_a_notification_can_travel_alone(world: World, peer: Remote) -> None:
    assert world.here.transfer.write(peer.name, (), None).wait(10) == Done()
    assert world.write(peer.name, [], b"alone").wait(10) == Done()
    assert peer.call("await_notes", 1) == [("here", b"alone")]


def test_notifications_of_ended_writes_arrive_in_order_once(world: World, peer: Remote) -> None:
    for i in range(50):
        assert world.write(peer.name, [(0, 0, 64)], b"n%d" % i).wait(10) == Done()
    assert peer.call("await_notes", 50) == [("here", b"n%d" % i) for i in range(50)]
    assert peer.call("await_notes", 0) == []


def test_the_peer_writes_back_without_a_call_from_here(world: World, peer: Remote) -> None:
    """This side makes progress by itself; nobody has to poll for the peer's write to end."""
    peer.call("fill", 0, noise(1 << 16, 4))
    assert peer.call("write", "here", [(0, 4096, 1 << 16)], b"back") == "Done"
    assert world.here.await_notes(1) == [(peer.name, b"back")]
    assert world.here.read(4096, 1 << 16) == peer.call("read", 0, 1 << 16)


def test_concurrent_writes_from_several_threads(world: World, peer: Remote) -> None:
    world.here.fill(0, noise(8 << 20, 5))
    states: list[object] = []

    def work(place: int) -> None:
        for i in range(8):
            offset = (place * 8 + i) << 17
            states.append(world.write(peer.name, [(offset, offset, 1 << 17)]).wait(20))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert states == [Done()] * 64
    assert peer.call("digest", [(0, 8 << 20)]) == world.here.digest([(0, 8 << 20)])


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ((0, POOL_BYTES - 10, 11), "a piece leaves remote buffer 'pool'"),
        ((POOL_BYTES - 10, 0, 11), "a piece leaves local buffer 'pool'"),
        ((0, -1, 11), "a piece leaves remote buffer"),
        ((0, 0, 0), "a piece leaves local buffer"),
        ((0, 2**63 - 5, 11), "a piece leaves remote buffer"),
    ],
)
def test_ranges_outside_the_buffers_are_refused(
    world: World, peer: Remote, span: tuple[int, int, int], words: str
) -> None:
    state = world.write(peer.name, [(0, 0, 8), span], b"never").wait(10)
    assert isinstance(state, NotPosted)
    assert words in state.reason
    assert world.write(peer.name, [], b"next").wait(10) == Done()
    assert peer.call("await_notes", 1) == [("here", b"next")]


def test_unknown_names_are_refused(world: World, peer: Remote) -> None:
    state = world.write("nobody-1", [(0, 0, 8)]).wait(10)
    assert isinstance(state, NotPosted)
    assert "unknown peer 'nobody-1'" in state.reason
    spans = np.array([[0, 0, 8]], np.int64)
    state = world.here.transfer.write(peer.name, (Pieces("pool", "slots", spans),), None).wait(10)
    assert isinstance(state, NotPosted)
    assert "remote buffer 'slots' is not registered; registered: ['pool']" in state.reason
    world.here.transfer.remove_peer("nobody-1")


def test_buffers_are_checked_and_frozen_by_metadata(world: World, peer: Remote) -> None:
    with pytest.raises(ValueError, match="one contiguous, non-empty uint8 row"):
        world.here.transfer.register("rows", np.zeros((4, 4), np.uint8))
    with pytest.raises(ValueError, match="once and before metadata"):
        world.here.transfer.register("late", np.zeros(4, np.uint8))


def test_a_known_peer_cannot_change_under_its_name(world: World, peer: Remote) -> None:
    metadata = peer.call("metadata")
    world.here.add_peer(peer.name, metadata)
    with pytest.raises(ValueError, match="metadata is not of peer 'other-1'"):
        world.here.add_peer("other-1", metadata)


# A write over a connection that is up is one-sided indeed: with CMA it ends although the peer is stopped. Tests of
# pending writes therefore freeze a peer before the two ends know each other: their connection must first come up.


def test_a_stopped_peer_runs_into_the_deadline_and_lands_later(world: World, peers: dict[str, Remote]) -> None:
    """The waiter gets its answer in time; the write is not over and says so."""
    world.here.fill(0, noise(16 << 20, 6))
    slow = world.introduce_frozen(peers["slow"])
    try:
        started = time.monotonic()
        handle = world.write(slow.name, [(0, 0, 16 << 20)], b"late")
        assert handle.wait(0.3) == Pending()
        assert time.monotonic() - started < 5
    finally:
        slow.thaw()
    slow.call("add_peer", "here", world.here.metadata())
    assert world.await_end(handle, 10) == Done()
    message, digest = slow.call("note_and_digest", [(0, 16 << 20)])
    assert (message, digest) == (b"late", world.here.digest([(0, 16 << 20)]))


def test_a_killed_peer_is_lost_and_others_are_not(world: World, peers: dict[str, Remote], peer: Remote) -> None:
    """Lost while in flight, lost afterwards, unknown once removed."""
    doomed = world.introduce_frozen(peers["doomed"])
    handle = world.write(doomed.name, [(0, 0, 8 << 20)], b"x")
    assert handle.wait(0.1) == Pending()
    doomed.kill()
    world.remotes.remove(doomed)
    assert isinstance(world.await_end(handle, 8), Lost)
    assert isinstance(world.await_end(world.write(doomed.name, [(0, 0, 8)]), 8), Lost)
    world.here.transfer.remove_peer(doomed.name)
    assert isinstance(world.write(doomed.name, [(0, 0, 8)]).wait(1), NotPosted)
    assert world.write(peer.name, [(0, 0, 8)]).wait(10) == Done()


def test_the_next_life_of_a_peer_works_while_the_old_one_is_still_known(
    world: World, peers: dict[str, Remote], peer: Remote
) -> None:
    reborn = world.introduce(peers["reborn"])
    world.here.fill(0, noise(1 << 20, 7))
    assert world.write(reborn.name, [(0, 0, 1 << 20)], b"hello").wait(10) == Done()
    assert reborn.call("note_and_digest", [(0, 1 << 20)]) == (b"hello", world.here.digest([(0, 1 << 20)]))


def test_removing_a_peer_ends_its_pending_writes(world: World, peers: dict[str, Remote], peer: Remote) -> None:
    leaving = world.introduce_frozen(peers["leaving"])
    try:
        handle = world.write(leaving.name, [(0, 0, 8 << 20)])
        assert handle.wait(0.1) == Pending()
        world.here.transfer.remove_peer(leaving.name)
        assert isinstance(handle.wait(1), Lost)
        assert "was removed" in handle.state().reason
    finally:
        leaving.thaw()
    assert world.write(peer.name, [(0, 0, 8)]).wait(10) == Done()


def test_close_twice_and_use_after_close(world: World, peer: Remote) -> None:
    end = world.end("brief-1")
    end.add_peer(peer.name, peer.call("metadata"))
    end.close()
    end.close()
    state = end.transfer.write(peer.name, (), b"x").wait(1)
    assert isinstance(state, NotPosted)
    assert "closed" in state.reason
    assert end.transfer.poll() == ()
    with pytest.raises(ValueError, match=r"closed|registered once"):
        end.transfer.register("more", np.zeros(4, np.uint8))


def test_injected_faults_drop_delay_and_fail() -> None:
    """The hub's faults, which simulated hand-offs rely on."""
    fates = {b"drop": Fault.DROP, b"delay": Fault.DELAY, b"fail": Fault.FAIL}
    hub = InProcessHub(lambda _writer, _peer, note: fates.get(note or b"", Fault.NONE))
    here, there = End(InProcessTransfer("a-1", hub)), End(InProcessTransfer("b-1", hub))
    here.add_peer("b-1", there.metadata())
    there.add_peer("a-1", here.metadata())
    here.fill(0, b"\x07" * 4)
    handles = {}
    for note in (b"drop", b"delay", b"fail", b"fine"):
        place = 4 * len(handles)
        spans = np.array([[0, place, 4]], np.int64)
        handles[note] = here.transfer.write("b-1", (Pieces("pool", "pool", spans),), note)
    assert isinstance(handles[b"fail"].state(), Lost)
    assert handles[b"fine"].state() == Done()
    assert there.read(0, 16) == b"\0" * 12 + b"\x07" * 4
    hub.flush()
    assert handles[b"delay"].state() == Done()
    assert handles[b"drop"].state() == Pending()
    assert there.await_notes(2) == [("a-1", b"fine"), ("a-1", b"delay")]
    hub.lose("b-1")
    assert isinstance(handles[b"drop"].state(), Lost)


def test_a_process_that_used_nixl_exits_cleanly() -> None:
    """UCX's ib module crashed each exit where no RDMA device exists; also without an explicit close."""
    script = (
        "import numpy as np\n"
        "from shoal.cluster.live.transfer import NixlTransfer\n"
        "t = NixlTransfer('exit-1')\n"
        "t.register('pool', np.zeros(4096, np.uint8))\n"
        "t.metadata()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
