"""Views, bake, fill and turntable run where the mesh is, and give what the CPU gives."""

import pytest
import torch
import torch.nn.functional as F
from anygpu.paint.baking import projection
from anygpu.paint.baking.bake import BakeSettings, bake, texels_of
from anygpu.paint.baking.fill import filled
from anygpu.paint.baking.projection import Reference, projected
from anygpu.paint.geometry import raster
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.pose import Pose, posed_view
from anygpu.paint.geometry.turntable import turntable
from anygpu.paint.geometry.views import chosen_views, rendered_maps

from paint import synthetic


def everything(device: torch.device | str, form: str) -> dict[str, torch.Tensor]:
    surface = Surface.of(synthetic.torus(8, 16), device)
    maps = rendered_maps(surface, size=48)
    pictures = synthetic.photographs(Surface.of(synthetic.torus(8, 16)), DEFAULT_VIEWS, 48, 64)
    baked = bake(surface, DEFAULT_VIEWS, pictures, BakeSettings(48, 64, form))
    texture = filled(baked, surface)
    chosen_views(surface, 7, size=48)
    found = {"position": maps.position, "normal": maps.normal, "bake": baked.texture, "texture": texture}
    assert all(tensor.device.type == torch.device(device).type for tensor in found.values())
    return {**{name: tensor.cpu() for name, tensor in found.items()}, "frames": turntable(surface, texture, 1, 32)}


@pytest.mark.parametrize("form", ["gather", "scatter"])
def test_a_device_gives_what_the_cpu_gives(acc, form, monkeypatch):
    pool = F.adaptive_avg_pool2d

    def as_mps(values, size):
        assert values.device.type == "cpu" or not any(a % b for a, b in zip(values.shape[2:], size, strict=True))
        return pool(values, size)

    monkeypatch.setattr(F, "adaptive_avg_pool2d", as_mps)
    wanted, found = everything("cpu", form), everything(acc, form)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_picture_is_projected_where_the_mesh_is(acc, monkeypatch):
    monkeypatch.setattr(projection, "SIZES", (256, 512))

    def found(device):
        surface, _ = Surface.of(synthetic.torus(8, 16), device).with_uvs()
        pose = Pose(0.1, 0.2, perspective=0.3, scale=-0.4)
        _, view, shown = posed_view(surface, pose, 256)
        places = shown.interpolated(surface.vertices, surface.faces).cpu()
        colours = torch.cat((synthetic.waves(places), torch.ones(len(places), 1)), dim=1)
        picture = view.image(colours.to(surface.vertices.device)).cpu()
        texels = texels_of(surface, 64)
        texture = synthetic.ideal_texture(texels).to(surface.vertices.device)
        made = projected(surface, texture, [Reference(picture, "front", 6, 12, given=True)])
        assert made.texture.device.type == torch.device(device).type
        return made

    wanted, made = found("cpu"), found(acc)
    assert (wanted.weight > 0).sum() > 100 and made.notes == wanted.notes
    torch.testing.assert_close(made.texture.cpu(), wanted.texture, atol=1e-3, rtol=0)


def test_a_device_without_int64_minimum_is_rasterised_on_the_cpu(acc, monkeypatch, caplog):
    surface = Surface.of(synthetic.torus(8, 16), acc)
    wanted = rendered_maps(surface, size=48).position
    kept = torch.Tensor.scatter_reduce_

    def refused(buffer, *arguments, **options):
        if buffer.device.type != "cpu":
            raise RuntimeError("not implemented for Long")
        return kept(buffer, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "scatter_reduce_", refused)
    assert not raster._reduces_int64(torch.device(acc))
    with caplog.at_level("INFO"):
        found = rendered_maps(surface, size=48).position
    assert "no int64 scatter-min" in caplog.text
    assert found.device.type == torch.device(acc).type
    assert torch.equal(found.cpu(), wanted.cpu())
