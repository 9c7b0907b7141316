"""The network of drafts and previews beside core's own class, and when previews take it."""

from pathlib import Path

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host


def test_the_network_is_cores(inside: Inside) -> None:
    found = inside.play("tiny_decoders", "against_core")
    assert set(found) == {"16", "32"} and max(found.values()) <= 1e-5, found


def test_previews_take_it_where_comfyui_is_to_draw_with_such_decoders(inside: Inside, tmp_path: Path) -> None:
    found = inside.play("tiny_decoders", "previews", folder=str(tmp_path))
    for family in ("hunyuan_video", "mochi"):
        assert found[f"{family} taesd"] == "TinyPreviewer" and found[f"{family} size"] == "48x32"
        assert found[f"{family} latent2rgb"] == found[f"{family} auto"] == "Latent2RGBPreviewer"
        assert found[f"{family} none"] == "NoneType"
