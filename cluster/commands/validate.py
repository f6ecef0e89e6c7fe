"""`shoal validate MANIFEST` and `shoal plan MANIFEST`: decode and resolve; say what it takes, or what is wrong."""

import json
from pathlib import Path
from typing import Annotated

import typer
from shoal.cluster.errors import ShoalError
from shoal.cluster.facts import Facts
from shoal.cluster.live.facts import read_facts
from shoal.cluster.manifest import read_manifest
from shoal.cluster.plan import make_plan
from shoal.cluster.resolve import ResolvedCluster, resolve

ManifestPath = Annotated[Path, typer.Argument(metavar="MANIFEST", help="A YAML file of kind Cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def load(path: Path) -> tuple[ResolvedCluster, Facts]:
    """The resolved cluster of a manifest file and the facts it was resolved with; ShoalError for any mistake."""
    manifest = read_manifest(path)
    store = manifest.store
    disk = Path(store.directory) if store is not None and store.directory != "auto" else Path.cwd()
    facts = read_facts(manifest.model.path, disk)
    return resolve(manifest, facts, str(path)), facts


def validate(manifest: ManifestPath) -> None:
    """Decode and resolve MANIFEST; print it resolved. Example: shoal validate manifests/local.yaml."""
    cluster, _ = _load_or_exit(manifest)
    typer.echo(cluster.to_yaml(), nl=False)


def plan(manifest: ManifestPath, as_json: AsJson = False) -> None:
    """Memory, placement, store and network needs of MANIFEST. Example: shoal plan manifests/local.yaml --json."""
    cluster, facts = _load_or_exit(manifest)
    found = make_plan(cluster, facts)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    if found.refusals:
        raise typer.Exit(1)


def _load_or_exit(path: Path) -> tuple[ResolvedCluster, Facts]:
    try:
        return load(path)
    except ShoalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
