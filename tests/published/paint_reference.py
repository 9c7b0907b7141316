"""Writes what Tencent's whole loops of Hunyuan3D paint make of tiny weights, as `loop_reference.py` does for clips.

    python tests/published/paint_reference.py NAME CLONE SITE

CLONE is the publisher's repository; SITE is a folder with OpenCV, SciPy and ``custom_rasterizer_kernel``, which is its
rasterizer.cpp compiled for the CPU with ``rasterize_image_gpu`` and ``build_hierarchy`` left empty.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

NAME, CLONE, SITE = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
sys.path[:0] = [str(Path(__file__).parents[1]), str(CLONE), SITE]
sys.path.insert(0, str(CLONE / "hy3dgen" / "texgen" / "custom_rasterizer"))

import diffusers  # noqa: E402
import numpy  # noqa: E402
import trimesh  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from paint import stored  # noqa: E402
from published import loops, paint_loops  # noqa: E402

CPU = torch.device("cpu")
LICENCE = "Tencent Hunyuan 3D Community License"


@contextmanager
def on_cpu() -> Iterator[None]:
    """Without CUDA: the CPU where "cuda" is asked."""
    to, ranged, set_timesteps = torch.Tensor.to, torch.range, diffusers.LCMScheduler.set_timesteps

    def timed(self: Any, *given: Any, device: Any = None, **named: Any) -> None:
        set_timesteps(self, *given, device=CPU, **named)

    def moved(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        named = {name: CPU if each == "cuda" else each for name, each in named.items() if name != "device" or each}
        return to(self, *[CPU if each == "cuda" else each for each in given], **named)

    with (
        mock.patch.object(torch.Tensor, "to", moved),
        mock.patch.object(diffusers.LCMScheduler, "set_timesteps", timed),
        mock.patch.object(torch, "range", lambda *given, device=None: ranged(*given)),
    ):
        yield


def stub(*names: str) -> None:
    for name in names:
        sys.modules.setdefault(name, mock.MagicMock(__name__=name))


def vae() -> Any:
    made = diffusers.AutoencoderKL.from_config(stored.FIXTURES / "paint_v2_0" / "vae_config.json")
    made = diffusers.AutoencoderKL(**{k: v for k, v in dict(made.config).items() if not k.startswith("_")})
    made.load_state_dict(stored.weights("paint", "vae"), strict=True)
    return made.eval()


def as_pil(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray((picture * 255).round().to(torch.uint8).numpy())


def paint(subfolder: str) -> dict[str, torch.Tensor]:
    """``Hunyuan3DPaintPipeline`` with its UVs given and its delight switched off, which is a loop of its own."""
    from diffusers import StableDiffusionInstructPix2PixPipeline, StableDiffusionUpscalePipeline  # noqa: F401
    from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion  # noqa: F401

    stub("pygltflib", "xatlas", "pymeshlab")
    from hy3dgen.texgen import pipelines
    from hy3dgen.texgen.hunyuanpaint.pipeline import HunyuanPaintPipeline
    from hy3dgen.texgen.hunyuanpaint.unet.modules import UNet2p5DConditionModel
    from hy3dgen.texgen.utils import multiview_utils

    config = {key: value for key, value in stored.config("paint").items() if not key.startswith("_")}
    unet = UNet2p5DConditionModel(diffusers.UNet2DConditionModel(**config))
    unet.load_state_dict({name: tensor.half().float() for name, tensor in stored.weights("paint").items()}, strict=True)
    scheduler = diffusers.DDIMScheduler.from_pretrained(stored.FIXTURES / "paint_v2_0")
    with on_cpu():
        inner = HunyuanPaintPipeline(vae(), None, None, unet.eval(), scheduler, None)
        whole = pipelines.Hunyuan3DPaintPipeline.__new__(pipelines.Hunyuan3DPaintPipeline)
        whole.config = pipelines.Hunyuan3DTexGenConfig("", "", subfolder)
        whole.config.device = "cpu"
        whole.config.render_size, whole.config.texture_size = paint_loops.MAPS, paint_loops.TEXTURE
        whole.render = pipelines.MeshRender(
            default_resolution=paint_loops.MAPS, texture_size=paint_loops.TEXTURE, device="cpu"
        )
        with mock.patch.object(multiview_utils.DiffusionPipeline, "from_pretrained", lambda *_, **__: inner):
            network = multiview_utils.Multiview_Diffusion_Net(whole.config)
        network.view_size = paint_loops.VIEW
        kept: dict[str, torch.Tensor] = {}
        shown = inner.image_processor.postprocess

        def postprocess(image: torch.Tensor, **given: Any) -> Any:
            if given.get("output_type") == "pil":
                kept["views"] = (image / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
            return shown(image, **given)

        def called(pictures: Any, maps: Any, cameras: Any) -> Any:
            kept["maps"] = torch.stack([torch.from_numpy(numpy.array(each)) for each in maps])
            kept["picture"] = torch.from_numpy(numpy.array(pictures[0]))
            kept["cameras"] = torch.tensor(cameras)
            return network(pictures, maps, cameras)

        inner.image_processor.postprocess = postprocess
        whole.models = {"delight_model": lambda picture: picture, "multiview_model": called}
        given = paint_loops.mesh()
        uvs = torch.stack((given.uvs[:, 0], 1 - given.uvs[:, 1]), dim=1).numpy()
        visual = trimesh.visual.TextureVisuals(uv=uvs)
        shape = trimesh.Trimesh(given.vertices.numpy(), given.faces.numpy(), visual=visual, process=False)
        with mock.patch.object(pipelines, "mesh_uv_wrap", lambda mesh: mesh):
            whole(shape, as_pil(paint_loops.picture()))
        kept["texture"] = whole.render.tex
    return kept


LOOPS: dict[str, tuple[str, str, Callable[[], dict[str, torch.Tensor]]]] = {
    "paint v2-0": ("Tencent-Hunyuan/Hunyuan3D-2", "9bcf302", lambda: paint("hunyuan3d-paint-v2-0")),
    "paint turbo": ("Tencent-Hunyuan/Hunyuan3D-2", "9bcf302", lambda: paint("hunyuan3d-paint-v2-0-turbo")),
}


def main() -> None:
    """Run the loop that is named."""
    repository, commit, run = LOOPS[NAME]
    with torch.no_grad():
        made = run()
    if len(sys.argv) > 4:
        save_file({name: tensor.contiguous() for name, tensor in made.items()}, sys.argv[4])
    about = {
        "source": f"github.com/{repository} at {commit}, {LICENCE}; results of its code, none of it",
        "command": f"python tests/published/paint_reference.py '{NAME}' CLONE SITE",
    }
    save_file(loops.kept(made["views"]), loops.fixture(NAME), metadata=about)
    print(NAME, {name: (tuple(each.shape), float(each.float().std())) for name, each in made.items()})


if __name__ == "__main__":
    main()
