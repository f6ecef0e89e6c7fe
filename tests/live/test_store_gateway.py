"""An engine outside the cluster and the cluster's own use one store."""

import asyncio
from dataclasses import replace

from live.world import World
from shoal.cluster.api.jobs import ChatJob
from shoal.kvstore.core.chain import chain_keys
from shoal.kvstore.core.records import Kind, StoredObject, TrafficClass
from shoal.kvstore.errors import StoreError
from shoal.kvstore.rpc.client import RemoteStore


def test_a_stranger_gives_a_tenant_the_prefix_of_another(world: World) -> None:
    """What a stranger stores under a tenant's keys is that tenant's hit: the answer is the plain loop's."""
    first = world.job(401, 400, 4)
    second = replace(world.job(401, 400, 4), cache_salt="another tenant")

    def keys(job: ChatJob) -> tuple[bytes, ...]:
        return chain_keys(world.spec.namespace(job.cache_salt), job.token_ids)

    async def ask(job: ChatJob) -> tuple[list[int], int]:
        async with world.entrypoint() as service:
            answer = await world.ask(service, job)
            return answer.token_ids, answer.cached_tokens

    cold, cached = asyncio.run(ask(first))
    assert cached == 0
    with RemoteStore(world.spec.cluster.api.grpc) as remote:
        keep = world.spec.group("prefill").engine.truncation.keep
        limit = len(first.token_ids) - keep  # a hit ends where decoder layers begin, or before
        world.wait("the prompt is in the store", lambda: remote.match(keys(first), limit).anchor_grain == 2)
        anchor_grain = 2
        held = remote.fetch(keys(first)[:anchor_grain], anchor_grain)
        assert (len(held.grains), held.anchor_grain, held.reason) == (anchor_grain, anchor_grain, "")
        assert {grain.nbytes for grain in held.grains} == {world.spec.cluster.model.block_bytes}
        parent, objects = bytes(16), []
        for index, (key, grain) in enumerate(zip(keys(second), held.grains, strict=False)):
            objects.append(StoredObject(Kind.GRAIN, key, parent, index, TrafficClass.CHAT, grain))
            parent = key
        objects.append(replace(objects[-1], kind=Kind.ANCHOR, payload=held.anchor))
        assert remote.put(objects).saved == len(objects)
    warm, cached = asyncio.run(ask(second))
    assert cached == anchor_grain * 128
    assert warm == cold == world.plain(second, warm)


def test_the_gateway_dies_and_its_pins_with_it(world: World) -> None:
    job = world.job(402, 300, 1)
    keys = chain_keys(world.spec.namespace(job.cache_salt), job.token_ids)
    epoch = world.member("store-gateway/0")["epoch"]

    async def ask() -> None:
        async with world.entrypoint() as service:
            await world.ask(service, job)

    asyncio.run(ask())
    with RemoteStore(world.spec.cluster.api.grpc) as remote:
        world.wait("the prompt is in the store", lambda: remote.match(keys).grains_matched == 2)
        pin = remote.pin(keys, 600.0).pin
        assert pin
        world.kill("store-gateway/0")
        world.wait_replaced("store-gateway/0", epoch)

        def answers() -> bool:
            try:
                return remote.stats().grains > 0
            except StoreError:
                return False

        world.wait("the same address answers", answers)
        assert remote.stats().pins == 0
        assert not remote.release(pin)
