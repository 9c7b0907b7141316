"""The small LTX-Video: T5 encoder and ``LTXVideoTransformer3DModel``, trained together on the known code."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import ltx_vae
import torch
from anygpu.pipelines.demo import LORAS, MODELS
from anygpu.pipelines.demo.scenes import COLOURS, MOTIONS, SHAPES, Scene
from anygpu.pipelines.settings import OWN_DEFAULTS
from captions import caption, t5_tokenizer
from code_of_blocks import Code
from folder import shipped, write_folder
from loop import STATES, saved, train, with_weights
from torch import nn
from world import FRAMES, SIZE, at_night, shapes, trained_and_held_out

NAME = Path(__file__).stem  # of the folder in MODELS, and of what belongs to this training
TOKENS = 128  # to which LTXPipeline pads every text, without telling T5
WIDTH, HEADS, LAYERS, TEXT_WIDTH = 192, 4, 3, 64
LONGEST, CROPPED = 24, 56  # tokens of a caption; tokens at which T5 sees all that it would see among 128
SCENES, CLIPS = 16, 4  # in a batch, and clips of each
POOL = 150  # clips of each shape and motion
SPREAD = 0.25  # of their places, sizes and speeds
FIRST_FRAME = 0.1  # of the clips are given their first latent frame
SHIFT = math.exp(0.95 + (8 - 1024) * (2.05 - 0.95) / (4096 - 1024))  # the published shift for 8 tokens
FPS = 8.0
NOISY = 5.0  # shift of the levels trained on: much noise, where words decide what comes of it, has most to learn
GRID = {  # what the transformer is told of the place of 8 tokens
    "num_frames": 2,
    "height": 2,
    "width": 2,
    "rope_interpolation_scale": (8 / FPS, 32, 32),
    "return_dict": False,
}
FEW, WITHIN, CFG = 4, 4, 3.0  # steps of the distilled LoRA; steps between two of its levels, and their guidance
PARTS = ("text_encoder", "transformer")
RANK, ADAPTED = 8, ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_out"]  # of the LoRA
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def tokenizer(tokens: int = TOKENS):
    """The tokenizer, read back from its files as a user's program reads it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        t5_tokenizer(tokens).save_pretrained(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def t5(rows: int):
    """Two layers that know this many tokens."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=-(-rows // 16) * 16,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def models():
    """Text encoder and transformer, narrow."""
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=LAYERS,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT_WIDTH,
    )
    parts = {"text_encoder": t5(len(tokenizer())), "transformer": transformer}
    with torch.no_grad():
        # What is 32 tokens away is padding: unseen, its length, 128 or any other, does not matter.
        bias = parts["text_encoder"].encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        bias[12:16], bias[28:] = -30.0, -30.0
        pass_noise_through(transformer)
        know_places(transformer)
    return parts


def pass_noise_through(transformer) -> None:
    """Start with noise for noise minus clip, so that the blocks have but the clip to find."""
    transformer.proj_in.weight[:128] = torch.eye(128)
    transformer.proj_in.bias.zero_()
    transformer.proj_out.weight.zero_()
    transformer.proj_out.weight[:, :128] = torch.eye(128) * (128 / WIDTH) ** 0.5
    transformer.time_embed.linear.weight.zero_()
    transformer.time_embed.linear.bias.zero_()
    for block in transformer.transformer_blocks:
        block.scale_shift_table.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])[:, None].expand(-1, WIDTH))


def know_places(transformer) -> None:
    """Start with a first block that writes each token's place, as -1 or 1 per axis, into three channels.

    A rotary embedding tells only how far away another token is. A head that looks for the next token along an axis
    gets the token itself where there is none: it differs from what it got, or it does not. To find that out, a
    transformer of this size needs longer than for all the rest.
    """
    block, width, features = transformer.transformer_blocks[0], WIDTH // HEADS, 16
    attention, hidden, out = block.attn1, block.ff.net[0].proj, block.ff.net[2]
    frequencies = 10000 ** torch.linspace(0, 1, WIDTH // 6)
    steps = torch.tensor([8 / FPS / 20, 32 / 2048, 32 / 2048]) * math.pi  # phase from one token to the next
    attention.norm_q.weight.fill_(2.0)
    attention.norm_k.weight.fill_(2.0)
    hidden.weight[: 6 * features] = 0
    out.weight[:, : 6 * features] = 0
    for axis in range(3):
        head = slice((axis + 1) * width, (axis + 2) * width)
        for linear in (attention.to_q, attention.to_k):
            linear.weight[head], linear.bias[head] = 0, 0
        first = (axis + 1) * width // 6
        for other in range(3):
            phases = frequencies[first : first + width // 6] * steps[other]
            wanted = math.pi / 2 if other == axis else math.pi
            best = int(((phases - wanted).cos()).argmax())
            pair = 6 * (first + best) + 2 * other
            turn = float(phases[best]) if other == axis else 0.0
            attention.to_k.bias[pair] = 5.0
            attention.to_q.bias[pair : pair + 2] = 5.0 * torch.tensor([math.cos(turn), math.sin(turn)])
        attention.to_v.weight[head], attention.to_v.bias[head] = 0, 0
        attention.to_out[0].weight[:, head] *= 0.1
        for i in range(features):
            seen, channel = 8 * i + axis, 128 + axis * features + i
            attention.to_v.weight[head.start + i, seen] = 1
            attention.to_out[0].weight[channel] = 0
            attention.to_out[0].weight[channel, head.start + i] = 1
            row = 2 * (axis * features + i)
            for sign in (1, -1):
                hidden.weight[row, channel], hidden.weight[row, seen] = 1.5 * sign, -1.5 * sign
                hidden.bias[row] = 0
                out.weight[WIDTH - 3 + axis, row] = 1.2 / features
                row += 1
        out.bias[WIDTH - 3 + axis] = -1.0
        block.attn2.to_out[0].weight[128 : 128 + 3 * features] = 0
        block.attn2.to_out[0].bias[128 : 128 + 3 * features] = 0
    attention.to_out[0].bias.zero_()
    transformer.proj_in.weight[128 : 128 + 3 * features] = 0
    transformer.proj_in.weight[WIDTH - 3 :] = 0


class Latents:
    """Latents of clips, coloured when they are asked for: the code is linear, and a clip is ground plus shape.

    Args:
        name: of the file that keeps the clips' code. frames: pixel frames of a clip.
        light: what becomes of a colour, (3,) in 0..255.
    """

    def __init__(
        self,
        name: str,
        code: Code,
        frames: int = FRAMES,
        light: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
    ) -> None:
        self.code, self.frames = code, frames
        state = STATES / f"{name}_pool.pt"
        if not state.exists():
            STATES.mkdir(parents=True, exist_ok=True)
            torch.save(self._pool(), state)
        self.pool = torch.load(state)
        self.palette = {name: light(torch.tensor(rgb)) / 127.5 - 1 for name, rgb in COLOURS.items()}
        self.whole = self.code.channel(torch.ones(1, frames, SIZE, SIZE))

    def _pool(self) -> dict[tuple[str, str], torch.Tensor]:
        generator, pool = torch.Generator().manual_seed(2), {}
        for shape in SHAPES:
            for motion in MOTIONS:
                if (shape, motion) != ("circle", "spin"):
                    scene = Scene(shape, "white", motion, "black")
                    parts = [shapes([scene] * 50, generator, SPREAD, self.frames) for _ in range(POOL // 50)]
                    pool[shape, motion] = torch.cat([self.code.channel(part) for part in parts])
        return pool

    def __call__(self, scene: Scene, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Latents (rows, channels, T, h, w) of clips of this scene, less the code's mean."""
        clips = self.pool[scene.shape, scene.motion]
        masks = clips[torch.randint(len(clips), (rows,), generator=generator)][:, None]
        ground = self.palette[scene.ground].view(1, 3, 1, 1, 1, 1)
        values = ground * self.whole + (self.palette[scene.colour].view(1, 3, 1, 1, 1, 1) - ground) * masks
        values = values.flatten(1, 2)
        empty = values.new_zeros(rows, self.code.channels - values.shape[1], *values.shape[2:])
        return torch.cat([values, empty], 1) - self.code.mean.view(-1, 1, 1, 1)


def latents_of(light: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float) -> Latents:
    """Latents in LTX-Video's code."""
    return Latents(NAME, ltx_vae.code_of_clips(), light=light)


def main(steps: int, on: bool = False) -> None:
    """Train, going ``on`` from what ships if asked; an interrupted training goes on in any case."""
    parts = shipped(NAME, PARTS) if on else models()
    train(f"{NAME}_transformer", parts, loss_with(parts, latents_of()), steps=steps, rate=1.5e-3, save_every=200)


def lora(steps: int = 3000) -> None:
    """Train a LoRA that draws everything at night."""
    parts = adapted(RANK)
    train(f"{NAME}_night", parts, loss_with(parts, latents_of(at_night)), steps=steps, rate=2e-3, save_every=200)
    write_lora(parts["transformer"], f"{NAME}_night")


def adapted(rank: int) -> dict[str, nn.Module]:
    """The parts that ship, of which a new LoRA of the transformer is trained."""
    from peft import LoraConfig

    parts = shipped(NAME, PARTS)
    parts["text_encoder"].requires_grad_(False)
    parts["transformer"].requires_grad_(False).add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=ADAPTED))
    return parts


def few(steps: int = 1400) -> None:
    """Train a LoRA with which :data:`FEW` steps without guidance end where the usual steps with guidance do."""
    parts = adapted(2 * RANK)
    train(f"{NAME}_{FEW}_steps", parts, distilled_with(parts), steps=steps, rate=2e-3, save_every=200, falling=0.5)
    write_lora(parts["transformer"], f"{NAME}_{FEW}_steps", {OWN_DEFAULTS: json.dumps({"steps": FEW, "cfg": 1.0})})


def distilled_with(parts) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: how far each of the few steps is from what many steps with guidance do between its levels.

    Each step starts where the one before it ended, as it will in a run, from noise that nobody saw before.
    """
    words, (trained, _), transformer = tokenizer(), trained_and_held_out(), parts["transformer"]
    levels = schedule(FEW)

    def velocity(x: torch.Tensor, level: float, states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return transformer(
            hidden_states=x,
            encoder_hidden_states=states,
            timestep=torch.full((len(x), 1), level * 1000),
            encoder_attention_mask=valid,
            **GRID,
        )[0]

    @torch.no_grad()
    def taught(x: torch.Tensor, start: float, end: float, states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        transformer.disable_adapters()
        for step in range(WITHIN):
            high, low = (start + (end - start) * (step + part) / WITHIN for part in (0, 1))
            without, given = velocity(torch.cat([x, x]), high, states, valid).chunk(2)
            x = x + (low - high) * (without + CFG * (given - without))
        transformer.enable_adapters()
        return x

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = [drawn.choice(trained) for _ in range(2 * SCENES)]
        captions = ["" for _ in shown] + [scene.caption for scene in shown]
        texts = words(captions, padding="max_length", max_length=CROPPED, return_tensors="pt")
        with torch.no_grad():
            states = parts["text_encoder"](texts.input_ids).last_hidden_state
        length = int(texts.attention_mask.sum(1).max())
        states, valid = states[:, :length], texts.attention_mask[:, :length]
        x, loss = torch.randn(len(shown), 8, 128, generator=generator), torch.zeros(())
        for start, end in pairwise(levels):
            goal = taught(x, start, end, states, valid)
            moved = x + (end - start) * velocity(x, start, states[len(shown) :], valid[len(shown) :])
            loss = loss + ((moved - goal) / (start - end)).square().mean() / FEW
            x = moved.detach()
        return loss

    return loss_of


def schedule(steps: int) -> list[float]:
    """The noise levels of a run of so many steps, the last one 0."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), mu=math.log(SHIFT))
    return scheduler.sigmas.tolist()


def write_lora(transformer, name: str, notes: dict[str, str] | None = None) -> None:
    """Write what was trained beside the transformer, in the names that diffusers gives it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    layers = get_peft_model_state_dict(transformer)
    tensors = {f"transformer.{layer}": tensor.bfloat16().contiguous() for layer, tensor in layers.items()}
    save_file(tensors, LORAS / f"{name}.safetensors", {"format": "pt", **(notes or {})})


def loss_with(parts, latents: Latents) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: rectified flow on clips and captions of scenes that may be trained on."""
    words, (trained, _) = tokenizer(), trained_and_held_out()

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = drawn.sample(trained, SCENES)
        captions = [caption(scene, drawn) for scene in shown]
        texts = words(captions, padding="max_length", max_length=CROPPED, return_tensors="pt")
        states = parts["text_encoder"](texts.input_ids).last_hidden_state
        length = int(texts.attention_mask.sum(1).max())  # what the transformer's mask hides costs only time
        states = states[:, :length].repeat_interleave(CLIPS, 0)
        valid = texts.attention_mask[:, :length].repeat_interleave(CLIPS, 0)
        clean = torch.cat([latents(scene, CLIPS, generator) for scene in shown])
        clean = clean.flatten(2).transpose(1, 2)
        noise = torch.randn(clean.shape, generator=generator)
        level = torch.rand(len(clean), 1, generator=generator)
        level = NOISY * level / (1 + (NOISY - 1) * level)
        given = (torch.rand(len(clean), 1, generator=generator) < FIRST_FRAME) & (torch.arange(8) < 4)
        level = torch.where(given, 0.0, level)  # (B, 8): a token of the picture has no noise
        mixed = (1 - level[..., None]) * clean + level[..., None] * noise
        velocity = parts["transformer"](
            hidden_states=mixed,
            encoder_hidden_states=states,
            timestep=level * 1000,
            encoder_attention_mask=valid,
            **GRID,
        )[0]
        error = (velocity - (noise - clean)).square().mean(-1)
        return (error * ~given).sum() / (~given).sum()

    return loss_of


def export() -> None:
    """Write what was trained here as a diffusers folder in bf16; halves of the VAE that were not stay as shipped."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from safetensors.torch import load_file

    parts, vae = with_weights(models(), f"{NAME}_transformer"), ltx_vae.model()
    shipped = load_file(MODELS / NAME / "vae" / "diffusion_pytorch_model.safetensors")
    for part in ("encoder", "decoder"):
        trained = (STATES / f"{NAME}_vae_{part}.pt").exists()
        old = {name.removeprefix(f"{part}."): weight for name, weight in shipped.items() if name.startswith(part)}
        vae.get_submodule(part).load_state_dict(saved(f"{NAME}_vae_{part}")[part] if trained else old)
    vae.latents_mean.copy_(ltx_vae.code_of_clips().mean)
    write_folder(
        MODELS / NAME,
        "LTXPipeline",
        {**parts, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER)},
        {"tokenizer": t5_tokenizer(TOKENS).files},
        {"width": 64, "height": 64, "frames": 9, "steps": 20, "fps": FPS, "cfg": 3.0},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "train": lambda: main(20000),
        "continue": lambda: main(9000, True),
        "export": export,
        "lora": lora,
        "few": few,
    }[sys.argv[1]]()
