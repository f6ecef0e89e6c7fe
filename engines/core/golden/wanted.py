"""What a correct engine does in the entries marked `defect`, written out from the text of each defect.

Keys are entry ids. A value replaces those keys of the entry that it names: `ops` of a trace, `expect` of a vote
(whose rows compare only the keys they name). The fixtures themselves keep what the published engine does.
"""

from typing import Any

_IDLE = {"type": "decode", "batch": [], "total_q": 0, "waiting": []}


def _processed(pushed: int, status: str, cached: int, length: int) -> dict[str, Any]:
    return {"pushed": pushed, "status": status, "cached": cached, "len": length}


def _prefill(name: str, rows: int, end: int, table: list[int], free: int, processed: dict[str, Any]) -> dict[str, Any]:
    """A prefill step of one sequence; an unfinished prompt waits on."""
    return {
        "type": "prefill",
        "batch": [{"id": name, "q": rows, "k": end}],
        "total_q": rows,
        "tables": {name: table},
        "free_blocks_after_schedule": free,
        "processed_current": {name: processed},
        "waiting": [name] if processed["status"] == "WAITING" else [],
        "decode_step": 0,
    }


_A, _B, _C = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]
_R, _P = list(range(1, 11)), list(range(11, 19))

WANTED: dict[str, dict[str, Any]] = {
    # "a better engine removes dead requests before it votes (decode here)"
    "vote-04-dead-request-runs-a-prefill": {
        "expect": [{"decode_step": step, "result": ["decode", "decode"]} for step in (3, 4, 5, 6)]
    },
    # "an engine whose group has no running sequence should vote on every step": the prompt runs as it arrives
    "vote-05-idle-latency": {
        "expect": [
            {"decode_step": 0, "result": ["decode"]},
            {"decode_step": 1, "result": ["prefill"]},
            {"decode_step": 0, "result": ["decode"]},
            {"decode_step": 1, "result": ["decode"]},
            {"decode_step": 2, "result": ["decode"]},
        ]
    },
    # "a fair engine keeps waiting = [a, b, c] after the first step"
    "prefill-17-prompt-engine-requeue-order": {
        "ops": [
            {"add": {"id": "a", "len": 70, "chunk_checkpoints": [32]}},
            {"add": {"id": "b", "len": 70, "chunk_checkpoints": [48]}},
            {"add": {"id": "c", "len": 70}},
            {
                "step": {},
                "expect": {
                    "type": "prefill",
                    "batch": [
                        {"id": "a", "q": 32, "k": 32},
                        {"id": "b", "q": 48, "k": 48},
                        {"id": "c", "q": 48, "k": 48},
                    ],
                    "total_q": 128,
                    "tables": {"a": _A, "b": _B, "c": _C},
                    "free_blocks_after_schedule": 84,
                    "processed_current": {
                        "a": _processed(0, "WAITING", 32, 70),
                        "b": _processed(0, "WAITING", 48, 70),
                        "c": _processed(0, "WAITING", 48, 70),
                    },
                    "waiting": ["a", "b", "c"],
                    "decode_step": 0,
                },
            },
            {
                "step": {},
                "expect": {
                    "type": "prefill",
                    "batch": [
                        {"id": "a", "q": 38, "k": 70},
                        {"id": "b", "q": 22, "k": 70},
                        {"id": "c", "q": 22, "k": 70},
                    ],
                    "total_q": 82,
                    "tables": {"a": _A, "b": _B, "c": _C},
                    "free_blocks_after_schedule": 84,
                    "processed_current": {name: _processed(1, "RUNNING", 70, 71) for name in ("a", "b", "c")},
                    "waiting": [],
                    "decode_step": 0,
                },
            },
        ]
    },
    # "the new engine must reject the request (prompt_length_exceeded or bad request) and go on"
    "prefill-19-image-larger-than-budget": {
        "ops": [
            {
                "add": {
                    "id": "a",
                    "tokens": [[10, 2], ["image", 1], ["image_pad", 40], [12, 5]],
                    "expect": "rejected",
                }
            },
            {"step": {}, "expect": {**_IDLE, "free_blocks_after_schedule": 63, "decode_step": 1}},
            {"add": {"id": "b", "len": 5}},
            {"step": {}, "expect": _prefill("b", 5, 5, [1], 62, _processed(1, "RUNNING", 5, 6))},
        ]
    },
    # "sharing the full block and appending a fresh one is enough"
    "fork-03-aligned-tail": {
        "ops": [
            {"add": {"id": "p", "len": 32, "max_tokens": 1}},
            {"step": {}, "expect": _prefill("p", 32, 32, [1, 2], 61, _processed(1, "FINISHED_LENGTH_CAPPED", 32, 33))},
            {
                "fork": {"parent": "p", "id": "f1", "branch": "_x", "max_tokens": 4},
                "expect": {"queue": "prompted_back", "cached": 32, "len": 33, "table": [1, 2], "state": 1},
            },
            {
                "step": {},
                "expect": {
                    "type": "decode",
                    "batch": [{"id": "f1", "q": 1, "k": 33}],
                    "total_q": 1,
                    "finished": [["p", "FINISHED_LENGTH_CAPPED"]],
                    "clone_states": [[1, 2]],
                    "tables": {"f1": [1, 2, 3]},
                    "free_blocks_after_schedule": 60,
                    "processed_current": {"f1": _processed(1, "RUNNING", 33, 34)},
                    "waiting": [],
                    "decode_step": 1,
                },
            },
            {"check": {"block_refs": {"1": 1, "2": 1, "3": 1}, "state_refs": {"2": 1}}},
        ]
    },
    # "a better engine always lets a half-done prompt go on (prefill of p, 56 tokens, on the fifth step)"
    "prefill-21-half-done-above-watermark": {
        "ops": [
            {"add": {"id": "r", "len": 150, "max_tokens": 60}},
            {"step": {}, "expect": _prefill("r", 64, 64, _R, 9, _processed(0, "WAITING", 64, 150))},
            {"step": {}, "expect": _prefill("r", 64, 128, _R, 9, _processed(0, "WAITING", 128, 150))},
            {"step": {}, "expect": _prefill("r", 22, 150, _R, 9, _processed(1, "RUNNING", 150, 151))},
            {"add": {"id": "p", "len": 120, "max_tokens": 9}},
            {"step": {}, "expect": _prefill("p", 64, 64, _P, 1, _processed(0, "WAITING", 64, 120))},
            {"step": {}, "expect": _prefill("p", 56, 120, _P, 1, _processed(1, "RUNNING", 120, 121))},
            {
                "step": {},
                "expect": {
                    "type": "decode",
                    "batch": [{"id": "r", "q": 1, "k": 151}, {"id": "p", "q": 1, "k": 121}],
                    "total_q": 2,
                    "tables": {"r": _R, "p": _P},
                    "free_blocks_after_schedule": 1,
                    "processed_current": {
                        "r": _processed(1, "RUNNING", 151, 152),
                        "p": _processed(1, "RUNNING", 121, 122),
                    },
                    "waiting": [],
                    "decode_step": 1,
                },
            },
        ]
    },
}
