"""One real ComfyUI for all host tests, started when the first of them wants it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from host.client import Client
from host.inside.asking import Inside
from host.server import NoHost, Server, environment, find_host, served


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Server]:
    """A running ComfyUI with this pack and no models yet; skips, and says what to do, where there is none."""
    with served(tmp_path_factory.mktemp("host"), tiny_folder, stand_ins=True) as running:
        yield running
        assert "a forecast failed" not in running.log


@pytest.fixture
def client(server: Server) -> Client:
    """A new connection; what earlier tests left in ComfyUI's cache is forgotten."""
    connection = Client(server.url)
    connection.free()
    return connection


@pytest.fixture(scope="session")
def inside(tiny_folder: Path) -> Iterator[Inside]:
    """ComfyUI's own process without its server, with the simulated accelerator for its GPU; skips without one."""
    try:
        host = find_host()
    except NoHost as reason:
        pytest.skip(str(reason))
    worker = Inside(host, tiny_folder, environment())
    try:
        if worker.reason:
            pytest.skip(worker.reason)
        yield worker
    finally:
        worker.close()
