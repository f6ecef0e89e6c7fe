"""`shoal demo`: a cluster comes up, answers questions whose answers are known, is judged, and goes away again.

A code in a long text is asked three times: cold, from the stored prefix, and from a store that has lost two of its
twelve devices. All three answers must be the same text, for greedy answers do not depend on where their KV came from.
A second turn and one question of each other task follow, on what is left. Every answer must be right.
"""

import shutil
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from shoal.cluster.commands.client import Reply, chat_once, story
from shoal.cluster.commands.demo_questions import Question, about_a_text, answer_of, asked, body_of, others, told
from shoal.cluster.commands.operate import end, start
from shoal.cluster.commands.running import FAILED, friendly_errors, make_spec
from shoal.cluster.commands.story import story_lines
from shoal.cluster.commands.validate import load
from shoal.cluster.errors import ShoalError
from shoal.cluster.live.clock import monotonic_s, sleep_s
from shoal.cluster.live.session import free_port
from shoal.cluster.live.spec import ClusterSpec
from shoal.engines.toy.tasks.sample import Sample

MANIFEST = Path("manifests/local.yaml")
DEVICES_LOST = 2
SAVE_WAIT_S = 10.0

Manifest = Annotated[Path, typer.Option("--manifest", help="Which cluster to show.")]
KeepPort = Annotated[bool, typer.Option("--fixed-port", help="Use the manifest's port instead of a free one.")]


def demo(manifest: Manifest = MANIFEST, fixed_port: KeepPort = False) -> None:
    """Bring a cluster up, ask it what it was taught, judge each answer, take it down. Example: shoal demo."""
    with friendly_errors():
        started_s = monotonic_s()
        run_dir = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
        try:
            spec = _spec(manifest, run_dir, fixed_port)
            session, endpoint = start(spec, None)
            try:
                typer.secho(f"ready after {monotonic_s() - started_s:.1f} s at {endpoint}\n", bold=True)
                asks = _tell(spec, endpoint)
            finally:
                end(session)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        _judge(*asks)
        typer.secho(f"everything is down again; the demo took {monotonic_s() - started_s:.0f} s", bold=True)


def _spec(manifest: Path, run_dir: Path, fixed_port: bool) -> ClusterSpec:
    cluster, _ = load(manifest)
    port = cluster.api.port if fixed_port else free_port()
    cluster = replace(cluster, name=f"{cluster.name}-demo", api=replace(cluster.api, port=port))
    if cluster.store is None:
        raise ShoalError(f"{manifest}: store is missing, but the demo takes two of its devices away; add one")
    # Nothing in host memory: the third answer is to come off ten of twelve devices, and be seen to.
    cluster = replace(cluster, store=replace(cluster.store, host_cache_bytes=0))
    return make_spec(cluster, run_dir)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was asked: its request, the answer, and whether that is right."""

    request_id: str
    reply: Reply
    is_right: bool


def _tell(spec: ClusterSpec, endpoint: str) -> tuple[list[Asked], list[Asked]]:
    """The same question cold, from the store and from a store with two devices gone; then the other questions."""
    model = spec.cluster.model.name
    first, second = about_a_text()
    same = [_ask(endpoint, model, first, "1. a code in a long text")]
    _tell_story(_story_when_saved(endpoint, same[0].request_id))
    same.append(_ask(endpoint, model, first, "2. the same again: the store has most of the text"))
    _tell_story(story(endpoint, same[1].request_id))
    removed = ", ".join(_remove_devices(spec, DEVICES_LOST))
    same.append(_ask(endpoint, model, first, f"3. the same with two of twelve devices gone ({removed})"))
    _tell_story(story(endpoint, same[2].request_id))
    more = []
    for number, question in enumerate((Question("a second turn: another code of that text", second), *others()), 4):
        more.append(_ask(endpoint, model, question.sample, f"{number}. {question.title}"))
        _tell_story(story(endpoint, more[-1].request_id) if question.sample.images else {})
    return same, more


def _ask(endpoint: str, model: str, sample: Sample, title: str) -> Asked:
    """Ask; print question, answer, verdict and times."""
    typer.secho(title, bold=True, fg="cyan")
    typer.echo("\n".join(f"  {line}" for line in asked(sample)))
    request_id = f"demo-{uuid.uuid4().hex[:8]}"
    reply = chat_once(endpoint, body_of(sample, model), request_id)
    answer = answer_of(reply)
    is_right = sample.is_right(answer)
    if answer.reasoning:
        typer.echo(f"  thinks: {answer.reasoning}")
    typer.echo(f"  answer: {told(answer)}  ", nl=False)
    verdict = "✓ right" if is_right else f"✗ wrong (expected: {told(sample.wanted)})"
    typer.secho(verdict, fg="green" if is_right else "red", bold=True)
    typer.echo(
        f"  {reply.usage.get('prompt_tokens')} prompt tokens, {reply.cached_tokens} of them cached; "
        f"first token after {reply.ttft_s:.2f} s, all after {reply.total_s:.2f} s"
    )
    return Asked(request_id, reply, is_right)


def _tell_story(timeline: dict[str, Any]) -> None:
    """The story's lines, if there is one, and an empty one."""
    typer.echo("\n".join([*(story_lines(timeline) if timeline else ()), ""]))


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


def _judge(same: list[Asked], more: list[Asked]) -> None:
    """The same answers to the same question, the later ones from the store, and all right; exit 1 otherwise."""
    hits = [ask.reply.cached_tokens for ask in same]
    if len({ask.reply.text for ask in same}) > 1:
        _fail("the answers to the same question differ: that must not be")
    if not all(hits[1:]):
        _fail(f"cached tokens were {hits}: the store gave nothing back")
    typer.secho(f"three equal answers; cached prompt tokens: {', '.join(map(str, hits))}", fg="green")
    right, total = sum(ask.is_right for ask in [*same, *more]), len(same) + len(more)
    if right < total:
        _fail(f"{right} of {total} answers are right: {total - right} wrong")
    typer.secho(f"{right} of {total} answers are right", fg="green")


def _fail(text: str) -> NoReturn:
    typer.secho(text, fg="red", err=True)
    raise typer.Exit(FAILED)
