"""Chain keys: golden values, and no two different inputs under one key."""

import dataclasses
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pytest
from shoal.engines.core.request import ImageSpan
from shoal.kvstore.core.chain import Namespace, chain_keys, extend_chain, root_key
from shoal.kvstore.errors import ObjectError

PLAIN = Namespace("deepseek-v4.1-flash", "abc123", "v41-blocks-1", "N1")
FULL = Namespace("m", "r", "f", "N2", "keep=140", "lora-7", b"tenant\x00salt")
TOKENS = list(range(300))
SPAN = ImageSpan(start=100, length=62, grid_rows=5, grid_columns=11, digest=b"\x01" * 32)
GOLDEN = {
    "plain": "fd46727b956a77ac09d40b8aae007d1f,5259d625364092c4cd46b95fcacd38ab",
    "full": "15491cf742afe8d0e642b124987c7c42,180ac0f5fcf785939d8d4a338ca8b046",
    "image": "c42587d6135a1dd12b6c7eb6c0dc8a06,8a42a74cec2e128a8d660ba86e1ba26e",
}


def test_golden_keys_never_change():
    """A change of these values orphans every store in use: raise CHAIN_VERSION instead."""
    assert ",".join(k.hex() for k in chain_keys(PLAIN, TOKENS)) == GOLDEN["plain"]
    assert ",".join(k.hex() for k in chain_keys(FULL, TOKENS)) == GOLDEN["full"]
    assert ",".join(k.hex() for k in chain_keys(PLAIN, TOKENS, [SPAN])) == GOLDEN["image"]


def test_keys_are_the_documented_bytes():
    """The layout spelled out a second time, byte by byte."""

    def field(name: bytes, kind: bytes, raw: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + kind + struct.pack("<Q", len(raw)) + raw

    fields = [
        (b"model", b"S", b"m"),
        (b"revision", b"S", b"r"),
        (b"kv_format", b"S", b"f"),
        (b"precision", b"S", b"N2"),
    ]
    fields += [(b"truncation", b"S", b"keep=140"), (b"adapter", b"S", b"lora-7")]
    fields += [(b"tenant_salt", b"B", b"tenant\x00salt")]
    body = b"".join(field(*item) for item in fields)
    key = sha256(b"shoal chain root" + struct.pack("<II", 1, 128) + body).digest()[:16]
    assert root_key(FULL) == key
    span = struct.pack("<8sqqIII", b"image", 100, 62, 5, 11, 32) + b"\x01" * 32
    next_span = struct.pack("<8sqqIII", b"image", -28, 62, 5, 11, 32) + b"\x01" * 32
    for grain, image in ((0, span), (1, next_span)):
        tokens = struct.pack("<128I", *TOKENS[grain * 128 : grain * 128 + 128])
        key = sha256(b"grain\0\0\0" + key + struct.pack("<II", 128, 1) + tokens + image).digest()[:16]
        assert chain_keys(FULL, TOKENS, [SPAN])[grain] == key


def test_another_process_with_another_hash_seed_makes_the_same_keys():
    code = (
        "from shoal.kvstore.core.chain import *\n"
        "ns = Namespace('deepseek-v4.1-flash', 'abc123', 'v41-blocks-1', 'N1')\n"
        "print(','.join(k.hex() for k in chain_keys(ns, list(range(300)))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == GOLDEN["plain"]


def test_only_full_grains_have_keys_and_a_prefix_keeps_its_keys():
    keys = chain_keys(PLAIN, TOKENS)
    assert len(keys) == 2
    assert chain_keys(PLAIN, TOKENS[:255]) == keys[:1]
    assert chain_keys(PLAIN, TOKENS[:127]) == ()
    assert chain_keys(PLAIN, np.array(TOKENS)) == chain_keys(PLAIN, np.array(TOKENS, dtype=np.int32)) == keys


def test_extending_equals_hashing_from_the_start():
    tokens = list(range(128 * 5))
    spans = [dataclasses.replace(SPAN, start=250, length=200)]
    whole = chain_keys(PLAIN, tokens, spans)
    moved = [dataclasses.replace(spans[0], start=250 - 256)]
    assert extend_chain(whole[1], tokens[256:], moved) == whole[2:]


def test_every_field_of_a_namespace_separates():
    variants = [FULL]
    for field in dataclasses.fields(Namespace):
        value = getattr(FULL, field.name)
        variants.append(dataclasses.replace(FULL, **{field.name: value + (b"x" if isinstance(value, bytes) else "x")}))
    variants += [dataclasses.replace(FULL, adapter=None), dataclasses.replace(FULL, adapter="")]
    # Bytes moved from one field to its neighbour, and a salt that spells an adapter.
    variants += [Namespace("mr", "", "f", "N2", "keep=140", "lora-7", b"tenant\x00salt")]
    variants += [dataclasses.replace(FULL, adapter=None, tenant_salt=b"lora-7")]
    variants += [dataclasses.replace(FULL, adapter="lora-7", tenant_salt=b"")]
    keys = [chain_keys(space, TOKENS)[0] for space in variants] + [root_key(FULL, 64)]
    assert len(set(keys)) == len(keys)


def test_every_property_of_an_image_separates_and_only_from_its_first_grain_on():
    tokens = [5] * 512
    base = ImageSpan(start=200, length=62, grid_rows=5, grid_columns=11, digest=b"a" * 32)
    changes = [{}, {"start": 201}, {"length": 63}, {"grid_rows": 11, "grid_columns": 5}, {"digest": b"b" * 32}]
    changes += [{"digest": b"a" * 31}, {"start": 72}]
    prompts = [chain_keys(PLAIN, tokens, [dataclasses.replace(base, **change)]) for change in changes]
    prompts += [chain_keys(PLAIN, tokens), chain_keys(PLAIN, tokens, [base, dataclasses.replace(base, start=300)])]
    assert len({keys[-1] for keys in prompts}) == len(prompts)
    assert prompts[0][0] == prompts[7][0]  # grain 0 has no image
    assert prompts[0][1:] != prompts[7][1:]
    assert prompts[0][1] == prompts[8][1]  # the second image starts in grain 2
    assert prompts[0][2] != prompts[8][2]


def test_order_of_spans_does_not_matter():
    first, second = ImageSpan(10, 20, 2, 8, b"x"), ImageSpan(60, 20, 2, 8, b"y")
    assert chain_keys(PLAIN, TOKENS, [first, second]) == chain_keys(PLAIN, TOKENS, [second, first])


@dataclass
class _Bad:
    tokens: object
    words: str


@pytest.mark.parametrize(
    "bad",
    [
        _Bad([1, -1], "from 0 to 2\\^32"),
        _Bad([2**32], "from 0 to 2\\^32"),
        _Bad([1.5], "must be integers"),
        _Bad(np.array([-1]), "must lie in 0"),
        _Bad(np.zeros((2, 2), dtype=int), "one row of integers"),
    ],
)
def test_tokens_that_are_no_tokens_are_refused(bad):
    with pytest.raises(ObjectError, match=bad.words):
        chain_keys(PLAIN, bad.tokens)


def test_an_image_without_digest_is_refused():
    with pytest.raises(ObjectError, match="must not be empty"):
        chain_keys(PLAIN, TOKENS, [dataclasses.replace(SPAN, digest=b"")])
