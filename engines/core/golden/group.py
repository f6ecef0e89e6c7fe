"""Replays votes: several ranks in lock step, and the voting rule as a table."""

from typing import Any

from shoal.engines.config import Role
from shoal.engines.core.golden.outcome import differences
from shoal.engines.core.golden.settings import build_request, build_scheduler
from shoal.engines.core.plan import Ballot, StepKind, StepResult
from shoal.engines.core.scheduler import StepScheduler
from shoal.engines.core.vote import tally

VOTE_MAX_TOKENS = 50  # the schema's constant for prompts of a vote scenario


def replay_vote(entry: dict[str, Any], defaults: dict[str, Any], as_published: bool) -> list[str]:
    """Step all ranks through the rows of `expect`; a row compares the keys it names."""
    settings = {**defaults, "max_tokens": VOTE_MAX_TOKENS, **entry["config"]}
    ranks = [build_scheduler(settings, as_published) for _ in range(settings["ranks"])]
    for rank in ranks:
        rank.decode_step = settings["start_decode_step"]
    found: list[str] = []
    for step, expected in enumerate(entry["expect"]):
        for arrival in entry["arrivals"]:
            if arrival["before_step"] == step:
                _arrive(ranks[arrival["rank"]], arrival, settings)
        got = _step(ranks)
        found += differences(expected, {name: got.get(name) for name in expected}, f"step {step}")
    return found


def replay_vote_table(entry: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Compare each row of the rule table."""
    config, found = entry["config"], []
    for index, row in enumerate(entry["rows"]):
        ballots = [
            Ballot(
                role=Role.NORMAL,
                decode_step=row["decode_step"],
                wants=bool(want),
                has_result=bool(want and got),
                is_idle=False,
                all_interval=config["all_interval"],
                any_interval=config["any_interval"],
                vote_when_idle=False,
            )
            for want, got in zip(row["want"], row["prefill_would_schedule"], strict=True)
        ]
        count = tally(ballots)
        prefill = count.verdict is StepKind.PREFILL
        result = [("prefill" if b.has_result else "empty_prefill") if prefill else "decode" for b in ballots]
        facts = {
            "point": count.point.value,
            "reductions": len(count.contributed[0]),
            "result": result,
            "decode_step_after": 0 if prefill else row["decode_step"] + 1,
        }
        expected = {name: row[name] for name in facts}
        found += differences(expected, facts, f"row {index}")
    return found


def _arrive(rank: StepScheduler, arrival: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, length in arrival.get("prompts", ()):
        rank.submit(build_request({"id": name, "len": length}, settings), now_us=0)
    for name in arrival.get("abort", ()):
        rank.abort(name)


def _step(ranks: list[StepScheduler]) -> dict[str, Any]:
    before = ranks[0].decode_step
    count = tally([rank.ballot(now_us=0) for rank in ranks])
    results = []
    for rank in ranks:
        plan = rank.plan(count.verdict, now_us=0)
        empty = plan.kind is StepKind.PREFILL and not plan.items
        results.append("empty_prefill" if empty else plan.kind.value)
        rank.commit(plan, StepResult([500] * len(plan.items)), now_us=0)
        rank.check()
    return {"decode_step": before, "contributed": [list(one) for one in count.contributed], "result": results}
