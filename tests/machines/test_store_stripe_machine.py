"""Random stripes against plain bytes: whatever is lost, flipped, cut or exchanged, the answer is right or none."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.kvstore.core.records import Kind, StoredObject, TrafficClass
from shoal.kvstore.core.stripe import Gathering, StripeShape, encode_stripe
from shoal.kvstore.io.checksums import checksums
from shoal.kvstore.io.isal import IsalCode

CODE, SUMS = IsalCode(), checksums()
SIZES = st.lists(st.integers(1, 3_000), min_size=1, max_size=8)
SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 4))
FAULTS = st.lists(st.tuples(st.sampled_from(["lose", "flip", "cut", "exchange"]), st.integers(0, 10**6)), max_size=6)


def made(shape: StripeShape, sizes: list[int], seed: int):
    rng = np.random.default_rng(seed)
    objects = []
    for index, size in enumerate(sizes):
        kind = Kind(1 + index % 2)
        objects.append(StoredObject(kind, rng.bytes(16), rng.bytes(16), index, TrafficClass.AGENT, rng.bytes(size)))
    stripe = encode_stripe(shape, objects, CODE, SUMS)
    return objects, [head + payload for head, payload in zip(stripe.heads, stripe.payloads, strict=True)]


@given(sizes=SIZES, code=SHAPES, faults=FAULTS, seed=st.integers(0, 99), order=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_faults_give_the_same_bytes_or_no_answer(sizes, code, faults, seed, order):
    data, parity = code
    shape = StripeShape(bytes((seed,)) * 16, 5, data, parity, 77)
    objects, raws = made(shape, sizes, seed)
    _, others = made(StripeShape(bytes((seed,)) * 16, 6, data, parity, 77), sizes, seed + 1_000)
    damaged = set()
    for fault, number in faults:
        index = number % len(raws)
        damaged.add(index)
        raw = bytearray(raws[index] or b"")
        if fault == "flip" and raw and raws[index] != others[index]:
            raw[number // 7 % len(raw)] ^= 1 + number % 255
            if index in damaged and bytes(raw) == made(shape, sizes, seed)[1][index]:
                damaged.discard(index)  # flipped back
        raws[index] = {
            "lose": None,
            "flip": bytes(raw),
            "cut": bytes(raw[: number % max(1, len(raw))]),
            "exchange": others[index],
        }[fault]
    gathering = Gathering(shape.stripe_id, 5, (data, parity), CODE, SUMS)
    arrivals = list(range(len(raws)))
    order.shuffle(arrivals)
    for index in arrivals:
        if raws[index] is not None:
            gathering.offer(index, raws[index])
    assert gathering.count == len(raws) - len(damaged)
    if gathering.is_ready:
        found = gathering.decode()
        assert {name: bytes(value) for name, value in found.items()} == {
            (item.kind, item.key): item.payload for item in objects
        }
    else:
        assert len(damaged) > parity
