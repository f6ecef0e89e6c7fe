"""Replays entries that are one calculation: pools, lengths, rings, layouts and prefill suffixes."""

from collections.abc import Callable
from typing import Any

from shoal.engines.core.acceptance import accepted_prefix
from shoal.engines.core.blocks import Availability, BlockPool
from shoal.engines.core.golden import experts
from shoal.engines.core.golden.outcome import NotYetError, differences
from shoal.engines.core.golden.pipeline import replay_device, replay_redistribute, replay_remap
from shoal.engines.core.inflight import InFlight
from shoal.engines.core.layout import (
    SECTION_ALIGNMENT,
    CacheShape,
    align_up,
    blocks_needed,
    place_sections,
    ring_load,
    ring_select,
    runtime_tokens_max,
    slot_bytes,
    slots_count,
)
from shoal.engines.core.suffix import SuffixChunk, SuffixRows, clip_rows, suffix_rows

Entry = dict[str, Any]


def replay_blocks(entry: Entry) -> list[str]:
    """Operations on one pool; an expected error must raise and leave the pool as it was."""
    pool = BlockPool(entry["config"]["num_blocks"])
    found: list[str] = []
    for index, operation in enumerate(entry["ops"]):
        before = pool.free_ids(), pool.references()
        got: dict[str, Any] = {"op": operation["op"]}
        try:
            got |= _apply(pool, operation)
        except ValueError:
            got["error"] = True
            found += differences(before, (pool.free_ids(), pool.references()), f"op {index} after the error")
        got["free_list_after"] = list(pool.free_ids())
        got["refs_after"] = {str(one): count for one, count in pool.references().items()}
        inputs = {name: operation[name] for name in ("n", "blocks") if name in operation}
        got = {**inputs, **got}
        found += differences(operation, {name: got.get(name) for name in operation}, f"op {index}")
    return found


def _apply(pool: BlockPool, operation: Entry) -> Entry:
    name = operation["op"]
    if name == "allocate":
        status = pool.availability(operation["n"])
        if status is not Availability.OK:
            return {"status": status.value}
        return {"status": status.value, "blocks": pool.allocate(operation["n"])}
    if name == "free":
        pool.free(operation["blocks"])
    elif name == "pin":
        for one in operation["blocks"]:
            pool.pin(one)
    else:
        raise NotYetError(f"pool operation {name}")
    return {}


def replay_inflight(entry: Entry) -> list[str]:
    """Counter operations with the total after each."""
    counter = InFlight()
    found: list[str] = []
    for index, operation in enumerate(entry["ops"]):
        if operation["op"] == "start":
            counter.start(operation["n"])
        else:
            counter.finish()
        found += differences(operation["total"], counter.total, f"op {index}.total")
    return found


def replay_num_blocks(row: Entry) -> Entry:
    """Blocks a sequence must own before it is scheduled."""
    tokens = row["len"] + row["total_inflight"] + row["draft_tokens"]
    return {"num_blocks": blocks_needed(tokens, row["block_size"])}


def replay_runtime_max_model_len(row: Entry) -> Entry:
    """The bound of every position."""
    return {"runtime_max_model_len": runtime_tokens_max(row["max_model_len"], row["nextn"], row["zos"])}


def replay_state_slots(row: Entry) -> Entry:
    """Slots of an engine."""
    return {"slots": slots_count(row["max_num_seqs"], row["ratio"])}


def replay_yoco_clip(row: Entry) -> Entry:
    """Rows that compact truncation drops, and the sampler's row among the rest."""
    clip = clip_rows(row["full_len"], row["start"], row["q"], row["keep_tokens"])
    return {"clip": clip, "rows": row["q"] - clip, "sample_row": row["q"] - clip - 1}


def replay_ring(row: Entry) -> Entry:
    """Selection from a longer ring; loading must undo it."""
    pairs = ring_select(row["end"], row["kv_ring"], row["inference_ring"])
    back = ring_load(row["end"], row["inference_ring"], row["kv_ring"])
    assert sorted((source, target) for target, source in pairs) == list(back), "loading does not undo selecting"
    source_of = dict(pairs)
    first, last = ((row["end"] - back) % row["inference_ring"] for back in (row["inference_ring"], 1))
    return {
        "map": [list(pair) for pair in pairs],
        "first": [first, source_of[first]],
        "last": [last, source_of[last]],
    }


def replay_state_layout(row: Entry) -> Entry:
    """Bytes of a slot with made-up layer counts."""
    width = _swa_row_bytes()
    layers = row["stored_layers"] + row["dropped_layers"]
    inference, kept = (align_up(row[name] * width, SECTION_ALIGNMENT) for name in ("inference_ring", "kv_ring"))
    return {
        "bytes_per_layer_inference": inference,
        "bytes_per_layer_kv": kept,
        "state_size_to_disk": row["stored_layers"] * inference,
        "total_bytes_inference": slot_bytes(layers, row["inference_ring"], width, row["compression_bytes"]),
        "total_bytes_kv": slot_bytes(layers, row["kv_ring"], width, row["compression_bytes"]),
    }


def replay_block_layout(row: Entry) -> Entry:
    """Sections of a block and its padded size."""
    parts = tuple((i, p["kind"], p["ratio"], p["bytes_per_token"]) for i, p in enumerate(row["parts"]))
    layout = place_sections(parts, row["parts"][0]["block_size"])
    return {
        "layout": [[s.kind, s.offset, s.bytes] for s in layout.sections],
        "block_bytes": layout.block_bytes,
    }


def replay_yoco(entry: Entry) -> list[str]:
    """Kept rows of a compact batch and everything about them."""
    rows = _suffix(entry, is_compact=True)
    got = {
        "rows": rows.rows.tolist(),
        "cu_q": rows.row_offsets.tolist(),
        "positions": rows.positions.tolist(),
        "ring_slots": rows.ring_rows.tolist(),
        "visible": rows.visible.tolist(),
    }
    return differences(entry["expect"], got, "expect")


def replay_yoco_mask(entry: Entry) -> list[str]:
    """All rows stay; those that see anything are listed."""
    rows = _suffix(entry, is_compact=False)
    seen = {str(i): v for i, v in enumerate(rows.visible.tolist()) if v[1] or v[3]}
    return differences(entry["expect"], {"total_rows": len(rows.rows), "nonempty": seen}, "expect")


def _suffix(entry: Entry, is_compact: bool) -> SuffixRows:
    config = entry["config"]
    chunks = [
        SuffixChunk(one["full_len"], one["start"], one["q"], one["state"], one.get("swa_valid_start", 0))
        for one in entry["sequences"]
    ]
    return suffix_rows(chunks, config["window"], config["keep_tokens"], config["ring"], is_compact)


def _swa_row_bytes() -> int:
    """The row the layout entries are about: 512 channels."""
    return CacheShape((0,), (), (), 1, 0, window=1, backtracking=0, head_dim=512).swa_row_bytes


def replay_accept(row: Entry) -> Entry:
    """The accepted prefix of one request's rows; the last row has no draft."""
    verified = accepted_prefix(row["draft"][:-1], row["raw_accept"], row["candidate"], row["forced"])
    return {
        "expect": {
            "accepted": list(verified.accepted),
            "num_accepted": len(verified.accepted),
            "sampled": verified.sampled,
        }
    }


ROW_REPLAYS: dict[str, Callable[[Entry], Entry]] = {
    "zos_redistribute": replay_redistribute,
    "accept": replay_accept,
    "num_blocks": replay_num_blocks,
    "runtime_max_model_len": replay_runtime_max_model_len,
    "state_slots": replay_state_slots,
    "yoco_clip": replay_yoco_clip,
    "ring": replay_ring,
    "state_layout": replay_state_layout,
    "block_layout": replay_block_layout,
    **experts.ROW_REPLAYS,
}
ENTRY_REPLAYS: dict[str, Callable[[Entry], list[str]]] = {
    "zos_remap": replay_remap,
    "zos_device": replay_device,
    "blocks": replay_blocks,
    "inflight": replay_inflight,
    "yoco": replay_yoco,
    "yoco_mask": replay_yoco_mask,
    **experts.ENTRY_REPLAYS,
}


def replay_rows(entry: Entry) -> list[str]:
    """Compare every row of a table; a row's inputs are whatever the replay does not give back."""
    compute = ROW_REPLAYS[entry["kind"]]
    found: list[str] = []
    for index, row in enumerate(entry["rows"]):
        got = compute(row)
        # A row may list only some outputs (a long ring lists its ends), but never none.
        expected = {name: row[name] for name in got if name in row}
        if not expected:
            found.append(f"row {index}: names no result among {sorted(got)}")
        found += differences(expected, {name: got[name] for name in expected}, f"row {index}")
    return found
