"""The small FramePack: it goes on from the small HunyuanVideo, as the published one does, and sees a picture."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import hunyuan_video
import torch
from anygpu.pipelines.base import FramePackSettings
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.families.framepack.sections import History, plan_for
from anygpu.pipelines.families.framepack.spec import I2V
from captions import caption
from folder import write_folder
from hunyuan_vae import SCALING
from hunyuan_video import FPS, HEAD_WIDTH, HEADS, TEXT_WIDTH, Latents, encoder_of, noised, strays, tokens
from loop import saved, train, with_weights
from world import trained_and_held_out

NAME = Path(__file__).stem
VISION_WIDTH, VISION_SIZE, VISION_PATCH = 64, 64, 32
SCENES, CLIPS = 16, 1
WINDOW = 3  # latent frames that are sampled after the picture's: the fewest of which one section shows 9 frames
FRAMES = 4 * WINDOW + 1
NOISY = 3.0
GUIDANCE = (1.0, 12.0)


def models():
    """HunyuanVideo's parts as trained, a SigLIP of one layer, and what else FramePack's transformer has."""
    from diffusers import HunyuanVideoFramepackTransformer3DModel
    from transformers import SiglipVisionConfig, SiglipVisionModel

    parts, trained = hunyuan_video.models(), saved(f"{hunyuan_video.NAME}_transformer")
    torch.manual_seed(0)
    transformer = HunyuanVideoFramepackTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        rope_axes_dim=(8, 12, 12),
        has_image_proj=True,
        image_proj_dim=VISION_WIDTH,
        has_clean_x_embedder=True,
    )
    for name in ("text_encoder", "text_encoder_2"):
        parts[name].load_state_dict(trained[name])
    transformer.load_state_dict(trained["transformer"], strict=False)
    with torch.no_grad():
        seen = transformer.clean_x_embedder
        seen.proj.load_state_dict(transformer.x_embedder.proj.state_dict())
        for conv, factor in ((seen.proj_2x, 2), (seen.proj_4x, 4)):
            spread = seen.proj.weight.repeat_interleave(factor, 2)
            spread = spread.repeat_interleave(factor, 3).repeat_interleave(factor, 4)
            conv.weight.copy_(spread / factor**3)
            conv.bias.copy_(seen.proj.bias)
    vision = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=VISION_WIDTH,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=1,
            image_size=VISION_SIZE,
            patch_size=VISION_PATCH,
        )
    )
    return {**parts, "image_encoder": vision, "transformer": transformer}


def pictures(latents: Latents, clean: torch.Tensor) -> torch.Tensor:
    """The first frames (B, 3, H, W) in -1..1 of latents (B, 16, T, 8, 8), as the decoder would show them."""
    code = clean[:, :15, :1].unflatten(1, (3, -1)).flatten(0, 1) / SCALING
    return latents.code.decode(code)[:, 0].unflatten(0, (-1, 3)).clamp(-1, 1)


def loss_with(parts, latents: Latents) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: rectified flow on what follows the first latent frame, which the model is shown."""
    encode, (trained, _) = encoder_of(parts), trained_and_held_out()
    plan = plan_for(I2V, FramePackSettings(0.0, window=WINDOW), 1, ended=False)

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn, rows = random.Random(step), SCENES * CLIPS
        shown = drawn.sample(trained, SCENES)
        states, valid, pooled = (
            each.repeat_interleave(CLIPS, 0) for each in encode([caption(s, drawn) for s in shown])
        )
        clips = torch.cat([latents(scene, CLIPS, generator) for scene in shown])
        start, clean = clips[:, :, :1], clips[:, :, 1:]
        low, high = GUIDANCE
        guidance = low + (high - low) * torch.rand(rows, generator=generator)
        stray = strays(guidance, low, generator)
        states = torch.where(stray.view(-1, 1, 1), states.roll(CLIPS, 0), states)
        pooled = torch.where(stray[:, None], pooled.roll(CLIPS, 0), pooled)
        valid = torch.where(stray[:, None], valid.roll(CLIPS, 0), valid)
        seen, level, velocity = noised(clean, NOISY, generator)
        vision = parts["image_encoder"](pixel_values=pictures(latents, start)).last_hidden_state
        predicted = parts["transformer"](
            hidden_states=seen,
            timestep=level * 1000,
            encoder_hidden_states=states,
            encoder_attention_mask=valid,
            pooled_projections=pooled,
            image_embeds=vision,
            guidance=guidance * 1000,
            return_dict=False,
            **History(plan, start).seen(),
            **plan.indices(0),
        )[0]
        return (predicted - velocity).square().mean()

    return loss_of


def main(steps: int) -> None:
    """Train; an interrupted training goes on."""
    parts = models()
    train(f"{NAME}_transformer", parts, loss_with(parts, Latents(FRAMES)), steps=steps, rate=8e-4, save_every=200)


def finish(steps: int) -> None:
    """Train on, at a rate that falls again."""
    parts = with_weights(models(), f"{NAME}_transformer")
    train(f"{NAME}_finish", parts, loss_with(parts, Latents(FRAMES)), steps=steps, rate=6e-4, save_every=100)


def export() -> None:
    """Write what was trained as a diffusers folder."""
    from transformers import SiglipImageProcessor

    parts = with_weights(models(), f"{NAME}_finish")
    side = {"height": VISION_SIZE, "width": VISION_SIZE}
    first, second = tokens()
    write_folder(
        MODELS / NAME,
        "HunyuanVideoFramepackPipeline",
        {
            **parts,
            "vae": hunyuan_video.vae(),
            "feature_extractor": SiglipImageProcessor(size=side),
            "scheduler": hunyuan_video.scheduler(),
        },
        {"tokenizer": first.files, "tokenizer_2": second.files},
        {"width": 64, "height": 64, "frames": 9, "steps": 20, "fps": FPS, "guidance": 10.0, "cfg": 4.0, "cfg_end": 0.4},
        shared=dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"), hunyuan_video.NAME),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": lambda: main(1600), "finish": lambda: finish(1700), "export": export}[sys.argv[1]]()
