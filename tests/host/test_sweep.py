"""No widget of any node, driven to its ends and beyond, draws out a message that is raw; half an hour."""

from pathlib import Path

import pytest

from host.server import NoHost, Server, find_host
from host.sweep import swept

pytestmark = [pytest.mark.host, pytest.mark.full]


def test_every_message_says_what_was_found_what_was_expected_and_what_to_do(tmp_path: Path, tiny_folder: Path) -> None:
    try:
        server = Server(find_host(), tmp_path, tiny_folder, stand_ins=True)
    except NoHost as reason:
        pytest.skip(str(reason))
    try:
        assert swept(server, []) == []
    finally:
        server.stop()
