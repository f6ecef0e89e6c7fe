"""`shoal up`, `down` and `status`: start a cluster, end exactly that cluster, look at it."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from shoal.cluster.commands.running import (
    FAILED,
    friendly_errors,
    locate,
    make_spec,
    open_ray,
    progress_bar,
    ray_address,
)
from shoal.cluster.commands.validate import AsJson, ManifestPath, load
from shoal.cluster.live.clock import sleep_s
from shoal.cluster.live.session import (
    Session,
    connect,
    forget,
    in_job,
    is_running,
    record,
    require_free,
    sent_checkout,
    sessions,
    stop_ray,
)
from shoal.cluster.live.spec import ClusterSpec

Address = Annotated[str | None, typer.Option(help="A running Ray, host:port or ray://…; default: $RAY_ADDRESS or own.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return when ready and leave the cluster running.")]
RunDir = Annotated[Path | None, typer.Option(help="Where the store lives; default: the user's data folder.")]
WATCH_S = 0.5
Name = Annotated[str | None, typer.Option(help="Which cluster; default: the only one that is up.")]


def up(manifest: ManifestPath, address: Address = None, detach: Detach = False, run_dir: RunDir = None) -> None:
    """Deploy MANIFEST and wait until it serves. Example: shoal up manifests/local.yaml --detach.

    Without --detach an own cluster ends with Ctrl-C. On somebody else's Ray (--address) it always keeps running.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it starts, too: nothing may stay behind
    with friendly_errors():
        cluster, _ = load(manifest)
        running = [s.name for s in sessions()]
        if cluster.name in running:
            typer.echo(f"shoal: {cluster.name!r} is up already; `shoal down --name {cluster.name}` ends it", err=True)
            raise typer.Exit(FAILED)
        if not ray_address(address):
            require_free(cluster.api.host, cluster.api.port)
            if cluster.api.grpc:
                host, _, port = cluster.api.grpc.rpartition(":")
                require_free(host, int(port))
        spec = make_spec(cluster, run_dir)
        typer.echo(cluster.to_yaml(), nl=False, err=True)
        session, endpoint = start(spec, address)
        stop = Stop()
        typer.echo(f"{cluster.name} is ready at {endpoint} (model {cluster.model.name})")
        if cluster.api.grpc:
            typer.echo(f"its store is at {cluster.api.grpc} (gRPC, kvstore/rpc/store.proto)")
        if detach or not session.pid:
            return
        typer.echo("Ctrl-C ends it.", err=True)
        wait_for(stop, session)
        gone = not is_running(session)
        end(session)
        typer.echo(f"{cluster.name} {'was ended from elsewhere' if gone else 'is down'}")


def start(spec: ClusterSpec, address: str | None) -> tuple[Session, str]:
    """Bring a cluster up with a progress bar; the recorded session and the HTTP endpoint.

    Whatever fails on the way, and SIGINT or SIGTERM, leaves nothing behind. A job records nothing: its machine is not
    its user's.
    """
    api = spec.cluster.api
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with progress_bar(f"starting {spec.name}") as bar:
        task = bar.task_ids[0]
        bar.update(task, now="ray")
        session = open_ray(spec.name, address)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put its own there
        from shoal.cluster.live.launch import bring_up, find_way

        try:
            spec = find_way(spec)
        except BaseException:
            stop_ray(session)
            raise
        session = replace(session, http=f"http://{api.host}:{api.port}")
        if not in_job():
            record(session)
        try:
            bring_up(spec, lambda p: bar.update(task, completed=p.ready, total=p.wanted, now=p.what))
        except BaseException:
            end(session)
            raise
    return session, session.http


def end(session: Session) -> None:
    """Take a cluster down; an own Ray goes with it."""
    if session.pid:
        stop_ray(session)  # ends every actor: nothing in them outlives a kill that would be worth a slower end
    else:
        connect(session, working_dir=sent_checkout())
        from shoal.cluster.live.launch import take_down

        take_down(session.name)
    forget(session.name)


def down(name: Name = None, address: Address = None) -> None:
    """End a cluster and everything it started; its store stays on disk. Example: shoal down --name local.

    A cluster that a job started is ended with --address, or by a job: ray job submit … -- python -m shoal down.
    """
    with friendly_errors():
        session = locate(name, address)
        end(session)
        typer.echo(f"{session.name} is down")


def status(name: Name = None, address: Address = None, as_json: AsJson = False) -> None:
    """Members, their state and load. Example: shoal status --json."""
    with friendly_errors():
        session = locate(name, address)
        connect(session, working_dir=sent_checkout())
        from shoal.cluster.live.overview import overview

        facts = overview(session.name)
    if as_json:
        typer.echo(json.dumps(facts | {"name": session.name, "http": session.http}, indent=2))
    else:
        Console().print(_table(facts, session))
    if not facts["healthy"]:
        raise typer.Exit(FAILED)


def _table(facts: dict[str, Any], session: Session) -> Table:
    state = "healthy" if facts["healthy"] else "; ".join(facts["reasons"])
    table = Table(title=f"{session.name}  {session.http}  {state}", title_justify="left")
    table.add_column("member", no_wrap=True)
    for column in ("epoch", "state", "pid", "running", "waiting", "blocks", "slots", "tickets"):
        table.add_column(column)  # blocks and slots: the free ones
    for member in facts["members"]:
        load = member.get("load") or {}
        cells = [str(load.get(k, "")) for k in ("running", "waiting", "blocks_free", "slots_free", "tickets")]
        table.add_row(member["name"], str(member["epoch"]), member["state"], str(member.get("pid", "")), *cells)
    return table


class Stop:
    """Whether SIGINT or SIGTERM has come, from the moment this is made; the next SIGINT interrupts as usual.

    A flag and not KeyboardInterrupt: Python drops an exception that is raised while a `__del__` runs, as those of Ray's
    references do for a while after a start.
    """

    def __init__(self) -> None:
        self.has_come = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._come)

    def _come(self, number: int, frame: object) -> None:
        self.has_come = True
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.default_int_handler)


def wait_for(stop: Stop, session: Session) -> None:
    """Return when the stop has come, or when the cluster's Ray has gone."""
    while not stop.has_come and is_running(session):
        sleep_s(WATCH_S)
