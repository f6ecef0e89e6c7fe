"""The report: tables for a reader, one JSON document for a machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from shoal.engines.toy.evaluate.acceptance import Acceptance
from shoal.engines.toy.evaluate.goals import Mark, accuracy_key, calibration_key, drop_key, length_key, validity_key
from shoal.engines.toy.evaluate.intervals import Share
from shoal.engines.toy.evaluate.jobs import Settings
from shoal.engines.toy.evaluate.summary import DraftResult, LossResult, PaperResult, Summary

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Report:
    """An examination's settings, its figures, and the seconds it took."""

    settings: Settings
    summary: Summary
    wall_s: float

    def to_json(self) -> str:
        """One document; shares and drops are fractions of 1."""
        settings, summary = self.settings, self.summary
        document = {
            "model": str(settings.directory),
            "mode": str(settings.mode),
            "seed": settings.seed,
            "samples": settings.samples,
            "workers": settings.workers,
            "wall_s": round(self.wall_s, 1),
            "papers": [_paper_json(p) for p in summary.papers],
            "losses": [_loss_json(item) for item in summary.losses],
            "drafts": [_draft_json(d) for d in summary.drafts],
            "goals": [_mark_json(mark) for mark in summary.marks],
        }
        return json.dumps(document, indent=1, ensure_ascii=False)

    def write(self, out: TextIO) -> None:
        """Tables, as wide as the terminal or, into a file, as `WIDTH`."""
        console = Console(file=out, highlight=False, width=None if out.isatty() else WIDTH)
        marks = {mark.goal.key: mark for mark in self.summary.marks}
        s = self.settings
        console.print(f"[bold]{s.directory}[/]  mode {s.mode}, seed {s.seed}, samples {s.samples}", soft_wrap=True)
        if self.summary.papers:
            console.print(_papers_table(self.summary.papers, marks))
        if self.summary.losses:
            console.print(_losses_table(self.summary.losses, marks))
        if self.summary.drafts:
            console.print(_drafts_table(self.summary.drafts, marks))
            for draft in self.summary.drafts:
                console.print(_reliability_table(draft))
        met = sum(mark.is_met for mark in marks.values())
        console.print(f"{met} of {len(marks)} goals met, in {self.wall_s:.0f} s")


def _papers_table(papers: tuple[PaperResult, ...], marks: Mapping[str, Mark]) -> Table:
    table = _table("Answers of the served path", ("paper", "left"))
    for heading in ("asked", "right", "95 % interval", "goal", "well-formed", "goal "):
        table.add_column(heading, justify="right")
    for p in papers:
        low, high = p.right.interval
        table.add_row(
            p.paper,
            str(p.right.count),
            _percent(p.right.value),
            f"{low * 100:.0f} – {high * 100:.0f} %",
            _verdict(marks.get(accuracy_key(p.paper)), percent=True),
            _percent(p.valid.value),
            _verdict(marks.get(validity_key(p.paper)), percent=True),
        )
    return table


def _losses_table(losses: tuple[LossResult, ...], marks: Mapping[str, Mark]) -> Table:
    table = _table("One kind lost after every step", ("lost", "left"))
    table.add_column("paper")
    for heading in ("asked", "intact", "lost ", "drop", "goal", "answers changed"):
        table.add_column(heading, justify="right")
    for item in losses:
        table.add_row(
            item.loss.value,
            item.paper,
            str(item.lost.count),
            _percent(item.intact.value),
            _percent(item.lost.value),
            f"{item.drop * 100:.1f} points",
            _verdict(marks.get(drop_key(item.loss)), percent=True),
            _percent(item.changed.value),
        )
    return table


def _drafts_table(drafts: tuple[DraftResult, ...], marks: Mapping[str, Mark]) -> Table:
    table = _table("Drafts over the mixture", ("", "left"))
    for draft in drafts:
        table.add_column(draft.choice, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("steps", [str(d.acceptance.steps) for d in drafts]),
        ("accepted drafts a step", [f"{d.acceptance.drafts:.2f} of {len(d.acceptance.judged)}" for d in drafts]),
        ("accepted length, with the bonus token", [f"{d.acceptance.length:.2f}" for d in drafts]),
        ("  goal", [_verdict(marks.get(length_key(d.choice))) for d in drafts]),
        ("tokens a step, cut by the ends of answers", [f"{d.acceptance.served:.2f}" for d in drafts]),
        ("  a drafter that is always right", [f"{d.acceptance.best:.2f}" for d in drafts]),
        ("answers equal to those without drafts", [_of(d.same.value, d.same.count) for d in drafts]),
        *_position_rows([d.acceptance for d in drafts]),
        ("calibration error", [f"{d.acceptance.calibration_error:.3f}" for d in drafts]),
        ("  goal", [_verdict(marks.get(calibration_key(d.choice))) for d in drafts]),
        *(
            (f"length on {name}", [f"{dict(d.lengths)[name]:.2f}" for d in drafts])
            for name, _ in drafts[0].lengths
        ),
    ]  # fmt: skip
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _position_rows(drafts: list[Acceptance]) -> list[tuple[str, list[str]]]:
    """Acceptance of each draft among those that were judged."""
    return [
        (f"draft {i + 1} accepted, if judged", [_of(a.by_position[i], a.judged[i]) for a in drafts])
        for i in range(len(drafts[0].judged))
    ]


def _reliability_table(draft: DraftResult) -> Table:
    table = _table(f"Confidence, {draft.choice}: ten bins of equal width over judged drafts", ("confidence", "left"))
    for heading in ("drafts", "mean confidence", "accepted"):
        table.add_column(heading, justify="right")
    for b in draft.acceptance.bins:
        table.add_row(f"{b.low:.1f} – {b.high:.1f}", str(b.count), _percent(b.confidence), _percent(b.accepted))
    return table


def _table(title: str, first: tuple[str, Any]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.min_width = cell_len(title)
    table.add_column(first[0], justify=first[1])
    return table


def _verdict(mark: Mark | None, percent: bool = False) -> str:
    """The goal with its mark, or nothing where there is none."""
    if mark is None:
        return ""
    sign, bound = mark.goal.wanted.split()
    shown = f"{sign} {float(bound) * 100:g} %" if percent else mark.goal.wanted
    return f"[green]{shown} met[/]" if mark.is_met else f"[red]{shown} missed[/]"


def _of(share: float, count: int) -> str:
    return f"{_percent(share)} of {count}" if count else "none"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _paper_json(result: PaperResult) -> dict[str, Any]:
    right, valid = _share_json(result.right), _share_json(result.valid)
    return {"paper": result.paper, "samples": result.right.count, "accuracy": right, "validity": valid}


def _loss_json(result: LossResult) -> dict[str, Any]:
    return {
        "lost": result.loss.value,
        "paper": result.paper,
        "samples": result.lost.count,
        "accuracy_intact": _share_json(result.intact),
        "accuracy_lost": _share_json(result.lost),
        "drop": result.drop,
        "answers_changed": result.changed.value,
    }


def _draft_json(result: DraftResult) -> dict[str, Any]:
    found = result.acceptance
    return {
        "choice": result.choice,
        "steps": found.steps,
        "tokens": found.tokens,
        "accepted_drafts": found.drafts,
        "accepted_length": found.length,
        "tokens_per_step": found.served,
        "tokens_per_step_best": found.best,
        "acceptance_by_position": list(found.by_position),
        "judged_by_position": list(found.judged),
        "calibration_error": found.calibration_error,
        "reliability": [
            {"low": b.low, "high": b.high, "drafts": b.count, "confidence": b.confidence, "accepted": b.accepted}
            for b in found.bins
        ],
        "accepted_length_by_paper": dict(result.lengths),
        "answers_equal_without_drafts": {"answers": result.same.count, "value": result.same.value},
    }


def _share_json(share: Share) -> dict[str, Any]:
    return {"value": share.value, "interval": list(share.interval)}


def _mark_json(mark: Mark) -> dict[str, Any]:
    goal = mark.goal
    rule = "at_most" if goal.is_ceiling else "at_least"
    return {"figure": goal.key, rule: goal.bound, "found": mark.found, "is_met": mark.is_met}
