"""The small Mochi: T5 encoder and ``MochiTransformer3DModel``, trained together on the known code."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import ltx
import mochi_vae
import torch
from anygpu.pipelines.demo import MODELS
from captions import caption, t5_tokenizer
from folder import write_folder
from hunyuan_video import noised
from loop import train, with_weights
from mochi_vae import CHANNELS, FRAMES
from torch.nn import functional
from world import trained_and_held_out

NAME = Path(__file__).stem  # of the folder in MODELS, and of what belongs to this training
TOKENS = 256  # to which MochiPipeline pads every text
FPS = 8.0
VALUES = 4 * CHANNELS  # of a token, which is 2 x 2 latents
WIDTH, HEADS, LAYERS = 128, 4, 4
SCENES, CLIPS = 16, 2  # in a batch, and clips of each
NOISY = 5.0  # shift of the levels trained on: much noise, where words decide what comes of it, has most to learn
FINISHING = 2.0  # the same in the second half, where a shape gets its edges
TURNS = (1.0, 0.4, 0.16, 0.06, 0.025)  # of the rotary embedding, from one token to the next
STEP = 192 / 4  # from one token's place to the next across, in the units of Mochi's rotary embedding


def models():
    """Text encoder and transformer, narrow."""
    from diffusers import MochiTransformer3DModel

    torch.manual_seed(0)
    text = ltx.t5(len(ltx.tokenizer(TOKENS)))
    transformer = MochiTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=LAYERS,
        pooled_projection_dim=ltx.TEXT_WIDTH,
        text_embed_dim=ltx.TEXT_WIDTH,
        time_embed_dim=256,
        max_sequence_length=TOKENS,
    )
    with torch.no_grad():
        pass_noise_through(transformer)
        look_by_place(transformer)
    return {"text_encoder": text, "transformer": transformer}


def pass_noise_through(transformer) -> None:
    """Start with minus noise for clip minus noise, so that the blocks have but the clip to find."""
    embed, out = transformer.patch_embed.proj, transformer.proj_out
    embed.weight[:VALUES] = torch.eye(VALUES).view(VALUES, CHANNELS, 2, 2)
    embed.bias.zero_()
    out.weight.zero_()
    out.bias.zero_()
    places = torch.arange(VALUES).view(CHANNELS, 4).T.flatten()  # in what comes out, channels vary fastest
    out.weight[torch.arange(VALUES), places] = -((VALUES / WIDTH) ** 0.5)
    transformer.norm_out.linear.weight.zero_()
    transformer.norm_out.linear.bias.zero_()
    for block in transformer.transformer_blocks:
        for linear in (block.norm1.linear, getattr(block.norm1_context, "linear", None)):
            if linear is not None:
                linear.weight *= 0.3
                linear.bias.view(4, -1)[[1, 3]] = 0.3  # the gates


def look_by_place(transformer) -> None:
    """Start with queries that depend on a token's place: words have no place, so what is seen of them tells it.

    Mochi's queries have no bias: two channels are constant instead.
    """
    transformer.patch_embed.proj.weight[-2:] = 0.0
    transformer.patch_embed.proj.bias[-2:] = torch.tensor([1.0, -1.0])
    turns = transformer.pos_frequencies.zero_()  # (3, heads, pairs of features)
    count = len(TURNS)
    for axis, step in enumerate((1.0, STEP, STEP)):
        turns[axis, :, axis * count : (axis + 1) * count] = torch.tensor(TURNS) / step
    for block in transformer.transformer_blocks:
        attention = block.attn1
        constant = 0.5 * torch.randn(WIDTH)
        attention.to_q.weight[:, -2], attention.to_q.weight[:, -1] = constant, -constant
        attention.norm_q.weight.fill_(1.5)
        attention.norm_added_k.weight.fill_(1.5)


class Batched:
    """The real class's attention without its loop over the clips, which takes most of a small model's time."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb):
        def heads(linear, norm, tokens):
            return norm(linear(tokens).unflatten(2, (attn.heads, -1)))

        def turned(x):
            cos, sin = image_rotary_emb
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        video, text = hidden_states, encoder_hidden_states
        query = [turned(heads(attn.to_q, attn.norm_q, video)), heads(attn.add_q_proj, attn.norm_added_q, text)]
        key = [turned(heads(attn.to_k, attn.norm_k, video)), heads(attn.add_k_proj, attn.norm_added_k, text)]
        value = [line(x).unflatten(2, (attn.heads, -1)) for line, x in ((attn.to_v, video), (attn.add_v_proj, text))]
        query, key, value = (torch.cat(each, 1).transpose(1, 2) for each in (query, key, value))
        seen = functional.pad(attention_mask.bool(), (video.shape[1], 0), value=True)[:, None, None]
        result = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        video, text = result.transpose(1, 2).flatten(2).split((video.shape[1], text.shape[1]), 1)
        text = attn.to_add_out(text) if hasattr(attn, "to_add_out") else text
        return attn.to_out[0](video), text


def loss_with(parts, latents: ltx.Latents, steps: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: rectified flow on clips and captions of scenes that may be trained on."""
    words, (trained, _) = ltx.tokenizer(TOKENS), trained_and_held_out()
    for block in parts["transformer"].transformer_blocks:
        block.attn1.processor = Batched()

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = drawn.sample(trained, SCENES)
        texts = words([caption(scene, drawn) for scene in shown], padding=True, return_tensors="pt")
        states = parts["text_encoder"](texts.input_ids, attention_mask=texts.attention_mask).last_hidden_state
        clean = torch.cat([latents(scene, CLIPS, generator) for scene in shown])
        seen, level, velocity = noised(clean, NOISY if step < steps / 2 else FINISHING, generator)
        predicted = parts["transformer"](
            hidden_states=seen,
            encoder_hidden_states=states.repeat_interleave(CLIPS, 0),
            timestep=(1 - level) * 1000,
            encoder_attention_mask=texts.attention_mask.repeat_interleave(CLIPS, 0),
            return_dict=False,
        )[0]
        return (predicted + velocity).square().mean()  # Mochi predicts clip minus noise

    return loss_of


def main(steps: int) -> None:
    """Train; an interrupted training goes on."""
    parts = models()
    loss_of = loss_with(parts, ltx.Latents(NAME, mochi_vae.code_of_clips(), FRAMES), steps)
    train(f"{NAME}_transformer", parts, loss_of, steps=steps, rate=1.5e-3, save_every=200)


def export() -> None:
    """Write what was trained as a diffusers folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    parts = with_weights(models(), f"{NAME}_transformer")
    vae = mochi_vae.model(mochi_vae.code_of_clips())
    write_folder(
        MODELS / NAME,
        "MochiPipeline",
        {**parts, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler(invert_sigmas=True)},
        {"tokenizer": t5_tokenizer(TOKENS).files},
        {"width": 64, "height": 64, "frames": FRAMES, "steps": 20, "fps": FPS, "cfg": 3.0},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": lambda: main(15000), "export": export}[sys.argv[1]]()
