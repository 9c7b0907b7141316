"""ComfyUI serves the help of each node where its frontend asks for it, in each language of the help."""

import re
import urllib.request

import pytest
from test_help import LANGUAGES
from test_web import WEB

from host.client import Client
from host.server import Server

pytestmark = pytest.mark.host


@pytest.mark.parametrize("language", ("en", *LANGUAGES))
def test_help_is_served_where_the_frontend_asks(server: Server, client: Client, language: str) -> None:
    """The page as plain text (the frontend drops what comes as HTML), and its pictures beside it."""
    pack = client.get("/object_info/AnyGPUSample")["AnyGPUSample"]["python_module"].removeprefix("custom_nodes.")
    asked = f"{server.url}/extensions/{pack}/docs/"
    with urllib.request.urlopen(f"{asked}AnyGPUSample/{language}.md", timeout=10) as answer:
        text = answer.read().decode("utf-8")
        assert "html" not in answer.headers.get("Content-Type", "")
    assert text == (WEB / "docs" / "AnyGPUSample" / f"{language}.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        with urllib.request.urlopen(asked + picture, timeout=10) as answer:
            assert answer.read() == (WEB / "docs" / picture).read_bytes()
