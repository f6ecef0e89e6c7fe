"""Results of an experiment as files: Parquet, a PNG of its curves, and one HTML page that needs nothing beside it."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from shoal.cluster.errors import ShoalError
from shoal.cluster.experiment.plots import draw
from shoal.cluster.experiment.points import Row

_SHOWN = (
    "trace", "traffic", "policy", "ttl", "capacity_grains", "block_hit_rate", "token_hit_rate", "hit_blocks",
    "object_hits", "live_peak", "live_mean", "references_per_s",
)  # fmt: skip
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}img{max-width:100%}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;"
    "text-align:right}td:nth-child(-n+4),th:nth-child(-n+4){text-align:left}pre{background:#f4f4f4;padding:1em}"
)


def write_report(name: str, manifest: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write `name`.parquet, .png and .html into the folder (made if absent); the paths written.

    `manifest` is the experiment's text, shown on the page. ShoalError if pyarrow or matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("parquet", "png", "html")]
    _write_parquet(rows, paths[0])
    picture = io.BytesIO()
    draw(rows, picture)
    paths[1].write_bytes(picture.getvalue())
    paths[2].write_text(_page(name, manifest, rows, picture.getvalue()), encoding="utf-8")
    return paths


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ShoalError("results need pyarrow; install shoal[experiments]") from None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def _page(name: str, manifest: str, rows: Sequence[Row], picture: bytes) -> str:
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in _SHOWN)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[c])}</td>" for c in _SHOWN) + "</tr>\n" for row in rows)
    source = base64.b64encode(picture).decode()
    note = (
        "Every request is looked up and then written at its arrival; a hit is a leading resident block, all others "
        "are misses. Traces are replayed through the policies of kvstore/core/policy."
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(name)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(name)}</h1><p>{note}</p>"
        f"<img alt='hit rate curves' src='data:image/png;base64,{source}'>"
        f"<h2>All points</h2><table><tr>{head}</tr>\n{body}</table>"
        f"<h2>Manifest</h2><pre>{html.escape(manifest)}</pre></html>\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value <= 1 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else html.escape(str(value))
