"""Replays a trace of one scheduler, operation by operation, and compares every step."""

from typing import Any

from shoal.engines.core.golden.outcome import NotYetError, differences
from shoal.engines.core.golden.pipeline import advance_pipeline
from shoal.engines.core.golden.settings import build_request, build_scheduler, status_of, status_of_end
from shoal.engines.core.plan import Accepted, Ended, Event, Plan, StepKind, StepResult
from shoal.engines.core.request import SamplingParams, TokensEvent
from shoal.engines.core.vote import decide

DEFAULT_CONFIDENCE = 0.5  # the schema's constant for a draft whose confidence a scenario leaves out
EMPTY: dict[str, Any] = {
    "ignored": [],
    "finished": [],
    "clone_states": [],
    "clone_blocks": [],
    "tables": {},
    "processed_previous": {},
    "processed_current": {},
    "zos": {},
}


class TraceReplay:
    """One scheduler and the blocks a scenario holds back from it."""

    def __init__(self, settings: dict[str, Any], as_published: bool) -> None:
        self.settings = settings
        self.scheduler = build_scheduler(settings, as_published)
        self.held: list[int] = []
        self.failing: set[str] = set()  # their grammars fail in the next step
        self.previous: tuple[Plan, StepResult] | None = None  # the open decode step and what its device computes

    def run(self, operations: list[dict[str, Any]]) -> list[str]:
        """Apply all operations; returns the differences of the first that differs, which spoils those after it."""
        for index, operation in enumerate(operations):
            found = self._apply(operation, f"op {index}")
            if found:
                return found
            self.scheduler.check(tuple(self.held))
        return []

    def _apply(self, operation: dict[str, Any], path: str) -> list[str]:
        if "step" in operation:
            if "expect_error" in operation:
                return self._step_that_fails(operation["step"] or {}, path)
            expected = {**EMPTY, **operation.get("expect", {})}
            return differences(expected, {**EMPTY, **self._step(operation["step"] or {})}, path)
        name = next(iter(operation))
        if name == "fork":
            return self._fork(operation["fork"], operation.get("expect", {}), path)
        verb = getattr(self, f"_op_{name}", None)
        if verb is None:
            raise NotYetError(f"operation {name}")
        found: list[str] = verb(operation[name], path)
        return found

    def _fork(self, fields: dict[str, Any], expected: dict[str, Any], path: str) -> list[str]:
        """Branch a sequence; the branch's own prompt is everything so far. A forced first token is the sampler's."""
        ledger = self.scheduler.ledger
        sampling = SamplingParams(max_tokens=fields.get("max_tokens", self.settings["max_tokens"]))
        length = ledger.sequences[fields["parent"]].len
        answer = self.scheduler.fork(fields["parent"], fields["id"], sampling, prompt_len=length)
        if not isinstance(answer, Accepted):
            return [f"{path} fork {fields['id']}: {answer}"]
        branch = ledger.sequences[fields["id"]]
        facts = {
            "queue": "prompted_back" if ledger.arrived and ledger.arrived[-1] is branch else "waiting_front",
            "cached": branch.cached,
            "len": branch.len,
            "prompt_len": branch.prompt_len,
            "table": branch.block_table,
            "state": branch.slot,
            "status": status_of(branch),
        }
        return differences(expected, {name: facts.get(name) for name in expected}, f"{path} fork")

    def _op_add(self, fields: dict[str, Any], path: str) -> list[str]:
        request = build_request(fields, self.settings)
        answer = self.scheduler.submit(request, now_us=0, images_pending=fields.get("multimodal", False))
        got = "accepted" if isinstance(answer, Accepted) else "rejected"
        return differences(fields.get("expect", "accepted"), got, f"{path} add {request.request_id}")

    def _op_abort(self, request_ids: list[str], path: str) -> list[str]:
        for request_id in request_ids:
            self.scheduler.abort(request_id)
        return []

    def _op_set_schedulable(self, request_id: str, path: str) -> list[str]:
        return differences(True, self.scheduler.set_schedulable(request_id), f"{path} set_schedulable")

    def _op_set_status(self, fields: dict[str, Any], path: str) -> list[str]:
        if fields["status"] == "FINISHED_ABORTED":
            done = self.scheduler.abort(fields["id"])
        elif fields["status"] in ("FINISHED_VE_FAILED", "FINISHED_SO_FAILED"):
            done = self.scheduler.fail(fields["id"], fields["status"])
        else:
            raise NotYetError(f"set_status {fields['status']}")
        return differences(True, done, f"{path} set_status")

    def _op_set_so_status(self, fields: dict[str, Any], path: str) -> list[str]:
        if fields["so_status"] < 0:
            self.failing.add(fields["id"])
            return []
        if fields["so_status"] < 1:
            raise NotYetError(f"so_status {fields['so_status']}")
        return differences(True, self.scheduler.set_constrained(fields["id"]), f"{path} set_so_status")

    def _op_hold_blocks(self, count: int, path: str) -> list[str]:
        self.held += self.scheduler.ledger.blocks.allocate(count)
        return []

    def _op_release_held_blocks(self, _: Any, path: str) -> list[str]:
        self.scheduler.ledger.blocks.free(self.held)
        self.held = []
        return []

    def _op_check(self, expected: dict[str, Any], path: str) -> list[str]:
        ledger = self.scheduler.ledger
        facts = {
            "free_blocks": ledger.blocks.free_count,
            "free_state_slots": ledger.slots.free_count,
            "unfinished": self.scheduler.unfinished_count,
            "block_refs": {str(one): count for one, count in ledger.blocks.references().items()},
            "state_refs": {str(one): count for one, count in ledger.slots.references().items()},
        }
        return differences(expected, {name: facts.get(name) for name in expected}, f"{path} check")

    def _step_that_fails(self, outcomes: dict[str, Any], path: str) -> list[str]:
        """The step must raise; whatever follows such a step has no meaning."""
        try:
            got = self._step(outcomes)
        except (AssertionError, ValueError):
            return []
        return [f"{path}: expected an error, got a {got['type']} step"]

    def _step(self, outcomes: dict[str, Any]) -> dict[str, Any]:
        """One engine step with the scenario's sampling results; returns what the schema lists about it."""
        scheduler = self.scheduler
        plan = scheduler.plan(decide([scheduler.ballot(now_us=0)]), now_us=0)
        got = describe_plan(plan)
        got["free_blocks_after_schedule"] = scheduler.ledger.blocks.free_count
        if self.previous is not None:
            plan, correction, events = advance_pipeline(scheduler, self.previous, plan)
            got["zos"] = correction
            got["processed_previous"] = describe_processed(self.previous[0], events)
            self.previous = None
        result = self._result(plan, outcomes)
        if scheduler.rules.pipelined and plan.kind is StepKind.DECODE:
            self.previous = (plan, result)
        else:
            got["processed_current"] = describe_processed(plan, scheduler.commit(plan, result, now_us=0))
        got["waiting"] = [sequence.request_id for sequence in scheduler.ledger.waiting]
        got["decode_step"] = scheduler.decode_step
        return got

    def _result(self, plan: Plan, outcomes: dict[str, Any]) -> StepResult:
        """What the scenario says was sampled; a decode step makes drafts, whatever their ids, a prefill step none."""
        default, drafts = self.settings["default_sampled_token"], self.settings["nextn"]
        if plan.kind is StepKind.PREFILL:
            return StepResult([default] * len(plan.items))
        results = [outcomes.get(i.request_id, {}) for i in plan.items]
        return StepResult(
            sampled=[one.get("token", default) for one in results],
            accepted=[one.get("accept", []) for one in results],
            drafts=[[default + 1 + i for i in range(drafts)] for _ in results],
            confidences=[one.get("confidences", [DEFAULT_CONFIDENCE] * drafts) for one in results],
            failed=tuple((i.request_id, "FINISHED_SO_FAILED") for i in plan.items if i.request_id in self.failing),
        )


def describe_plan(plan: Plan) -> dict[str, Any]:
    """A plan as the schema writes it."""
    return {
        "type": plan.kind.value,
        "batch": [{"id": i.request_id, "q": i.rows, "k": i.end} for i in plan.items],
        "total_q": plan.rows,
        "ignored": _ended(plan.dropped),
        "finished": _ended(plan.finished),
        "clone_states": [list(pair) for pair in plan.clone_slots],
        "clone_blocks": [list(pair) for pair in plan.clone_blocks],
        "tables": {i.request_id: list(i.block_table) for i in plan.items},
    }


def describe_processed(plan: Plan, events: tuple[Event, ...]) -> dict[str, Any]:
    """What processing did to each sequence of the plan."""
    pushed = dict.fromkeys((i.request_id for i in plan.items), 0)
    for event in events:
        if isinstance(event, TokensEvent):
            pushed[event.request_id] += len(event.token_ids)
    return {
        i.request_id: {
            "pushed": pushed[i.request_id],
            "status": status_of(i.sequence),
            "cached": i.sequence.cached,
            "len": i.sequence.len,
        }
        for i in plan.items
    }


def _ended(endings: tuple[Ended, ...]) -> list[list[str]]:
    return [[one.request_id, status_of_end(one.reason, one.detail)] for one in endings]
