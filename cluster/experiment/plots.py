"""Curves of an experiment: a row of plots a trace, hit rate over time to live and over capacity."""

from collections.abc import Sequence
from typing import IO, Any

from shoal.cluster.errors import ShoalError
from shoal.cluster.experiment.points import FIXED, SLIDING, UNLIMITED, Row
from shoal.cluster.quantities import Duration

_LABELS = {SLIDING: "sliding, refreshed on hit", FIXED: "fixed, not refreshed"}


def draw(rows: Sequence[Row], file: IO[bytes]) -> None:
    """Write one PNG; ShoalError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ShoalError("pictures need matplotlib; install shoal[experiments]") from None
    traces = list(dict.fromkeys(str(row["trace"]) for row in rows))
    figure = Figure(figsize=(13, 4.2 * len(traces)), layout="constrained")
    axes: Any = figure.subplots(len(traces), 2, squeeze=False)
    for at, trace in enumerate(traces):
        own = [row for row in rows if row["trace"] == trace]
        ceiling = next(100 * float(row["block_hit_rate"]) for row in own if row["policy"] == UNLIMITED)
        title = f"{trace} ({own[0]['traffic']}, blocks of {own[0]['block_tokens']})"
        title += ", COMPOSED" if own[0]["composed"] else ""
        _curves(axes[at][0], own, (SLIDING, FIXED), "ttl_us", ceiling)
        policies = dict.fromkeys(str(row["policy"]) for row in own if row["capacity_grains"])
        _curves(axes[at][1], own, tuple(policies), "capacity_grains", ceiling)
        axes[at][0].set(title=title, xlabel="time to live, no capacity limit", ylabel="hit rate, % of blocks")
        axes[at][1].set(title=title, xlabel="capacity in blocks, no time to live")
        ticks = sorted({int(row["ttl_us"]) for row in own if row["ttl_us"]})
        axes[at][0].set_xticks(ticks, [str(Duration(tick)) for tick in ticks])
        axes[at][0].minorticks_off()
    figure.savefig(file, format="png", dpi=110)


def _curves(axis: Any, rows: Sequence[Row], policies: Sequence[str], x: str, ceiling: float) -> None:
    for number, policy in enumerate(policies):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: float(row[x]))
        if own:
            heights = [100 * float(row["block_hit_rate"]) for row in own]
            style = {"marker": "o", "markersize": 4, "linestyle": ("-", "--", ":")[number % 3]}  # curves may coincide
            axis.plot([row[x] for row in own], heights, label=_LABELS.get(policy, policy), **style)
    axis.axhline(ceiling, color="grey", linestyle=":", label=f"nothing forgotten: {ceiling:.2f} %")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
