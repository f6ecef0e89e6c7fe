"""Stripes: every two-loss pattern decodes, and nothing that is not exactly of the stripe ever counts."""

from itertools import combinations

import numpy as np
import pytest
from shoal.kvstore.core.records import Erased, Kind, Miss, StoredObject, TrafficClass
from shoal.kvstore.core.stripe import Gathering, StripeShape, encode_stripe, open_fragment, read_head
from shoal.kvstore.errors import CodeLibraryError, ObjectError
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.io.isal import IsalCode, library_candidates, load_library

CODE, SUMS = IsalCode(), checksums()
SHAPE = StripeShape(b"S" * 16, 3, 10, 2, 1234)


def objects(count: int = 3, seed: int = 0, size: int = 5_000) -> list[StoredObject]:
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(16) for _ in range(count + 1)]
    made = []
    for index in range(count):
        kind = Kind.ANCHOR if index == count - 1 and count > 1 else Kind.GRAIN
        payload = rng.bytes(size + 777 * index)
        made.append(StoredObject(kind, keys[index + 1], keys[index], index, TrafficClass.AGENT, payload))
    return made


def fragments(stripe) -> list[bytes]:
    return [head + payload for head, payload in zip(stripe.heads, stripe.payloads, strict=True)]


def gather(raws: dict[int, bytes], shape=SHAPE) -> Gathering:
    gathering = Gathering(shape.stripe_id, shape.generation, (shape.data, shape.parity), CODE, SUMS)
    for index, raw in raws.items():
        gathering.offer(index, raw)
    return gathering


def decoded(raws: dict[int, bytes], shape=SHAPE) -> dict:
    found = gather(raws, shape).decode()
    return {name: bytes(value) if isinstance(value, memoryview) else value for name, value in found.items()}


def expected(items) -> dict:
    return {(item.kind, item.key): bytes(item.payload) for item in items}


def test_all_66_two_loss_patterns_give_the_same_bytes():
    items = objects()
    raws = fragments(encode_stripe(SHAPE, items, CODE, SUMS))
    patterns = list(combinations(range(12), 2))
    assert len(patterns) == 66
    for lost in patterns:
        assert decoded({i: raw for i, raw in enumerate(raws) if i not in lost}) == expected(items)


def test_three_losses_are_not_enough():
    raws = fragments(encode_stripe(SHAPE, objects(), CODE, SUMS))
    assert not gather({i: raws[i] for i in range(9)}).is_ready


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 1), (3, 3), (4, 2), (6, 3), (12, 3), (16, 4), (20, 1)])
def test_other_shapes(data, parity):
    shape = StripeShape(b"T" * 16, 1, data, parity, 0)
    items = objects(5, seed=data)
    raws = fragments(encode_stripe(shape, items, CODE, SUMS))
    rng = np.random.default_rng(parity)
    for _ in range(10):
        kept = rng.choice(data + parity, data, replace=False)
        assert decoded({int(i): raws[i] for i in kept}, shape) == expected(items)


def multiply(a: int, b: int) -> int:
    """Product in GF(2^8), polynomial 0x11d, bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def test_parity_is_the_cauchy_code_by_schoolbook_arithmetic():
    """Row i, column j of the parity matrix is 1 / (i xor j), i from k: what the code name promises."""
    rows = np.random.default_rng(5).integers(0, 256, (10, 64), dtype=np.uint8)
    parity = np.empty((2, 64), dtype=np.uint8)
    CODE.encode(rows, parity)
    inverse = {a: b for a in range(1, 256) for b in range(1, 256) if multiply(a, b) == 1}
    for at in range(2):
        for column in range(0, 64, 9):
            value = 0
            for source in range(10):
                value ^= multiply(inverse[(10 + at) ^ source], int(rows[source, column]))
            assert parity[at, column] == value


def test_every_header_byte_flipped_is_an_erasure():
    raw = fragments(encode_stripe(SHAPE, objects(2, size=64), CODE, SUMS))[4]
    head = read_head(raw, SUMS)
    for at in range(head.head_bytes):
        flipped = bytearray(raw)
        flipped[at] ^= 0x40
        assert isinstance(open_fragment(bytes(flipped), SUMS), Erased), f"byte {at}"


def test_payload_flips_truncation_and_extension_are_erasures():
    raw = fragments(encode_stripe(SHAPE, objects(), CODE, SUMS))[11]
    start = read_head(raw, SUMS).head_bytes
    for at in (start, start + 1, (start + len(raw)) // 2, len(raw) - 1):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        assert isinstance(open_fragment(bytes(flipped), SUMS), Erased)
    for cut in (0, 1, 50, start - 1, start, len(raw) - 1):
        assert isinstance(open_fragment(raw[:cut], SUMS), Erased)
    assert isinstance(open_fragment(raw + b"\0", SUMS), Erased)


def test_corrupt_fragments_count_as_losses():
    items = objects()
    raws = dict(enumerate(fragments(encode_stripe(SHAPE, items, CODE, SUMS))))
    for index in (0, 7):
        raws[index] = raws[index][:-1] + bytes((raws[index][-1] ^ 1,))
    assert decoded(raws) == expected(items)


def test_swapped_fragments_are_erasures():
    ours = fragments(encode_stripe(SHAPE, objects(seed=1), CODE, SUMS))
    theirs = fragments(encode_stripe(StripeShape(b"U" * 16, 3, 10, 2, 1234), objects(seed=1), CODE, SUMS))
    gathering = gather({})
    assert "expected 3 of" in gathering.offer(3, theirs[3]).reason
    assert "expected 3 of" in gathering.offer(3, ours[4]).reason  # right stripe, wrong index
    assert gathering.offer(3, ours[3]) is None
    assert gathering.count == 1


def test_generations_never_mix():
    """Two generations with the same id and objects of other lengths: the decode uses one of them only."""
    old_items, new_items = objects(seed=2), objects(seed=3, size=6_000)
    old = fragments(encode_stripe(SHAPE, old_items, CODE, SUMS))
    newer = StripeShape(SHAPE.stripe_id, 4, 10, 2, 1234)
    new = fragments(encode_stripe(newer, new_items, CODE, SUMS))
    mixed = {i: (old if i < 6 else new)[i] for i in range(12)}
    assert not gather(mixed, SHAPE).is_ready
    assert not gather(mixed, newer).is_ready
    assert decoded({**dict(enumerate(new)), 0: old[0], 11: old[11]}, newer) == expected(new_items)


def test_one_identity_with_two_contents_is_refused():
    """A writer that reused id and generation: fragments that disagree about the objects never meet in a decode."""
    first = fragments(encode_stripe(SHAPE, objects(seed=4), CODE, SUMS))
    second = fragments(encode_stripe(SHAPE, objects(seed=5), CODE, SUMS))
    gathering = gather({i: first[i] for i in range(9)})
    assert "disagrees" in gathering.offer(9, second[9]).reason
    assert not gathering.is_ready


def test_a_payload_that_is_not_its_keys_is_a_miss():
    """All CRCs right, yet the table names another key: the checksum bound to the key finds it."""
    items = objects()
    wrong = SUMS.__class__(SUMS.crc32c, lambda prefix, buffer: bytes(16))
    raws = fragments(encode_stripe(SHAPE, items, CODE, wrong))
    found = decoded(dict(enumerate(raws)))
    assert all(isinstance(value, Miss) and "does not belong" in value.reason for value in found.values())


def test_the_bound_checksum_depends_on_key_and_kind():
    payload = b"x" * 100
    bound = {SUMS.bind(kind, key, payload) for kind in Kind for key in (b"a" * 16, b"b" * 16)}
    assert len(bound) == 4


def test_objects_that_cannot_be_stored_are_refused():
    good = objects(1)[0]
    for bad, words in (
        (StoredObject(good.kind, b"short", good.parent, 0, good.traffic, b"x"), "must be 16"),
        (StoredObject(good.kind, good.key, good.parent, -1, good.traffic, b"x"), "grain_index"),
        (StoredObject(good.kind, good.key, good.parent, 0, good.traffic, b""), "not empty"),
    ):
        with pytest.raises(ObjectError, match=words):
            encode_stripe(SHAPE, [bad], CODE, SUMS)


def test_a_missing_library_names_both_remedies(tmp_path):
    broken = tmp_path / "libisal.so"
    broken.write_bytes(b"no library")
    with pytest.raises(CodeLibraryError, match=r"apt install libisal2.*pip install pyeclib"):
        load_library([str(broken)])
    with pytest.raises(CodeLibraryError, match="none found"):
        load_library([])


def test_the_library_inside_the_wheel_is_found():
    """The private file name may change with pyeclib: then this test says so."""
    inside = [path for path in library_candidates() if "pyeclib" in path]
    assert inside
    data, parity, rebuilt = (
        np.ones((2, 64), dtype=np.uint8),
        np.empty((1, 64), dtype=np.uint8),
        np.empty(64, dtype=np.uint8),
    )
    code = IsalCode(load_library(inside))
    code.encode(data, parity)
    code.rebuild({1: data[1], 2: parity[0]}, {0: rebuilt}, 1)
    assert rebuilt.tolist() == [1] * 64
