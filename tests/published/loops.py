"""What the whole loops of publishers and our untouched graphs share: prompt, picture, seed, and what is kept of frames.

`loop_reference.py` runs the publishers' loops and writes ``fixtures/published/loop_NAME.safetensors``;
`tests/pipelines/test_whole_loops.py` runs ours.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny.weights import randomise


@dataclass(frozen=True)
class Loop:
    """A publisher's loop: where it is from, and what runs it, to pictures in 0..1."""

    repository: str
    commit: str
    licence: str
    run: Callable[[], Any]

    def about(self, command: str) -> dict[str, str]:
        """What a fixture that ``command`` writes says of itself."""
        source = f"github.com/{self.repository} at {self.commit}, {self.licence}; results of its code, none of it"
        return {"source": source, "command": f"python tests/published/{command}"}


FIXTURES = Path(__file__).parents[1] / "fixtures" / "published"
BAR = 1e-4  # largest difference of a pixel in 0..1
PROMPT, NEGATIVE, SEED = "a red cat jumps over the wall", "blurry and ugly", 7
LEVELS = 2**15 - 1  # of kept pixels: half a level is 1.5e-5

FRAMEPACK_SECONDS = 5.0  # the default of both
FRAMEPACK_PICTURE, FRAMEPACK_SIZE = (151, 96), (64, 96)  # width and height; the size that both are made at: H, W
FRAMEPACK_CLIP_SECONDS, FRAMEPACK_CLIP_STEPS, FRAMEPACK_END = 3.2, 3, 0.5  # of a film that goes on with a clip
FRAMEPACK_TIMED = f"{PROMPT} [1.1s: a dog sleeps on the blue sofa by the window] [2.2s: a green bird]"  # one a section
BUCKETED = (151, 96)  # width and height of the picture that Tencent's loops bring to a bucket
SIZE = (80, 48)  # width and height of the families that draw what they are told


def fixture(name: str) -> Path:
    """Where a loop's frames are kept."""
    return FIXTURES / f"loop_{name.replace(' ', '_')}.safetensors"


SPARSE = FIXTURES / "sparse_attention.safetensors"
SPARSE_GRIDS = ((1, 20, 30), (7, 47, 40), (32, 25, 27))  # frames, rows, columns: a picture; short, long, with borders
SPARSE_TEXT, SPARSE_STEP = 384, 97  # a tile of text tokens; every so many results are kept


def sparse_tokens(grid: tuple[int, int, int]) -> list[torch.Tensor]:
    """Queries, keys and values (1, 1, N, 16) of a video and its text."""
    draws, count = torch.Generator().manual_seed(SEED), math.prod(grid) + SPARSE_TEXT
    return [torch.randn(1, 1, count, 16, generator=draws) for _ in range(3)]


def picture(width: int, height: int) -> torch.Tensor:
    """A picture (1, H, W, 3) in 0..1 of 8 bits, as core loads one: smooth, with an edge and some grain."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    smooth = torch.stack([rows, columns, (6 * rows * columns).sin() / 2 + 0.5], dim=-1)
    smooth[height // 3 : height // 2, width // 4 : width // 2] = 0.9
    grain = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(3))
    return ((0.9 * smooth + 0.1 * grain).clamp(0, 1) * 255).round()[None] / 255


def clip() -> torch.Tensor:
    """A clip (46, H, W, 3) in 0..1 of 8 bits: a picture that moves to the right."""
    still = picture(*FRAMEPACK_PICTURE)
    return torch.cat([still.roll(index, dims=2) for index in range(46)])


def framepack_end() -> torch.Tensor:
    """The picture that a clip ends at, of the size that it is made at."""
    return picture(*FRAMEPACK_SIZE[::-1]).flip(1)


def saved_picture(width: int, height: int, path: Path) -> None:
    """Write :func:`picture` where a script reads it."""
    from PIL import Image

    Image.fromarray((picture(width, height)[0] * 255).round().byte().numpy()).save(path)


def kept(frames: torch.Tensor, most: int = 12_000) -> dict[str, torch.Tensor]:
    """Evenly spread pixels of frames (F, H, W, 3) in 0..1, or values of latents in fp32, and their shape.

    The step between them shares no factor with the sides, so that every column, row and frame is seen.
    """
    step = max(1, frames.numel() // most)
    while any(step % prime == 0 for prime in (2, 3, 5, 7) if step > 1):
        step += 1
    pixels = frames.float().flatten()[::step].contiguous()
    if frames.shape[-1] == 3:
        pixels = (pixels.double() * LEVELS).round().to(torch.int16)
    return {"pixels": pixels, "shape": torch.tensor(frames.shape), "step": torch.tensor(step)}


def error(frames: torch.Tensor, stored: dict[str, torch.Tensor]) -> float:
    """The largest difference of our frames from the kept ones."""
    assert tuple(frames.shape) == tuple(stored["shape"].tolist())
    ours = frames.double().flatten()[:: int(stored["step"])]
    levels = 1 if stored["pixels"].is_floating_point() else LEVELS
    return float((ours - stored["pixels"].double() / levels).abs().max())


HUNYUAN_15 = [("t2v", ""), ("i2v", ""), ("t2v", "cfg distilled"), ("i2v", "cfg distilled"), ("i2v", "step distilled")]


# And followed by the super-resolution: task, how the first pass was distilled, height of the result.
HUNYUAN_15_TWICE = [
    *(("t2v", "cfg distilled", "720p"), ("i2v", "step distilled", "720p")),
    *(("t2v", "cfg distilled", "1080p"), ("i2v", "cfg distilled", "1080p")),
]


def named(task: str, kind: str, end: str = "") -> str:
    """The name of a loop of HunyuanVideo 1.5."""
    return " ".join(filter(None, ("hunyuan video 1.5", task, kind, end and f"to {end}")))


QUOTED = 'a red cat jumps over a wall that says "stop"'
QUOTED_NEGATIVE = 'blurry and "ugly"'


def hunyuan_15(name: str, folder: Path, kind: str = "", side: int = 64) -> Path:
    """A tiny checkpoint of HunyuanVideo 1.5 for pictures of a tenth of 480p, or of 720p with a ``side`` of 96; ``kind``
    is how it was distilled."""
    few = kind == "step distilled"
    shift = 7.0 if few or (side > 64 and name.endswith("i2v")) else 9.0 if side > 64 else 5.0
    return _hunyuan_15(name, folder, f"{kind or 'guided'}_{side}", shift, 1.0 if kind else 6.0, side, few)


def hunyuan_15_super(name: str, folder: Path, end: str) -> Path:
    """A tiny super-resolution of HunyuanVideo 1.5, with the VAE of ``name``, of the published side: 960 or 1440."""
    side = {"720p": 960, "1080p": 1440}[end]
    return _hunyuan_15(name, folder, f"super_{end}", 2.0, 1.0, side, True, in_channels=98)


def _hunyuan_15(
    name: str, folder: Path, words: str, shift: float, cfg: float, side: int, few: bool, **more: int
) -> Path:
    from diffusers import HunyuanVideo15Transformer3DModel as Transformer

    made = folder / f"{name}_{words}"
    if not made.is_dir():
        shutil.copytree(tiny.build(name, folder), made)
        config = {**Transformer.load_config(made / "transformer"), "target_size": side, "use_meanflow": few, **more}
        with torch.random.fork_rng(devices=[]):
            module = Transformer.from_config(config)
        randomise(module, 1)
        module.save_pretrained(made / "transformer")
        changed(made / "guider" / "guider_config.json", guidance_scale=cfg)
        changed(made / "scheduler" / "scheduler_config.json", shift=shift)
    return made


def tenth(sizes: Callable[[int, int], Any]) -> Callable[..., Any]:
    """``generate_crop_size_list`` with a tenth of the published sides; smaller ones are a tenth already."""
    return lambda base_size, patch_size: sizes(base_size // 10 if base_size >= 640 else base_size, patch_size)


def hunyuan_15_upscaler(folder: Path, end: str) -> Path:
    """A tiny latent upscaler of HunyuanVideo 1.5, in the names of its release."""
    from safetensors.torch import save_file

    draws, tensors, widths = torch.Generator().manual_seed(1), dict[str, torch.Tensor](), (64, 96)

    def layer(name: str, before: int, after: int, side: int = 3) -> None:
        weight = torch.randn(after, before, side, side, side, generator=draws)
        tensors[f"{name}.weight"] = weight / (before * side**3) ** 0.5
        tensors[f"{name}.bias"] = torch.randn(after, generator=draws) / 10

    if end == "720p":
        layer("in_conv.conv", 32, 48)
        for block, place in ((block, place) for block in range(2) for place in (0, 2, 4)):
            layer(f"blocks.{block}.block.{place}.conv", 48, 48)
        layer("out_conv.conv", 48, 32)
    else:
        layer("conv_in.conv", 32, widths[0])
        before = widths[0]
        for level, block in ((level, block) for level in range(2) for block in range(3)):
            place, width = f"up.{level}.block.{block}", widths[level]
            for n, wide in ((1, before), (2, width)):
                layer(f"{place}.conv{n}.conv", wide, width)
                tensors[f"{place}.norm{n}.gamma"] = 1 + torch.randn(wide, 1, 1, 1, generator=draws) / 10
            if before != width:
                layer(f"{place}.nin_shortcut", before, width, 1)
            before = width
        tensors["norm_out.gamma"] = 1 + torch.randn(before, 1, 1, 1, generator=draws) / 10
        layer("conv_out.conv", before, 32)
    save_file(tensors, folder / f"upsampler_{end}.safetensors")
    return folder / f"upsampler_{end}.safetensors"


def changed(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def released_as(release: str) -> Callable[[str, Path], Path]:
    """Makes the tiny checkpoint of a family under the name of a release."""

    def made(name: str, folder: Path) -> Path:
        target = folder / release
        return target if target.is_dir() else Path(shutil.copytree(tiny.build(name, folder), target))

    return made


fast_mochi, fast_hunyuan = released_as("FastMochi-diffusers"), released_as("FastHunyuan-diffusers")
acc_video = released_as("AccVideo")


SKYREELS_T2V, SKYREELS_I2V, SKYREELS_SIZE = "SkyReels-V1-Hunyuan-T2V", "SkyReels-V1-Hunyuan-I2V", (96, 64)
SKYREELS = f"FPS-24, {PROMPT}"


def skyreels(name: str, folder: Path) -> Path:
    """A tiny transformer of SkyReels V1, alone, beside HunyuanVideo, which lends it the rest."""
    from tiny import parts

    models = folder / "skyreels"
    if not (models / name).is_dir():
        shutil.copytree(tiny.build("hunyuan_video", folder), models / "HunyuanVideo", dirs_exist_ok=True)
        with torch.random.fork_rng(devices=[]):
            beside = {"in_channels": 32, "out_channels": 16} if name == SKYREELS_I2V else {}
            module = parts.hunyuan_transformer(guidance_embeds=True, **beside)
        randomise(module, 1)
        module.save_pretrained(models / name)
    return models / name


LTX_SIZE, LTX_BLOCKS = (96, 64), 20  # the block without attention of the published recipe is the 20th
LTX_PICTURE = (187, 121)  # width and height: of another shape, with odd sides
LTX_FINAL, LTX_FIRST = (224, 128), (128, 64)  # of two passes: two thirds, down to a multiple of 32
LTX_GRIDS = {96: (2, 3), 128: (2, 4), 512: (4, 8)}  # rows and columns of a pass by its tokens


def ltx(name: str, folder: Path, blocks: int = LTX_BLOCKS) -> Path:
    """The tiny checkpoint ``name`` of LTX-Video with as many blocks as its recipe names, and a VAE of widths that the
    publisher's class can have; ``ltx_091`` is ``ltx`` with the VAE of 0.9.1."""
    from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
    from tiny import parts

    made = folder / f"{name}_{blocks}_blocks"
    if not made.is_dir():
        shutil.copytree(tiny.build(name.removesuffix("_091"), folder), made)
        config = LTXVideoTransformer3DModel.load_config(made / "transformer")
        vae = AutoencoderKLLTXVideo.load_config(made / "vae")
        if name == "ltx":
            vae |= dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8, 16, 32, 32))
        with torch.random.fork_rng(devices=[]):
            module = LTXVideoTransformer3DModel.from_config({**config, "num_layers": blocks})
            decoder = parts.ltx_vae_091() if name == "ltx_091" else AutoencoderKLLTXVideo.from_config(vae)
        for part, made_of in {"transformer": module, "vae": decoder}.items():
            randomise(made_of, blocks)
            made_of.save_pretrained(made / part)
    return made


def ltx_upscaler(folder: Path) -> Path:
    """A tiny latent upscaler of LTX-Video, in the names of its release."""
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        network = LTXLatentUpsamplerModel(mid_channels=32, num_blocks_per_stage=1)
    randomise(network, 1)
    save_file(network.state_dict(), folder / "upscaler.safetensors")
    return folder / "upscaler.safetensors"
