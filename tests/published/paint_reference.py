"""Writes what the whole loop of Hunyuan3D paint makes of tiny weights to `tests/fixtures/published/loop_NAME*`.

    python tests/published/paint_reference.py NAME CLONE FOLDER

NAME is a row of ``LOOPS`` below, with the repository, commit and licence of its clone. FOLDER has OpenCV and, built
from the clone without CUDA, ``custom_rasterizer_kernel``, the CPU half of its rasterizer, and for PBR
``mesh_inpaint_processor``. The
publisher's code runs from the picture to the texture, on the CPU in fp32; nothing of it is kept but what it made.
Stand-ins that both sides share: a mesh with UVs, for xatlas, and the tokens of an empty prompt.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), sys.argv[2], sys.argv[3]]

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from paint import stored  # noqa: E402
from published import loops, paint_loops  # noqa: E402
from published.loops import Loop  # noqa: E402

CLONE = Path(sys.argv[2])
FOLDER = Path(mkdtemp())


@contextmanager
def on_cpu() -> Iterator[None]:
    """Without CUDA: what asks for it gets the CPU."""
    real, moved = torch.range, torch.Tensor.to

    def here(asked: Any) -> Any:
        return "cpu" if isinstance(asked, str | torch.device) and str(asked).startswith("cuda") else asked

    def to(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return moved(self, *map(here, given), **{name: here(one) for name, one in named.items()})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "to", to))
        stack.enter_context(mock.patch.object(torch, "range", lambda *size, device=None: real(*size)))
        yield


@contextmanager
def watched(seen: list[torch.Tensor]) -> Iterator[None]:
    """Every picture that a pipeline decodes, before it is rounded to 8 bits, (B, H, W, 3) in 0..1."""
    from diffusers.image_processor import VaeImageProcessor

    finish = VaeImageProcessor.postprocess

    def postprocess(self: Any, image: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.append((image / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float())
        return finish(self, image, *given, **named)

    with mock.patch.object(VaeImageProcessor, "postprocess", postprocess):
        yield


def parts(folder: Path, unet: Any) -> dict[str, Any]:
    """VAE, UNet and scheduler of a tiny checkpoint.

    Pictures reach the VAE contiguous: in Pillow's order of channels torch's GroupNorm on a CPU is off by 3e-2.
    """
    vae = AutoencoderKL.from_pretrained(folder / "vae").float().eval()
    encode = vae.encode
    vae.encode = lambda pictures, **given: encode(pictures.contiguous(), **given)
    kind = next(kind for kind, name in stored.FOLDERS.items() if name == folder.name)
    scheduler = DDIMScheduler.from_config(DDIMScheduler.load_config(stored.FIXTURES / stored.NAMES[kind]))
    return {"vae": vae, "unet": unet, "scheduler": scheduler}


class EmptyPrompt:
    """The tokens of an empty prompt."""

    model_max_length = 77

    def __call__(self, *_: Any, **__: Any) -> SimpleNamespace:
        tokens = torch.tensor([[*paint_loops.EMPTY, *[0] * (77 - len(paint_loops.EMPTY))]])
        return SimpleNamespace(input_ids=tokens, attention_mask=None)

    def tokenize(self, _: str) -> list[str]:
        return []


def image(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray((picture * 255).round().to(torch.uint8).numpy())


def pixels(picture: Image.Image) -> torch.Tensor:
    """(H, W, 3) in 0..1."""
    return torch.from_numpy(np.array(picture)) / 255


def light_remover(dehighlight: Any) -> Any:
    """The publisher's class on the tiny checkpoint."""
    from diffusers import StableDiffusionInstructPix2PixPipeline as Pipeline
    from transformers import CLIPTextModel

    folder = paint_loops.delight(FOLDER)
    pipe = Pipeline(
        **parts(folder, UNet2DConditionModel.from_pretrained(folder / "unet").float().eval()),
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder"), tokenizer=EmptyPrompt(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    opened = mock.patch.object(Pipeline, "from_pretrained", lambda *_, **__: pipe)
    with opened, mock.patch.object(Pipeline, "to", lambda self, *_: self):  # which would make it fp16
        return dehighlight.Light_Shadow_Remover(SimpleNamespace(device="cpu", light_remover_ckpt_path=""))


def texgen() -> Any:
    """The module of the publisher's pipelines."""
    sys.path.insert(0, str(CLONE / "hy3dgen" / "texgen" / "custom_rasterizer"))
    for name in ("xatlas", "pygltflib", "scipy", "scipy.spatial", "scipy.spatial.transform"):
        sys.modules.setdefault(name, mock.MagicMock(__name__=name))
    from hy3dgen.texgen import pipelines

    return pipelines


def paint(turbo: bool) -> dict[str, torch.Tensor]:
    """``Hunyuan3DPaintPipeline`` from a picture to the texture."""
    import trimesh
    from diffusers import DiffusionPipeline

    pipelines = texgen()
    from hy3dgen.texgen.hunyuanpaint.pipeline import HunyuanPaintPipeline
    from hy3dgen.texgen.hunyuanpaint.unet.modules import UNet2p5DConditionModel
    from hy3dgen.texgen.utils import dehighlight_utils, multiview_utils

    folder = paint_loops.checkpoint("paint", FOLDER)
    unet = UNet2p5DConditionModel.from_pretrained(folder / "unet").eval()
    config = pipelines.Hunyuan3DTexGenConfig("", "", f"hunyuan3d-paint-v2-0{'-turbo' * turbo}")
    config.device, config.render_size, config.texture_size = "cpu", paint_loops.RENDERED, paint_loops.TEXTURE
    vertices, faces, uvs = paint_loops.mesh()
    mesh = trimesh.Trimesh(vertices, faces, process=False, visual=trimesh.visual.TextureVisuals(uv=uvs))
    seen: list[torch.Tensor] = []
    with on_cpu(), ExitStack() as stack:
        pipe = HunyuanPaintPipeline(**parts(folder, unet), text_encoder=None, tokenizer=None, feature_extractor=None)
        stack.enter_context(mock.patch.object(DiffusionPipeline, "from_pretrained", lambda *_, **__: pipe))
        painter = multiview_utils.Multiview_Diffusion_Net(config)
        painter.view_size = paint_loops.VIEW
        whole = object.__new__(pipelines.Hunyuan3DPaintPipeline)
        whole.config = config
        whole.models = {"delight_model": light_remover(dehighlight_utils), "multiview_model": painter}
        whole.render = pipelines.MeshRender(
            default_resolution=config.render_size, texture_size=config.texture_size, device="cpu"
        )
        stack.enter_context(mock.patch.object(pipelines, "mesh_uv_wrap", lambda mesh: mesh))
        stack.enter_context(watched(seen))
        whole(mesh, image(paint_loops.picture()))
    return {"": seen[-1], " texture": whole.render.tex[None]}


def delight() -> dict[str, torch.Tensor]:
    """``Light_Shadow_Remover`` on a picture in the middle of its square."""
    pipelines = texgen()
    from hy3dgen.texgen.utils import dehighlight_utils

    centred = pipelines.Hunyuan3DPaintPipeline.recenter_image(None, image(paint_loops.picture()))
    with torch.no_grad():
        return {"": pixels(light_remover(dehighlight_utils)(centred))[None]}


def copied(render: Any) -> Any:
    """``render.get_mesh`` as on CUDA: it changes its arrays in place, which on a CPU are the renderer's own."""
    get_mesh = render.get_mesh

    def made(**given: Any) -> list[np.ndarray]:
        before = render.vtx_pos.clone(), render.vtx_uv.clone()
        arrays = [array.copy() for array in get_mesh(**given)]
        render.vtx_pos, render.vtx_uv = before
        return arrays

    return made


def enlarged(view: Image.Image) -> Image.Image:
    """One view enlarged, in the 8 bits in which upstream's model gives it back."""
    return image(paint_loops.enlarged(pixels(view)[None])[0])


def pbr() -> dict[str, torch.Tensor]:
    """``Hunyuan3DPaintPipeline`` of 2.1 from a picture to its views and its textures, colours before metal and
    roughness. Both sides share what enlarges the views: upstream's is another model's weights."""
    import trimesh
    from transformers import BitImageProcessorPil, Dinov2Model

    home = CLONE / "hy3dpaint"
    sys.path[:0] = [str(home), str(home / "custom_rasterizer")]
    import mesh_inpaint_processor

    sys.modules["DifferentiableRenderer.mesh_inpaint_processor"] = mesh_inpaint_processor
    for name in (
        "pytorch_lightning", "torchvision", "torchvision.transforms", "torchvision.utils", "omegaconf", "pymeshlab",
        "xatlas", "bpy", "utils.image_super_utils", "utils.simplify_mesh_utils",
    ):  # fmt: skip
        sys.modules.setdefault(name, mock.MagicMock(__name__=name, __spec__=None))
    import textureGenPipeline
    from hunyuanpaintpbr.pipeline import HunyuanPaintPipeline
    from hunyuanpaintpbr.unet.modules import Dino_v2, UNet2p5DConditionModel
    from utils import multiview_utils

    folder = paint_loops.checkpoint("paint_pbr", FOLDER)
    config = textureGenPipeline.Hunyuan3DPaintConfig(8, paint_loops.VIEW)
    config.device, config.render_size, config.texture_size = "cpu", paint_loops.RENDERED, paint_loops.TEXTURE
    vertices, faces, uvs = paint_loops.mesh()
    mesh = trimesh.Trimesh(vertices, faces, process=False, visual=trimesh.visual.TextureVisuals(uv=uvs))
    dino = object.__new__(Dino_v2)
    torch.nn.Module.__init__(dino)
    dino.dino_processor = BitImageProcessorPil(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, resample=3,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    dino.dino_v2 = Dinov2Model.from_pretrained(paint_loops.dino(FOLDER)).eval()
    seen: list[torch.Tensor] = []
    with on_cpu(), ExitStack() as stack:
        unet = UNet2p5DConditionModel.from_pretrained(folder / "unet").eval()
        pipe = HunyuanPaintPipeline(**parts(folder, unet), text_encoder=None, tokenizer=None, feature_extractor=None)
        pipe.scheduler = multiview_utils.UniPCMultistepScheduler.from_config(
            pipe.scheduler.config, timestep_spacing="trailing"
        )
        painter = object.__new__(multiview_utils.multiviewDiffusionNet)
        painter.pipeline, painter.dino_v2, painter.mode = pipe, dino, "hunyuanpaintpbr"
        whole = object.__new__(textureGenPipeline.Hunyuan3DPaintPipeline)
        whole.config = config
        whole.render = textureGenPipeline.MeshRender(
            default_resolution=config.render_size, texture_size=config.texture_size, device="cpu"
        )
        whole.render.load_mesh = lambda mesh: whole.render.set_mesh(
            mesh.vertices, mesh.faces, vtx_uv=mesh.visual.uv, uv_idx=mesh.faces
        )
        whole.view_processor = textureGenPipeline.ViewProcessor(config, whole.render)
        whole.render.save_mesh = lambda *_, **__: None
        whole.render.get_mesh = copied(whole.render)
        whole.models = {"super_model": enlarged, "multiview_model": painter}
        stack.enter_context(mock.patch.object(trimesh, "load", lambda _: mesh))
        stack.enter_context(mock.patch.object(textureGenPipeline, "mesh_uv_wrap", lambda mesh: mesh))
        stack.enter_context(watched(seen))
        whole(str(FOLDER / "mesh.obj"), image(paint_loops.square()), use_remesh=False, save_glb=False)
    return {"": seen[-1], " texture": torch.stack((whole.render.tex, whole.render.tex_mr))}


V2 = "Tencent-Hunyuan/Hunyuan3D-2", "9bcf302", "Tencent Hunyuan 3D 2.0 Community License"
LOOPS = {
    "paint v2-0": Loop(*V2, lambda: paint(turbo=False)),
    "paint turbo": Loop(*V2, lambda: paint(turbo=True)),
    "paint pbr": Loop("Tencent-Hunyuan/Hunyuan3D-2.1", "5e3ec6d", "Tencent Hunyuan 3D 2.1 Community License", pbr),
    "paint delight": Loop(*V2, delight),
}


def main() -> None:
    """Run the loop that is named, to pictures by the ends of the fixtures' names."""
    name = sys.argv[1]
    loop = LOOPS[name]
    about = loop.about(f"paint_reference.py '{name}' CLONE FOLDER")
    with torch.no_grad():
        made = loop.run()
    for end, pictures in made.items():
        save_file(loops.kept(pictures), loops.fixture(name + end), metadata=about)
        print(name + end, tuple(pictures.shape), float(pictures.mean()), float(pictures.std()))


if __name__ == "__main__":
    main()
