"""The small HunyuanVideo 1.5: Qwen and ``HunyuanVideo15Transformer3DModel``, trained together on the known code.

It cannot have 8 MB: the class gives the way of ByT5's states an inner width of 2048, which takes 8.4 MB of the
transformer's 13.5 in bf16. With the VAE's 4.9 and the text encoders' 0.4 it has 18.8 MB; packed, as in an archive, 5.5,
since what is not trained is mostly zeros.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import hunyuan_video_15_vae as vae_15
import ltx
import torch
from anygpu.pipelines.demo import MODELS
from captions import OTHERS, STRANGERS, caption, vocabulary
from folder import write_folder
from hunyuan_vae import FAINT
from hunyuan_video import LLAMA_SIZE, TEXT_WIDTH, look_by_place, noised, open_gates
from loop import train, with_weights
from tiny import parts as tiny
from tiny import vocabulary as tokenizers
from world import FRAMES, trained_and_held_out

NAME = Path(__file__).stem  # of the folder in MODELS, and of what belongs to this training
HEADS, HEAD_WIDTH, LAYERS = 4, 32, 3
GLYPH_WIDTH, IMAGE_WIDTH = 32, 32  # of ByT5, and of the image encoder that an image-to-video model has
CHANNELS = vae_15.CHANNELS
LONGEST = 48  # tokens of a caption and of what the chat has after it
SCENES, CLIPS = 16, 2  # in a batch, and clips of each
NOISY = 5.0  # shift of the levels trained on: much noise, where words decide what comes of it, has most to learn
FINISHING = 2.0  # the same in the second half, where a shape gets its edges
SHIFT, FPS, CFG = 5.0, 8.0, 3.0


def tokens():
    """Qwen's tokenizer: of the chat's words and the captions', a token each."""
    words = vocabulary()
    return tokenizers.qwen2("\n".join((" ".join(words), *words, OTHERS, *STRANGERS)))


def qwen(rows: int, ids):
    """Of Llama's size."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=rows,
            **LLAMA_SIZE,
            rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
            bos_token_id=ids["<|endoftext|>"],
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
        )
    )


def models():
    """Text encoder and transformer, narrow."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(0)
    words = tokens()
    text = qwen(words.rows, words.ids)
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        num_layers=LAYERS,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=GLYPH_WIDTH,
        image_embed_dim=IMAGE_WIDTH,
        rope_axes_dim=(8, 12, 12),
        target_size=64,
        task_type="t2v",
    )
    torch.nn.init.normal_(text.embed_tokens.weight, std=0.3)
    with torch.no_grad():
        pass_noise_through(transformer)
        look_by_place(transformer)
        say_nothing_of_glyphs(transformer.context_embedder_2)
    return {"text_encoder": text, "transformer": transformer}


def pass_noise_through(transformer) -> None:
    """Start with noise for noise minus clip, so that the blocks have but the clip to find."""
    width = HEADS * HEAD_WIDTH
    embed, out = transformer.x_embedder.proj, transformer.proj_out
    embed.weight[:CHANNELS] = 0.0
    embed.weight[range(CHANNELS), range(CHANNELS)] = 1.0
    embed.bias.zero_()
    out.weight.zero_()
    out.bias.zero_()
    out.weight[range(CHANNELS), range(CHANNELS)] = (CHANNELS / width) ** 0.5
    transformer.norm_out.linear.weight.zero_()
    transformer.norm_out.linear.bias.zero_()
    open_gates(transformer)


def say_nothing_of_glyphs(projection) -> None:
    """Set the way of ByT5's states, which no caption trains: words in quotation marks have next to no effect.

    Its inner width of 2048 is fixed by the class, 8.4 of the transformer's megabytes.
    """
    projection.requires_grad_(False)
    for linear, size in ((projection.linear_1, 1.0), (projection.linear_2, 1.0), (projection.linear_3, FAINT)):
        torch.nn.init.eye_(linear.weight).mul_(size)
        linear.bias.zero_()


def reader():
    """The tokenizer, read back from its files as a user's program reads it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokens().save_pretrained(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def encoder_of(parts) -> Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]]:
    """From captions to Qwen's states and their mask, as the pipeline makes them."""
    from diffusers import HunyuanVideo15Pipeline

    words = reader()

    def encode(captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            parts["text_encoder"], words, captions, torch.device("cpu"), tokenizer_max_length=LONGEST
        )
        longest = int(mask.sum(1).max())  # what the transformer's mask hides costs only time
        return states[:, :longest], mask[:, :longest]

    return encode


def loss_with(parts, latents: ltx.Latents, steps: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    """The loss of a step: rectified flow on clips and captions of scenes that may be trained on."""
    encode, (trained, _) = encoder_of(parts), trained_and_held_out()

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = drawn.sample(trained, SCENES)
        states, valid = (each.repeat_interleave(CLIPS, 0) for each in encode([caption(s, drawn) for s in shown]))
        rows = len(states)
        clean = vae_15.flagged(torch.cat([latents(scene, CLIPS, generator) for scene in shown]))
        seen, level, velocity = noised(clean, NOISY if step < steps / 2 else FINISHING, generator)
        predicted = parts["transformer"](
            hidden_states=torch.cat([seen, seen.new_zeros(rows, CHANNELS + 1, *seen.shape[2:])], 1),
            timestep=level * 1000,
            encoder_hidden_states=states,
            encoder_attention_mask=valid,
            encoder_hidden_states_2=states.new_zeros(rows, 0, GLYPH_WIDTH),
            encoder_attention_mask_2=valid.new_zeros(rows, 0),
            image_embeds=states.new_zeros(rows, 0, IMAGE_WIDTH),
            return_dict=False,
        )[0]
        return (predicted - velocity).square().mean()

    return loss_of


def latents_of() -> ltx.Latents:
    """Latents in its code."""
    return ltx.Latents(NAME, vae_15.code_of_clips())


def main(steps: int) -> None:
    """Train; an interrupted training goes on."""
    parts = models()
    train(f"{NAME}_transformer", parts, loss_with(parts, latents_of(), steps), steps=steps, rate=1.5e-3, save_every=100)


def byt5_files() -> dict[str, str]:
    """The files of ByT5's tokenizer, which needs no vocabulary."""
    from transformers import ByT5Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        ByT5Tokenizer().save_pretrained(folder)
        return {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}


def write(parts, vae, folder: Path) -> None:
    """Write text encoder and transformer, and what is not trained beside them, as a diffusers folder."""
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    beside = {
        "text_encoder_2": tiny.byt5(),
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "guider": ClassifierFreeGuidance(guidance_scale=CFG),
    }
    write_folder(
        folder,
        "HunyuanVideo15Pipeline",
        {**parts, **beside},
        {"tokenizer": tokens().files, "tokenizer_2": byt5_files()},
        {"width": 64, "height": 64, "frames": FRAMES, "steps": 20, "fps": FPS, "cfg": CFG},
    )


def export() -> None:
    """Write what was trained as a diffusers folder."""
    parts = with_weights(models(), f"{NAME}_transformer")
    write(parts, vae_15.model(vae_15.code_of_clips()), MODELS / NAME)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": lambda: main(12000), "export": export}[sys.argv[1]]()
