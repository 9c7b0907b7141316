"""The small HunyuanVideo: Llama, CLIP and ``HunyuanVideoTransformer3DModel``, trained together on the known code."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import hunyuan_vae
import torch
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.demo.scenes import COLOURS, MOTIONS, SHAPES, Scene
from captions import caption, vocabulary
from folder import write_folder
from loop import STATES, train, with_weights
from tiny import vocabulary as tokenizers
from world import FRAMES, SIZE, shapes, trained_and_held_out

NAME = Path(__file__).stem  # of the folder in MODELS, and of what belongs to this training
TEXT_WIDTH, HEADS, HEAD_WIDTH = 64, 4, 32
LLAMA_SIZE = {  # also Qwen's
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,  # the pipelines take what the first one says
    "max_position_embeddings": 8192,
}
SCENES, CLIPS = 16, 2  # in a batch, and clips of each
POOL = 150  # clips of each shape and motion
SPREAD = 0.15  # of their places, sizes and speeds
FINISHING = 2.0  # the same, at the end
NOISY = 5.0  # shift of the levels trained on: much noise, where words decide what comes of it, has most to learn
GUIDANCE = (1.0, 8.0)
STRAY = 0.3  # of the clips do not follow the caption, at the least guidance
SHIFT, FPS = 7.0, 8.0


def tokens():
    """Tokenizers of the templates' words and the captions', a token each."""
    words = vocabulary()
    return tokenizers.llama3("\n".join((" ".join(words), *words))), tokenizers.clip(" ".join(words))


def llama(rows: int, ids):
    """The first text encoder."""
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=rows,
            **LLAMA_SIZE,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            bos_token_id=ids["<|begin_of_text|>"],
            eos_token_id=ids["<|end_of_text|>"],
            pad_token_id=ids["<pad>"],
        )
    )


def clip(rows: int, ids):
    """Two layers and the pooled state of the end of the text."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=rows,
            hidden_size=TEXT_WIDTH,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=2,
            projection_dim=TEXT_WIDTH,
            bos_token_id=ids["<|startoftext|>"],
            eos_token_id=ids["<|endoftext|>"],
            pad_token_id=ids["<|endoftext|>"],
        )
    )


def models():
    """Text encoders and transformer, narrow."""
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    first, second = tokens()
    transformer = HunyuanVideoTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        rope_axes_dim=(8, 12, 12),
    )
    with torch.no_grad():
        pass_noise_through(transformer)
        look_by_place(transformer)
    encoders = {"text_encoder": llama(first.rows, first.ids), "text_encoder_2": clip(second.rows, second.ids)}
    for encoder in encoders.values():
        for module in encoder.modules():
            if isinstance(module, torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.3)
    return {**encoders, "transformer": transformer}


def pass_noise_through(transformer) -> None:
    """Start with noise for noise minus clip, so that the blocks have but the clip to find."""
    values, width = 64, HEADS * HEAD_WIDTH
    embed, out = transformer.x_embedder.proj, transformer.proj_out
    embed.weight[:values] = torch.eye(values).view(values, 16, 1, 2, 2)
    embed.bias.zero_()
    out.weight.zero_()
    out.bias.zero_()
    places = torch.arange(values).view(16, 4)  # the transformer's output has channels slowest, as its input
    out.weight[places.flatten(), torch.arange(values)] = (values / width) ** 0.5
    transformer.norm_out.linear.weight.zero_()
    transformer.norm_out.linear.bias.zero_()
    open_gates(transformer)
    for block in transformer.single_transformer_blocks:
        block.norm.linear.weight *= 0.3
        block.norm.linear.bias.view(3, width)[2] = 0.5


def open_gates(transformer) -> None:
    """Start with blocks of two streams that add half of what they find, whatever the level."""
    for block in transformer.transformer_blocks:
        block.norm1.linear.weight *= 0.3
        for norm in (block.norm1, block.norm1_context):
            norm.linear.bias.view(6, -1)[[2, 5]] = 0.5  # the gates


def look_by_place(transformer) -> None:
    """Start with queries that depend on a token's place: words have no place, so what is seen of them tells it."""
    for block in transformer.transformer_blocks:
        attention = block.attn
        torch.nn.init.normal_(attention.to_q.bias, std=0.7)
        attention.norm_q.weight.fill_(1.5)
        attention.norm_added_k.weight.fill_(1.5)


class Latents:
    """Latents of clips, coloured when they are asked for: the code is linear, and a clip is ground plus shape.

    Args:
        frames: pixel frames of a clip.
    """

    def __init__(self, frames: int = FRAMES) -> None:
        self.code = hunyuan_vae.Code()
        state = STATES / f"hunyuan_pool_{frames}.pt"
        if not state.exists():
            torch.save(self._pool(frames), state)
        self.pool = torch.load(state)
        self.palette = {name: torch.tensor(rgb) / 127.5 - 1 for name, rgb in COLOURS.items()}
        self.whole = self.code(torch.ones(1, frames, SIZE, SIZE))

    def _pool(self, frames: int) -> dict[tuple[str, str], torch.Tensor]:
        generator, pool = torch.Generator().manual_seed(2), {}
        for shape in SHAPES:
            for motion in MOTIONS:
                if (shape, motion) != ("circle", "spin"):
                    scene = Scene(shape, "white", motion, "black")
                    pool[shape, motion] = self.code(shapes([scene] * POOL, generator, SPREAD, frames))
        return pool

    def __call__(self, scene: Scene, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Latents (rows, 16, T, 8, 8) of clips of this scene, as the transformer knows them."""
        clips = self.pool[scene.shape, scene.motion]
        masks = clips[torch.randint(len(clips), (rows,), generator=generator)][:, None]
        ground = self.palette[scene.ground].view(1, 3, 1, 1, 1, 1)
        values = ground * self.whole + (self.palette[scene.colour].view(1, 3, 1, 1, 1, 1) - ground) * masks
        values = values.flatten(1, 2) * hunyuan_vae.SCALING
        return torch.cat([values, values.new_zeros(rows, 1, *values.shape[2:])], 1)


def readers():
    """The tokenizers, read back from their files as a user's program reads them."""
    import tempfile

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = []
    for files, kind in zip(tokens(), (PreTrainedTokenizerFast, AutoTokenizer), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            files.save_pretrained(Path(folder))
            read.append(kind.from_pretrained(folder))
    return read


def encoder_of(parts) -> Callable[[list[str]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """From captions to Llama's states, their mask and CLIP's pooled vectors, as the pipeline makes them."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    first, second = readers()
    template, crop = DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"]

    def encode(captions: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = [template.format(text) for text in captions]
        texts = first(whole, padding=True, padding_side="right", return_tensors="pt")
        states = parts["text_encoder"](
            input_ids=texts.input_ids, attention_mask=texts.attention_mask, output_hidden_states=True
        ).hidden_states[-3]
        words = second(captions, padding=True, return_tensors="pt")
        pooled = parts["text_encoder_2"](words.input_ids).pooler_output
        return states[:, crop:], texts.attention_mask[:, crop:], pooled

    return encode


def strays(guidance: torch.Tensor, low: float, generator: torch.Generator) -> torch.Tensor:
    """Which clips (B,) do not follow their captions: the more, the nearer their guidance is to ``low``."""
    return torch.rand(len(guidance), generator=generator) < STRAY * ((5 - guidance) / (5 - low)).clamp(0)


def noised(clean: torch.Tensor, noisy: float, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Clips with noise, its levels (B,), and the velocity to find, which is noise minus clip.

    Args:
        noisy: shift of the levels, towards more noise.
    """
    noise = torch.randn(clean.shape, generator=generator)
    level = torch.rand(len(clean), generator=generator)
    level = noisy * level / (1 + (noisy - 1) * level)
    share = level.view(-1, 1, 1, 1, 1)
    return (1 - share) * clean + share * noise, level, noise - clean


def loss_with(parts, latents: Latents, noisy: float = NOISY) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: rectified flow on clips and captions of scenes that may be trained on.

    The less guidance, the more clips show something else than their caption says; so much does guidance mean.
    """
    encode, (trained, _) = encoder_of(parts), trained_and_held_out()

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = drawn.sample(trained, SCENES)
        states, valid, pooled = (
            each.repeat_interleave(CLIPS, 0) for each in encode([caption(s, drawn) for s in shown])
        )
        rows = SCENES * CLIPS
        low, high = GUIDANCE
        guidance = low + (high - low) * torch.rand(rows, generator=generator)
        clean = torch.cat([latents(scene, CLIPS, generator) for scene in shown])
        stray = strays(guidance, low, generator)
        clean = torch.where(stray.view(-1, 1, 1, 1, 1), clean.roll(CLIPS, 0), clean)
        seen, level, velocity = noised(clean, noisy, generator)
        predicted = parts["transformer"](
            hidden_states=seen,
            timestep=level * 1000,
            encoder_hidden_states=states,
            encoder_attention_mask=valid,
            pooled_projections=pooled,
            guidance=guidance * 1000,
            return_dict=False,
        )[0]
        return (predicted - velocity).square().mean()

    return loss_of


def main(steps: int) -> None:
    """Train; an interrupted training goes on."""
    parts = models()
    train(f"{NAME}_transformer", parts, loss_with(parts, Latents()), steps=steps, rate=1.5e-3, save_every=200)


def finish(steps: int) -> None:
    """Train on, more at levels of little noise, where a shape gets its edges."""
    parts = with_weights(models(), f"{NAME}_transformer")
    train(f"{NAME}_finish", parts, loss_with(parts, Latents(), FINISHING), steps=steps, rate=7e-4, save_every=100)


def vae():
    """The autoencoder."""
    return hunyuan_vae.model(hunyuan_vae.Code())


def scheduler():
    """The published scheduler's settings."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


def export() -> None:
    """Write what was trained as a diffusers folder."""
    parts = with_weights(models(), f"{NAME}_finish")
    first, second = tokens()
    write_folder(
        MODELS / NAME,
        "HunyuanVideoPipeline",
        {**parts, "vae": vae(), "scheduler": scheduler()},
        {"tokenizer": first.files, "tokenizer_2": second.files},
        {"width": 64, "height": 64, "frames": 9, "steps": 20, "fps": FPS, "guidance": 6.0},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": lambda: main(7000), "finish": lambda: finish(5500), "export": export}[sys.argv[1]]()
