"""`shoal trace describe` and `convert`: what a trace file holds, and the same requests in the Mooncake format."""

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from shoal.cluster.errors import ShoalError
from shoal.cluster.quantities import Duration
from shoal.kvstore.errors import StoreError, TraceError
from shoal.kvstore.trace.formats import START_STEP_US, Format, load_trace, sniff
from shoal.kvstore.trace.packed import Trace
from shoal.kvstore.trace.reuse import LENGTH_PERCENTILES, lengths, measure_reuse, percentile
from shoal.kvstore.trace.servegen import WINDOW_S, read_servegen

trace_app = typer.Typer(name="trace", no_args_is_help=True, help="Read traces of requests: describe, convert.")
TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A Mooncake, Weka, Azure or ServeGen file, or .gz.")]
Block = Annotated[int | None, typer.Option("--block", min=1, help="Tokens of a block (Mooncake 512, Weka 128).")]


@trace_app.command()
def describe(
    file: TraceFile,
    block: Block = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Requests, lengths, span and what a cache could hit. Example: shoal trace describe FILE --json."""
    try:
        found = _describe(file, block)
    except StoreError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        typer.echo(f"{key.replace('_', ' '):<22} {_shown(value)}")


@trace_app.command()
def convert(
    file: TraceFile,
    out: Annotated[Path, typer.Option("--out", help="File to write; .gz compresses.")],
    block: Block = None,
    every: Annotated[str, typer.Option("--every", help="Time between starts of Weka sessions.")] = "5m",
) -> None:
    """Write FILE as Mooncake lines, ids renumbered. Example: shoal trace convert FILE --out day.jsonl.gz."""
    try:
        step_us = int(Duration.parse(every))
    except ValueError as error:
        typer.echo(f"--every {every} {error}", err=True)
        raise typer.Exit(2) from None
    try:
        trace = load_trace(file, block, step_us)
        if not len(trace.grains):
            raise TraceError(file, 1, "file", "has no block ids, so Mooncake lines would claim prefixes nobody knows")
        _write(trace, out)
    except (StoreError, ShoalError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {len(trace):,} requests in blocks of {trace.block_tokens} tokens to {out}")


def _describe(file: Path, block: int | None) -> dict[str, Any]:
    kind = sniff(file)
    if kind is Format.SERVEGEN:
        rates = read_servegen(file)
        days = max(len(r.per_s) for r in rates.values()) * WINDOW_S / 86400 if rates else 0
        return {"format": kind.value, "workloads": sorted(rates), "days": round(days, 3)}
    trace = load_trace(file, block, START_STEP_US)
    found: dict[str, Any] = {
        "format": kind.value,
        "composed": trace.is_composed,
        "requests": len(trace),
        "sessions": int(trace.sessions.max()) + 1 if kind is Format.WEKA and len(trace) else 0,
        "span_s": trace.span_us / 1e6,
        "input_tokens": _lengths(trace.input_tokens),
        "output_tokens": _lengths(trace.output_tokens),
    }
    if len(trace.grains):
        reuse = measure_reuse(trace)
        hits = int(reuse.hits_of.sum())
        found |= {
            "block_tokens": trace.block_tokens,
            "blocks": len(trace.grains),
            "unique_blocks": trace.grains_max,
            "hit_rate_unlimited": round(hits / len(trace.grains), 6),
            "never_hit": reuse.never_hit,
            "reuse_gap_s": _percentiles(reuse.gaps, 1e6),
        }
    return found


def _lengths(values: Any) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 2)} | _percentiles(lengths(values), 1) if len(values) else {}


def _percentiles(counts: Any, unit: float) -> dict[str, float]:
    values = percentile(counts, LENGTH_PERCENTILES)
    return {f"p{share * 100:g}": value / unit for share, value in zip(LENGTH_PERCENTILES, values, strict=False)}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _write(trace: Trace, out: Path) -> None:
    rows = zip(trace.times_us.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    with gzip.open(out, "wt", encoding="utf-8") if out.suffix == ".gz" else out.open("w", encoding="utf-8") as file:
        for (time_us, asked, answered), chain in zip(rows, trace.chains(), strict=True):
            at_ms = time_us // 1000 if time_us % 1000 == 0 else time_us / 1000
            line = {"timestamp": at_ms, "input_length": asked, "output_length": answered, "hash_ids": chain.tolist()}
            file.write(json.dumps(line) + "\n")
