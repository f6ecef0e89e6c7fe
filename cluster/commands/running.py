"""Starting and finding clusters for commands: a manifest's spec, the Ray it runs on, progress while it comes up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from shoal.cluster.errors import ShoalError
from shoal.cluster.live.clock import now_us
from shoal.cluster.live.facts import api_keys, model_directory, tls_identity
from shoal.cluster.live.session import Session, SessionError, connect, find, sent_checkout, sessions, start_ray
from shoal.cluster.live.spec import ClusterSpec, model_revision
from shoal.cluster.resolve import ResolvedCluster
from shoal.engines.model.errors import CheckpointError

OBJECT_STORE_BYTES = 256 << 20  # embeddings and store fragments on their way; everything else goes one-sided
FAILED = 1
BAD_USAGE = 2


def data_dir(name: str) -> Path:
    """Where a cluster keeps its store between runs: `$SHOAL_DATA_DIR/<name>`, else the user's XDG data folder."""
    base = os.environ.get("SHOAL_DATA_DIR") or os.path.join(
        os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"), "shoal"
    )
    return Path(base) / name


def make_spec(cluster: ResolvedCluster, run_dir: Path | None) -> ClusterSpec:
    """What every actor is built from."""
    api_keys(cluster.api.keys_file)  # here its mistakes are the user's; in a replica they would only be a log's
    if cluster.api.grpc_tls:
        tls_identity(cluster.api.grpc_tls)
    directory = model_directory(cluster.model_path)
    return ClusterSpec(
        cluster=cluster,
        model_dir=str(directory.resolve()),
        revision=model_revision(directory),
        run_dir=str((run_dir or data_dir(cluster.name)).resolve()),
        created_us=now_us(),
    )


def ray_address(address: str | None) -> str | None:
    """The Ray that was asked for: `address`, else `$RAY_ADDRESS`, which a job sets; None for one of our own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def open_ray(name: str, address: str | None) -> Session:
    """Connect to the Ray that was asked for, or start one of our own."""
    if (foreign := ray_address(address)) is None:
        return start_ray(name, OBJECT_STORE_BYTES)
    session = _foreign(name, foreign)
    connect(session, working_dir=sent_checkout())
    return session


def locate(name: str | None, address: str | None) -> Session:
    """The cluster a command means: on the Ray at `address`, else a recorded one, else on `$RAY_ADDRESS`.

    SessionError if there is no such cluster, or more than one without a name to choose.
    """
    if not address and (not os.environ.get("RAY_ADDRESS") or [s for s in sessions() if name in (None, s.name)]):
        return find(name)
    session = _foreign(name or "", address or os.environ["RAY_ADDRESS"])
    connect(session, working_dir=sent_checkout())
    from shoal.cluster.live.launch import clusters, spec_of

    names = clusters()
    found = name or (names[0] if len(names) == 1 else "")
    if found not in names:
        told = ", ".join(names) or "none"
        raise SessionError(f"--name = {name}: Ray at {session.address} runs these clusters: {told}; name one of them")
    spec = spec_of(found)
    http = f"http://{spec.cluster.api.host}:{spec.cluster.api.port}" if spec else ""
    return replace(session, name=found, http=http)


def _foreign(name: str, address: str) -> Session:
    return Session(name=name, address=address, token=os.environ.get("RAY_AUTH_TOKEN", ""))


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on stderr: one line that moves on a terminal, silent elsewhere."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=None, now="")
        yield bar


@contextmanager
def friendly_errors() -> Iterator[None]:
    """A mistake of the user ends as one message and an exit code, without a traceback."""
    try:
        yield
    except (SessionError, ConnectionError, TimeoutError) as error:
        typer.echo(f"shoal: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except (ShoalError, CheckpointError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_USAGE) from None
    except KeyboardInterrupt:
        typer.echo("shoal: interrupted", err=True)
        raise typer.Exit(FAILED) from None
