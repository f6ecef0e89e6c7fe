"""`shoal demo`: a cluster comes up, answers a chat with an image three times, and goes away again.

The second answer comes from the stored prefix, the third from a store that has lost two of its twelve devices. All
three must be the same text: greedy answers do not depend on where their KV came from.
"""

import base64
import io
import shutil
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image, ImageDraw
from shoal.cluster.commands.client import Reply, chat_once, message, story
from shoal.cluster.commands.operate import end, start
from shoal.cluster.commands.running import FAILED, friendly_errors, make_spec
from shoal.cluster.commands.story import story_lines
from shoal.cluster.commands.validate import load
from shoal.cluster.live.clock import monotonic_s, sleep_s
from shoal.cluster.live.session import free_port
from shoal.cluster.live.spec import ClusterSpec

MANIFEST = Path("manifests/local.yaml")
PICTURE_SIDE = 168
ANSWER_TOKENS = 48
SAVE_WAIT_S = 10.0
LINE = (
    "Shoal serves a model from a cluster of roles: encoders look at pictures, PROMPT engines read, COMPLETION engines "
    "write, and a store keeps what was read. "
)

Manifest = Annotated[Path, typer.Option("--manifest", help="Which cluster to show.")]
KeepPort = Annotated[bool, typer.Option("--fixed-port", help="Use the manifest's port instead of a free one.")]


def demo(manifest: Manifest = MANIFEST, fixed_port: KeepPort = False) -> None:
    """Bring a cluster up, ask it three times, show each answer's story, take it down. Example: shoal demo."""
    with friendly_errors():
        started_s = monotonic_s()
        run_dir = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
        try:
            spec = _spec(manifest, run_dir, fixed_port)
            session, endpoint = start(spec, None)
            try:
                typer.secho(f"ready after {monotonic_s() - started_s:.1f} s at {endpoint}\n", bold=True)
                replies = _tell(spec, endpoint)
            finally:
                end(session)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        _judge(replies)
        typer.secho(f"everything is down again; the demo took {monotonic_s() - started_s:.0f} s", bold=True)


def _spec(manifest: Path, run_dir: Path, fixed_port: bool) -> ClusterSpec:
    cluster, _ = load(manifest)
    port = cluster.api.port if fixed_port else free_port()
    cluster = replace(cluster, name=f"{cluster.name}-demo", api=replace(cluster.api, port=port))
    if cluster.store is not None:
        # Nothing in host memory: the third answer is to come off ten of twelve devices, and be seen to.
        cluster = replace(cluster, store=replace(cluster.store, host_cache_bytes=0))
    return make_spec(cluster, run_dir)


def _tell(spec: ClusterSpec, endpoint: str) -> list[Reply]:
    """Three chats with one prompt: cold, from the store, and from a store with two devices gone."""
    body = {
        "model": spec.cluster.model.name,
        "messages": [message(LINE * 8 + "What do you see?", [_picture()])],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    replies = [_ask(endpoint, body, "1. a chat with an image")]
    replies.append(_ask(endpoint, body, "2. the same prefix again: the store has it"))
    removed = _remove_devices(spec, 2)
    replies.append(
        _ask(endpoint, body, f"3. the same with two of twelve device directories gone ({', '.join(removed)})")
    )
    return replies


def _ask(endpoint: str, body: dict[str, Any], title: str) -> Reply:
    typer.secho(title, bold=True, fg="cyan")
    request_id = f"demo-{uuid.uuid4().hex[:8]}"
    typer.echo("  answer: ", nl=False)
    reply = chat_once(endpoint, body, request_id, lambda text: typer.echo(text, nl=False))
    cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    typer.echo(
        f"\n  {reply.usage.get('prompt_tokens')} prompt tokens, {cached} of them cached; "
        f"first token after {reply.ttft_s:.2f} s, all after {reply.total_s:.2f} s"
    )
    typer.echo("\n".join(story_lines(_story_when_saved(endpoint, request_id))) + "\n")
    return reply


def _story_when_saved(endpoint: str, request_id: str) -> dict[str, Any]:
    """The timeline once the prompt's anchors are in the store, or after a while without: saving is not waited for."""
    deadline_s = monotonic_s() + SAVE_WAIT_S
    while True:
        timeline = story(endpoint, request_id)
        saved = [m for m in timeline["marks"] if m["what"] == "saved" and m.get("anchors")]
        if saved or monotonic_s() > deadline_s:
            return timeline
        sleep_s(0.2)


def _remove_devices(spec: ClusterSpec, count: int) -> list[str]:
    """Delete the directories of the first devices, as a lost disk would look; their names."""
    devices = spec.store_config().devices[:count]
    for device in devices:
        shutil.rmtree(device.path)
    return [device.name for device in devices]


def _judge(replies: list[Reply]) -> None:
    """All answers alike, and the later ones from the store; exit 1 otherwise."""
    hits = [(r.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for r in replies]
    if len({r.text for r in replies}) > 1:
        typer.secho("the three answers differ: that must not be", fg="red", err=True)
        raise typer.Exit(FAILED)
    if not all(hits[1:]):
        typer.secho(f"cached tokens were {hits}: the store gave nothing back", fg="red", err=True)
        raise typer.Exit(FAILED)
    typer.secho(f"three equal answers; cached prompt tokens: {', '.join(map(str, hits))}", fg="green")


def _picture() -> str:
    """A drawn picture as a data URL: a red disc and a blue square on white."""
    image = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((20, 20, 90, 90), fill="red")
    draw.rectangle((80, 90, 150, 150), fill="blue")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
