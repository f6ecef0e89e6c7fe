"""What every store device promises: one suite for the directory and the in-memory device."""

import os
from itertools import pairwise
from threading import Thread

import pytest
from shoal.kvstore.config import DeviceConfig, FsyncRule
from shoal.kvstore.core.records import Erased, Location, Refused
from shoal.kvstore.io.device import DirectoryDevice
from shoal.kvstore.io.memory_device import MemoryDevice
from shoal.kvstore.io.record import HEADER_BYTES, stored_bytes

CAPACITY = 2 << 20


def directory(path, fsync=FsyncRule.SEGMENT, segment_bytes=64 << 10) -> DirectoryDevice:
    return DirectoryDevice(DeviceConfig("d0", "n0", str(path / "d0"), CAPACITY), segment_bytes, fsync)


@pytest.fixture(params=["memory", "never", "segment", "always"])
def device(request, tmp_path):
    if request.param == "memory":
        return MemoryDevice(DeviceConfig("d0", "n0", "", CAPACITY))
    return directory(tmp_path, FsyncRule(request.param))


def fragment(number: int, size: int = 9_000) -> tuple[bytes, bytes]:
    return b"head %03d" % number, bytes((number % 251,)) * size


def test_what_is_appended_is_read_and_scanned(device):
    places = [device.append(*fragment(i)) for i in range(20)]
    assert all(isinstance(place, Location) for place in places)
    assert len(set(places)) == 20
    for i, place in enumerate(places):
        assert device.read(place) == b"".join(fragment(i))
    assert list(device.scan()) == [(place, fragment(i)[0]) for i, place in enumerate(places)]
    assert device.usage.fragments == 20
    assert device.usage.stored_bytes == 20 * stored_bytes(9_008)


def test_a_deleted_fragment_is_gone_and_the_others_stay(device):
    places = [device.append(*fragment(i)) for i in range(9)]
    assert [device.delete(place) for place in places[::2]] == [True] * 5
    assert [device.delete(place) for place in places[::2]] == [False] * 5
    assert all(isinstance(device.read(place), Erased) for place in places[::2])
    assert [place for place, _ in device.scan()] == places[1::2]
    assert [device.read(place) for place in places[1::2]] == [b"".join(fragment(i)) for i in range(1, 9, 2)]
    for place in places[1::2]:
        device.delete(place)
    assert device.usage.stored_bytes == device.usage.fragments == 0


def test_a_place_that_is_not_one_is_an_erasure(device):
    place = device.append(*fragment(1))
    for other in (
        Location("d0", 99, 0, 9_008),
        Location("d0", place.segment, place.offset + 4096, 9_008),
        Location("d0", place.segment, 1 << 40, 9_008),
        Location("d0", place.segment, place.offset, 9_007),
    ):
        assert isinstance(device.read(other), Erased)
    assert device.delete(Location("d0", 99, 0, 9_008)) is False


def test_the_cap_is_kept_and_room_comes_back(device):
    places = []
    while isinstance(place := device.append(*fragment(len(places), 100_000)), Location):
        places.append(place)
    assert "full" in place.reason
    assert CAPACITY - 110_000 < device.usage.stored_bytes <= CAPACITY
    assert isinstance(device.append(*fragment(1, 100_000)), Refused)
    device.delete(places[0])
    assert isinstance(device.append(*fragment(1, 100_000)), Location)


def test_threads_append_read_and_delete_together(device):
    wrong = []

    def work(number: int) -> None:
        for turn in range(15):
            place = device.append(*fragment(number * 16 + turn, 3_000))
            is_right = device.read(place) == b"".join(fragment(number * 16 + turn, 3_000))
            if not is_right or (turn % 3 and not device.delete(place)):
                wrong.append(place)

    threads = [Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not wrong
    assert device.usage.fragments == len(list(device.scan())) == 6 * 5


# What only a directory can show.


def test_a_new_start_finds_everything_and_holds_the_cap(tmp_path):
    first = directory(tmp_path)
    places = [first.append(*fragment(i)) for i in range(20)]
    first.delete(places[3])
    usage = first.usage  # never closed: as after a kill
    second = directory(tmp_path)
    assert second.usage == usage
    assert [place for place, _ in second.scan()] == places[:3] + places[4:]
    assert second.read(places[7]) == b"".join(fragment(7))
    assert isinstance(second.read(places[3]), Erased)
    added = second.append(*fragment(99))
    assert added.segment > max(place.segment for place in places)


@pytest.mark.parametrize("cut", [1, 60, 2_000, 9_000, 12_000])
def test_a_torn_tail_is_cut_back_to_the_last_whole_record(tmp_path, cut):
    device = directory(tmp_path)
    places = [device.append(*fragment(i)) for i in range(3)]
    path = tmp_path / "d0" / "0000000001.seg"
    os.truncate(path, places[2].offset + cut if cut < 9_060 else path.stat().st_size - 100)
    again = directory(tmp_path)
    kept = places[:2] if cut < 9_060 else places
    assert [place for place, _ in again.scan()] == kept
    assert path.stat().st_size <= kept[-1].offset + stored_bytes(9_008)
    assert again.read(kept[-1]) == b"".join(fragment(len(kept) - 1))


def test_a_flipped_record_header_costs_only_that_record(tmp_path):
    device = directory(tmp_path)
    places = [device.append(*fragment(i)) for i in range(5)]
    path = tmp_path / "d0" / "0000000001.seg"
    for at in range(HEADER_BYTES + 8):
        raw = bytearray(path.read_bytes())
        raw[places[2].offset + at] ^= 0x08
        other = tmp_path / f"flip{at}" / "d0"
        other.mkdir(parents=True)
        (other / path.name).write_bytes(raw)
        again = directory(tmp_path / f"flip{at}")
        assert [place for place, _ in again.scan()] == places[:2] + places[3:], f"byte {at}"
        assert isinstance(again.read(places[2]), Erased)


def test_a_flipped_head_or_payload_byte_is_an_erasure(tmp_path):
    device = directory(tmp_path)
    places = [device.append(*fragment(i)) for i in range(2)]
    path = tmp_path / "d0" / "0000000001.seg"
    whole = path.read_bytes()
    for at in (HEADER_BYTES + at for at in (0, 3, 7, 8, 9, 4_000, 9_007)):
        raw = bytearray(whole)
        raw[at] ^= 0x80
        path.write_bytes(raw)
        assert "CRC32C differs" in device.read(places[0]).reason, f"byte {at}"
        assert device.read(places[1]) == b"".join(fragment(1))


def test_records_copied_to_another_place_are_not_believed(tmp_path):
    device = directory(tmp_path)
    first, second = [device.append(*fragment(i)) for i in range(2)]
    path = tmp_path / "d0" / "0000000001.seg"
    raw = bytearray(path.read_bytes())
    size = stored_bytes(9_008)
    raw[second.offset : second.offset + size] = raw[first.offset : first.offset + size]
    path.write_bytes(raw)
    assert "belongs to" in device.read(second).reason
    assert [place for place, _ in directory(tmp_path).scan()] == [first]


def test_deleting_gives_space_back_to_the_file_system(tmp_path):
    device = directory(tmp_path)
    places = [device.append(*fragment(i, 30_000)) for i in range(40)]
    device.close()
    files = sorted((tmp_path / "d0").iterdir())
    assert len(files) > 5
    before = sum(path.stat().st_blocks for path in files)
    for one, other in pairwise(places):
        if one.segment == other.segment:
            device.delete(one)
    left = sum(path.stat().st_blocks for path in (tmp_path / "d0").iterdir())
    assert left < 0.75 * before  # holes: segments keep one record each
    for place in places:
        device.delete(place)
    assert list((tmp_path / "d0").iterdir()) == []


def test_a_directory_that_vanishes_takes_no_writes_and_reads_are_erasures(tmp_path):
    device = directory(tmp_path)
    place = device.append(*fragment(1))
    (tmp_path / "d0").rename(tmp_path / "elsewhere")
    assert device.usage.state == "missing"
    assert "missing" in device.append(*fragment(2)).reason
    assert isinstance(device.read(place), Erased)
    assert list(device.scan()) == []
    assert device.delete(place) is True


def test_a_directory_replaced_by_an_empty_one_is_not_written_into_the_void(tmp_path):
    """The open segment's file is gone: an append must not vanish with it."""
    device = directory(tmp_path)
    device.append(*fragment(1))
    (tmp_path / "d0" / "0000000001.seg").unlink()
    assert isinstance(device.append(*fragment(2)), Refused)
    place = device.append(*fragment(3))
    assert device.read(place) == b"".join(fragment(3))


def test_a_path_that_cannot_be_a_directory_is_missing_not_an_exception(tmp_path):
    (tmp_path / "d0").write_text("a file")
    device = directory(tmp_path)
    assert device.usage.state == "missing"
    assert isinstance(device.append(*fragment(1)), Refused)
