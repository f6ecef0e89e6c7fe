"""`shoal chat TEXT` asks a running cluster; `shoal generate TEXT` computes alone, without a cluster."""

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer
from shoal.cluster.commands.client import chat_once, data_url, key_header, message, story
from shoal.cluster.commands.operate import Name
from shoal.cluster.commands.running import BAD_USAGE, friendly_errors
from shoal.cluster.commands.story import story_lines
from shoal.cluster.commands.validate import AsJson
from shoal.cluster.live.session import find

Text = Annotated[str, typer.Argument(metavar="TEXT", help="What to say.")]
Image = Annotated[list[Path] | None, typer.Option(help="A picture to send along; may be given several times.")]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")]
TokensMax = Annotated[int, typer.Option("--max-tokens", min=1, help="Length limit of the answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")]
Explain = Annotated[bool, typer.Option("--explain", help="Tell afterwards where the time went.")]
Schema = Annotated[Path | None, typer.Option(help="A file with a JSON schema that the answer must fit.")]
Endpoint = Annotated[str | None, typer.Option(help="http://host:port of a cluster; default: the one that is up here.")]
ModelDir = Annotated[str, typer.Option("--model", help="builtin:toy or a checkpoint directory.")]


def chat(
    text: Text,
    image: Image = None,
    schema: Schema = None,
    stream: Stream = True,
    max_tokens: TokensMax = 64,
    temperature: Temperature = 1.0,
    explain: Explain = False,
    endpoint: Endpoint = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running cluster. Example: shoal chat --image photo.png --explain "What is this?".

    A cluster with API keys wants one in $SHOAL_API_KEY.
    """
    with friendly_errors():
        where = (endpoint or find(name).http).rstrip("/")
        missing = [str(path) for path in image or [] if not path.is_file()]
        if missing:
            typer.echo(f"--image: no such file: {', '.join(missing)}", err=True)
            raise typer.Exit(BAD_USAGE)
        form = response_format(schema) if schema else {}
        body = {
            "model": served_model(where),
            "messages": [message(text, [data_url(path) for path in image or []])],
            "max_tokens": max_tokens,
            "temperature": temperature,
            **form,
        }
        request_id = f"chat-{uuid.uuid4().hex[:12]}"
        show = stream and not as_json
        reply = chat_once(where, body, request_id, lambda t: typer.echo(t, nl=False) if show else None)
        if as_json:
            facts = {"text": reply.text, "finish_reason": reply.finish_reason, "usage": reply.usage}
            facts |= {"reasoning": reply.reasoning} if reply.reasoning else {}
            typer.echo(json.dumps(facts | ({"timeline": story(where, request_id)} if explain else {})))
            return
        typer.echo("" if stream else reply.text)
        if explain:
            typer.echo("\n".join(story_lines(story(where, request_id))))


def response_format(path: Path) -> dict[str, Any]:
    """The field that asks for answers by the schema in a file; ends the command if that is no JSON object."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        typer.echo(f"--schema {path}: {error}; give a file with a JSON schema", err=True)
        raise typer.Exit(BAD_USAGE) from error
    asked = {"name": path.stem, "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def served_model(endpoint: str) -> str:
    """Name of the model a cluster serves."""
    import httpx
    from shoal.cluster.live.session import SessionError

    try:
        models = httpx.get(f"{endpoint}/v1/models", timeout=10.0, headers=key_header()).json()
        served: str = models["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise SessionError(f"{endpoint} does not answer as a Shoal cluster does: {error}") from error
    return served


def generate(
    text: Text,
    model: ModelDir = "builtin:toy",
    max_tokens: TokensMax = 64,
    temperature: Temperature = 0.0,
    seed: int | None = None,
    drafts: Annotated[int, typer.Option(help="Tokens drafted ahead and verified in each step; 0: none.")] = 0,
) -> None:
    """Continue a chat with one engine in this process. Example: shoal generate --model builtin:toy "Hello"."""
    with friendly_errors():
        from shoal.cluster.live.offline import generate_text

        for piece in generate_text(model, text, max_tokens, temperature, seed, drafts):
            typer.echo(piece, nl=False)
        typer.echo("")
