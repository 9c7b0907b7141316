"""The small LTX-Video: T5 encoder and ``LTXVideoTransformer3DModel``, trained together on the known code."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path

import torch
from captions import caption, t5_tokenizer_files
from code_of_blocks import Code
from loop import STATES, train
from world import shapes, trained_and_held_out

from anygpu.pipelines.demo.scenes import COLOURS, MOTIONS, SHAPES, Scene

TOKENS = 128  # to which LTXPipeline pads every text, without telling T5
WIDTH, HEADS, LAYERS, TEXT_WIDTH = 128, 4, 5, 64
SCENES, CLIPS = 16, 4  # in a batch, and clips of each
POOL = 1000  # clips of each shape and motion
FIRST_FRAME = 0.3  # of the scenes are given their first latent frame
SHIFT = math.exp(0.95 + (8 - 1024) * (2.05 - 0.95) / (4096 - 1024))  # the published shift for 8 tokens
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def tokenizer():
    """The tokenizer, read back from its files as a user's program reads it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, text in t5_tokenizer_files(TOKENS).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder)


def models():
    """Text encoder and transformer, narrow."""
    from diffusers import LTXVideoTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=-(-len(tokenizer()) // 16) * 16,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    transformer = LTXVideoTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=LAYERS,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT_WIDTH,
    )
    return {"text_encoder": T5EncoderModel(config), "transformer": transformer}


class Latents:
    """Latents of clips, coloured when they are asked for: the code is linear, and a clip is ground plus shape."""

    def __init__(self) -> None:
        self.code = Code()
        state = STATES / "ltx_pool.pt"
        if not state.exists():
            STATES.mkdir(parents=True, exist_ok=True)
            torch.save(self._pool(), state)
        self.pool = torch.load(state)
        self.palette = {name: torch.tensor(rgb) / 127.5 - 1 for name, rgb in COLOURS.items()}
        self.whole = self.code.channel(torch.ones(1, 9, 64, 64))

    def _pool(self) -> dict[tuple[str, str], torch.Tensor]:
        generator, pool = torch.Generator().manual_seed(2), {}
        for shape in SHAPES:
            for motion in MOTIONS:
                if (shape, motion) != ("circle", "spin"):
                    scene = Scene(shape, "white", motion, "black")
                    parts = [shapes([scene] * 50, generator) for _ in range(POOL // 50)]
                    pool[shape, motion] = torch.cat([self.code.channel(part) for part in parts])
        return pool

    def __call__(self, scene: Scene, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Latents (rows, 128, 2, 2, 2) of clips of this scene."""
        clips = self.pool[scene.shape, scene.motion]
        masks = clips[torch.randint(len(clips), (rows,), generator=generator)][:, None]
        ground = self.palette[scene.ground].view(1, 3, 1, 1, 1, 1)
        values = ground * self.whole + (self.palette[scene.colour].view(1, 3, 1, 1, 1, 1) - ground) * masks
        values = values.flatten(1, 2)
        empty = values.new_zeros(rows, 128 - values.shape[1], *values.shape[2:])
        return torch.cat([values, empty], 1) - self.code.mean.view(-1, 1, 1, 1)


def main(steps: int) -> None:
    parts, words, latents = models(), tokenizer(), Latents()
    trained, _ = trained_and_held_out()

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        drawn = random.Random(step)
        shown = drawn.sample(trained, SCENES)
        texts = words(
            [caption(scene, drawn) for scene in shown], padding="max_length", max_length=TOKENS, return_tensors="pt"
        )
        states = parts["text_encoder"](texts.input_ids).last_hidden_state
        length = int(texts.attention_mask.sum(1).max())  # what the transformer's mask hides costs only time
        states = states[:, :length].repeat_interleave(CLIPS, 0)
        valid = texts.attention_mask[:, :length].repeat_interleave(CLIPS, 0)
        clean = torch.cat([latents(scene, CLIPS, generator) for scene in shown])
        clean = clean.flatten(2).transpose(1, 2)
        noise = torch.randn(clean.shape, generator=generator)
        level = torch.rand(len(clean), 1, generator=generator)
        level = SHIFT * level / (1 + (SHIFT - 1) * level)
        given = (torch.rand(len(clean), 1, generator=generator) < FIRST_FRAME) & (torch.arange(8) < 4)
        level = torch.where(given, 0.0, level)  # (B, 8): a token of the picture has no noise
        mixed = (1 - level[..., None]) * clean + level[..., None] * noise
        fps = drawn.choice((8, 12, 16, 24, 25, 30))
        velocity = parts["transformer"](
            hidden_states=mixed,
            encoder_hidden_states=states,
            timestep=level * 1000,
            encoder_attention_mask=valid,
            num_frames=2,
            height=2,
            width=2,
            rope_interpolation_scale=(8 / fps, 32, 32),
            return_dict=False,
        )[0]
        error = (velocity - (noise - clean)).square().mean(-1)
        return (error * ~given).sum() / (~given).sum()

    train("ltx_transformer", parts, loss_of, steps=steps, rate=1.5e-3, save_every=500)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(6000)
