"""One live cluster for all tests of this folder: Ray, every role, real files, NIXL; torn down at the end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live.world import World
from shoal.cluster.commands.running import make_spec
from shoal.cluster.commands.validate import load
from shoal.cluster.live.session import family, free_port, start_ray, stop_ray

ROOT = Path(__file__).resolve().parent.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(pytest.mark.live)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from shoal.cluster.live.launch import bring_up

    folder = tmp_path_factory.mktemp("live")
    cluster, _ = load(ROOT / "manifests" / "local.yaml")
    assert cluster.store is not None
    # Tests here delete devices and expect what was on them to be read from the others, or missed.
    store = replace(cluster.store, host_cache_bytes=0)
    api = replace(cluster.api, port=free_port(), grpc=f"127.0.0.1:{free_port()}")
    cluster = replace(cluster, name="test", api=api, store=store)
    spec = make_spec(cluster, folder)
    session = start_ray("test", 256 << 20)
    try:
        bring_up(spec)
        yield World(spec)
    finally:
        stop_ray(session)
        assert not family(session), "processes left behind"


@pytest.fixture(autouse=True)
def settled(world: World) -> Iterator[None]:
    """Each test begins with a healthy cluster and leaves nothing behind: no sequence, ticket, block or slot."""
    world.wait_healthy()
    yield
    world.wait_healthy()
    world.wait_empty()
