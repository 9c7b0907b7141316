"""The small Hunyuan3D paint: both UNets of v2-0, trained to carry the colours of a picture onto views of simple meshes.

Boxes, balls, cylinders and the like in one or two colours, which meet at a height or from side to side. The picture is
the front view; the six views are those of the pack. Latents are means of 8 x 8 pixels, three of the four channels.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import packing
import torch
from anygpu.paint.choices import DEMO_SIZE, MODELS, PUBLISHED
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_ids
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.views import rendered_maps
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks.multiview import StreamInputs
from anygpu.paint.networks.published import networks_for, published
from anygpu.paint.networks.unet import set_attention
from anygpu.paint.networks.vae import SCALE
from anygpu.paint.sampling.solvers import schedule_for, sigma_table, solver_for
from anygpu.pipelines.sampling.schedules import classifier_free_guidance
from loop import STATES, train, with_weights
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from paint.synthetic import photographs

NAME = Path(__file__).stem
SIZE, BLOCK, VIEWS = DEMO_SIZE, 8, len(DEFAULT_VIEWS)
MESHES, OBJECTS = 64, 2  # in the pool, and in a batch
GREY, WHITE = 0.0, 1.0  # grounds of the picture and of the views, in -1..1
WIDTH = 8  # of the VAE
CONSTANT = 1024.0  # so large beside the other channels that a norm sees nothing else
CERTAIN = -14.0  # the logarithm of next to no variance
UNGUIDED = 0.15  # of the objects in a batch have no picture
CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": 1024,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 32,
    "time_embedding_dim": 1280,  # the published width of a view's label
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}


@dataclass(frozen=True)
class Shown:
    """A mesh as the six cameras see it.

    Args:
        maps: latents of normals and positions (V, 8, h, w).
        shares: (V, 2, h, w), how much of a latent's pixels each of two colours takes; the ground has the rest.
    """

    maps: Tensor
    shares: Tensor


def coded(pictures: Tensor) -> Tensor:
    """Latents (B, C, h, w) of pictures (B, H, W, C)."""
    return functional.avg_pool2d(pictures.movedim(-1, 1), BLOCK)


def mesh(kind: str, drawn: random.Random) -> Mesh:
    """A mesh of random proportions."""
    from trimesh import creation, transformations

    made = {
        "box": lambda: creation.box(),
        "ball": lambda: creation.icosphere(3, 0.6),
        "cylinder": lambda: creation.cylinder(0.5, 1.0, sections=32),
        "cone": lambda: creation.cone(0.6, 1.0, sections=32),
        "capsule": lambda: creation.capsule(0.8, 0.4),
        "torus": lambda: creation.torus(0.6, 0.25),
    }[kind]()
    if drawn.random() < 0.5:
        made.apply_transform(transformations.rotation_matrix(math.pi / 2, (1, 0, 0)))
    made.apply_scale([drawn.uniform(0.6, 1.4) for _ in range(3)])
    made.apply_transform(transformations.rotation_matrix(drawn.uniform(0, 2 * math.pi), (0, 1, 0)))
    return Mesh(torch.from_numpy(made.vertices.copy()).float(), torch.from_numpy(made.faces.copy()).long())


def shown(seed: int) -> Shown:
    """The mesh of this number, divided into two colours or left in one."""
    drawn = random.Random(seed)
    kinds = ("box", "ball", "cylinder", "cone", "capsule", "torus")
    surface = Surface.of(mesh(kinds[seed % len(kinds)], drawn))
    axis, at = drawn.choice(((1, drawn.uniform(-0.15, 0.15)), (1, 0.0), (0, 0.0), (1, -9.0)))

    def divided(places: Tensor) -> Tensor:
        first = (places[:, axis] > at).float()
        return torch.stack((first, 1 - first, torch.zeros_like(first)), 1)

    maps = rendered_maps(surface, DEFAULT_VIEWS, SIZE)
    both = torch.cat(
        [coded(maps.normal * 2 - 1), extra(maps.normal), coded(maps.position * 2 - 1), extra(maps.normal)], 1
    )
    return Shown(both, coded(photographs(surface, DEFAULT_VIEWS, SIZE, 2 * SIZE, divided, 0.0)[..., :2]))


def extra(maps: Tensor) -> Tensor:
    """The fourth channel, which says nothing."""
    return torch.zeros(len(maps), 1, SIZE // BLOCK, SIZE // BLOCK)


def pool() -> list[Shown]:
    """Meshes to train on, rendered once."""
    state = STATES / f"{NAME}_pool.pt"
    if not state.exists():
        STATES.mkdir(parents=True, exist_ok=True)
        torch.save([(one.maps, one.shares) for one in map(shown, range(MESHES))], state)
    return [Shown(*one) for one in torch.load(state)]


def coloured(shares: Tensor, colours: Tensor, ground: float) -> Tensor:
    """Latents (V, 4, h, w) of ``shares`` in two ``colours`` (2, 3), -1..1."""
    values = torch.einsum("vkhw,kc->vchw", shares, colours) + ground * (1 - shares.sum(1, keepdim=True))
    return functional.pad(values, (0, 0, 0, 0, 0, 1))


def models() -> dict[str, torch.nn.Module]:
    """Both UNets, narrow."""
    torch.manual_seed(0)
    parts = networks_for("paint", CONFIG)
    main, reference = parts["unet"], parts["reference"]
    for network in parts.values():
        network.requires_grad_(True)
        set_attention(network, functional.scaled_dot_product_attention)
    for text in (main.learned_text_clip_gen, reference.learned_text_clip_ref):
        torch.nn.init.normal_(text, std=0.1)
    torch.nn.init.normal_(main.class_embedding.weight, std=0.3)
    torch.nn.init.zeros_(main.body.conv_out.weight)
    for unread in (reference.body.conv_norm_out, reference.body.conv_out):
        unread.requires_grad_(False)
    return parts


def loss_with(parts: dict[str, torch.nn.Module], meshes: list[Shown]) -> Callable[[int, torch.Generator], Tensor]:
    """The loss of a step: the velocity of noisy views, beside maps, camera labels and what is seen of the picture."""
    table = 1 / (1 + sigma_table(zero_snr=True) ** 2)
    ids = torch.tensor(camera_ids(DEFAULT_VIEWS))

    def loss_of(step: int, generator: torch.Generator) -> Tensor:
        drawn = random.Random(step)
        chosen = drawn.sample(meshes, OBJECTS)
        colours = torch.rand(OBJECTS, 2, 3, generator=generator) * 2 - 1
        clean = torch.stack([coloured(one.shares, pair, WHITE) for one, pair in zip(chosen, colours, strict=True)])
        pictures = torch.stack(
            [coloured(one.shares[:1], pair, GREY) for one, pair in zip(chosen, colours, strict=True)]
        )
        times = torch.randint(1000, (OBJECTS,), generator=generator)
        kept = table[times].float().view(-1, 1, 1, 1, 1)
        noise = torch.randn(clean.shape, generator=generator)
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
        scales = tuple(float(drawn.random() >= UNGUIDED) for _ in range(OBJECTS))
        reference = parts["reference"](pictures)
        run = StreamInputs(views=VIEWS, reference=reference, scales=scales)
        maps = torch.stack([one.maps for one in chosen])
        predicted = parts["unet"](noisy, times.repeat_interleave(VIEWS), maps, ids, run)
        return (predicted - velocity.flatten(0, 1)).square().mean()

    return loss_of


def main(steps: int) -> None:
    """Train; an interrupted training goes on."""
    parts = models()
    train(NAME, parts, loss_with(parts, pool()), steps=steps, rate=8e-4, save_every=100)


@torch.no_grad()
def painted(parts: dict[str, torch.nn.Module], one: Shown, picture: Tensor, seed: int) -> Tensor:
    """Latents (V, 4, h, w) of the views, by the published sampler and guidance.

    Args:
        picture: latents (1, 4, h, w).
    """
    own, draws = PUBLISHED["v2-0"], torch.Generator().manual_seed(seed)
    shape = one.maps.shape[0], 4, *one.maps.shape[2:]
    solver = solver_for(own.scheduler, schedule_for(own.spacing, own.steps, zero_snr=True))
    run = StreamInputs(views=VIEWS, reference=parts["reference"](picture[None]), scales=(0.0, 1.0))
    ids, x = torch.tensor(camera_ids(DEFAULT_VIEWS)), solver.begin(torch.randn(shape, generator=draws), None)
    for index, time in enumerate(solver.schedule.timesteps):
        sample = solver.model_input(x, index).expand(2, *shape)
        plain, asked = parts["unet"](sample, torch.tensor([time]), one.maps[None], ids, run).unflatten(0, (2, -1))
        velocity = classifier_free_guidance(asked, plain, own.guidance)
        x = solver.step(velocity, index, x, lambda: torch.randn(shape, generator=draws))
    return x


@torch.no_grad()
def score(count: int = 12) -> None:
    """Print how far the colours are off, 0..1, on meshes and colours that were never trained on.

    Beside the state lies a sheet: for each mesh the right views and below them the painted ones.
    """
    parts = with_weights(models(), NAME)
    drawn = torch.Generator().manual_seed(1)
    meshes = [shown(MESHES + index) for index in range(count)]
    colours = torch.rand(count, 2, 3, generator=drawn) * 2 - 1
    rights = [coloured(one.shares, pair, WHITE) for one, pair in zip(meshes, colours, strict=True)]
    pictures = [coloured(one.shares[:1], pair, GREY) for one, pair in zip(meshes, colours, strict=True)]
    rows: list[Tensor] = []
    errors: dict[str, list[float]] = {"own picture": [], "another's picture": [], "grey": []}
    for index, (one, right) in enumerate(zip(meshes, rights, strict=True)):
        inside = (one.shares.sum(1, keepdim=True) > 0.99).expand(-1, 3, -1, -1)
        made = painted(parts, one, pictures[index], index)
        other = painted(parts, one, pictures[index - 1], index)
        for name, values in zip(errors, (made, other, torch.zeros_like(made)), strict=True):
            errors[name].append(float((values[:, :3].clamp(-1, 1) - right[:, :3]).abs()[inside].mean()) / 2)
        rows += [torch.cat(list(views[:, :3]), 2) for views in (right, made)]
    print({name: round(sum(values) / count, 3) for name, values in errors.items()})
    sheet = torch.cat(rows, 1).repeat_interleave(4, 1).repeat_interleave(4, 2).movedim(0, -1)
    Image.fromarray(((sheet.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()).save(STATES / f"{NAME}.png")


def vae():
    """The pictures' autoencoder of the real class, whose code is the mean of 8 x 8 pixels; nothing is trained.

    Its branches add nothing. Before the last convolution the values are there as they are and negative, beside two
    constants: the norm divides by a number known beforehand, and silu(x) - silu(-x) is x.
    """
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(WIDTH,) * 4,
        latent_channels=4,
        norm_num_groups=1,
        scaling_factor=SCALE,
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv2" in name or "to_out" in name:
                weight.zero_()
        encoder, decoder = model.encoder, model.decoder
        downs = [encoder.down_blocks[level].downsamplers[0].conv for level in range(3)]
        ups = [decoder.up_blocks[level].upsamplers[0].conv for level in range(3)]
        for conv in (encoder.conv_in, decoder.conv_in, *downs, *ups, encoder.conv_out, decoder.conv_out):
            conv.weight.zero_()
            conv.bias.zero_()
        for conv, mean in ((model.quant_conv, CERTAIN), (model.post_quant_conv, 0.0)):
            conv.weight.copy_(torch.eye(conv.out_channels).view_as(conv.weight))
            conv.bias.zero_()
            conv.bias[4:] = mean
        for colour in range(3):
            for conv, factor in ((encoder.conv_in, 1.0), (decoder.conv_in, SCALE), *((up, 1.0) for up in ups)):
                conv.weight[colour, colour, 1, 1] = factor
            for down in downs:
                down.weight[colour, colour, :2, :2] = 0.25
            for conv in (downs[2], ups[2]):
                conv.weight[3 + colour] = -conv.weight[colour]
            for conv, factor in ((encoder.conv_out, 1 / SCALE), (decoder.conv_out, 1.0)):
                conv.weight[colour, [colour, 3 + colour], 1, 1] = torch.tensor([0.5, -0.5]) * CONSTANT * factor
        for conv in (downs[2], ups[2]):
            conv.bias[6:] = torch.tensor([CONSTANT, -CONSTANT])
        for half in (encoder, decoder):
            half.conv_norm_out.weight.fill_(1.0)
            half.conv_norm_out.bias.zero_()
    return model.eval()


def write(parts: dict[str, torch.nn.Module], folder: Path) -> None:
    """Write both UNets and the VAE as a folder like the published one, in bf16."""
    tensors = {
        published("paint", part, key): tensor.bfloat16().contiguous()
        for part, module in parts.items()
        for key, tensor in module.state_dict().items()
    }
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "unet" / "diffusion_pytorch_model.safetensors")
    (folder / "unet" / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    vae().bfloat16().save_pretrained(folder / "vae")


def inputs() -> dict[str, Tensor]:
    """What :func:`packing.inputs_of` says of the model that ships, which paints one mesh."""
    pipeline = load_paint(PaintRequest(MODELS / NAME, device="cpu", precision="fp32"))
    parts = {part: pipeline.parts.read(part) for part in models()}
    one = shown(MESHES)
    with packing.watched(parts) as sums:
        painted(parts, one, coloured(one.shares[:1], torch.tensor([[0.8, -0.4, 0.0], [-0.6, 0.2, 0.9]]), GREY), 0)
    names = {name: name.partition("/") for name in sums}
    return {
        f"{NAME}/unet/{published('paint', part, f'{key}.weight')}".removesuffix(".weight"): sums[name]
        for name, (part, _, key) in names.items()
    }


def export() -> None:
    """Write the folder that ships."""
    write(with_weights(models(), NAME), MODELS / NAME)
    packing.write(NAME)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": lambda: main(7200), "score": score, "export": export}[sys.argv[1]]()
