"""One server for the tests of a module; each test finds its service as new."""

import pytest
import pytest_asyncio
from api_world import serve


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with serve(body_bytes_max=1 << 20, image_bytes_max=100_000, image_pixels_max=1_000_000) as world:
        yield world


@pytest.fixture
def world(server):
    server.service.reset()
    return server
