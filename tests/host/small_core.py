"""Core's largest text encoders and VAEs in small sizes: core has the published sizes in its code, not in a file.

Only numbers change: a subclass of core's own class is made with others, in the place where core's loaders look for
it. Detection, loading, computing and nodes are core's. Imports nothing of the pack.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

TEXT = 32  # width of the text that the tiny transformers take
VOCABULARY = 300
FEW = {"num_hidden_layers": 2, "intermediate_size": 64}  # layers of an encoder whose width others count on
QWEN = {
    "hidden_size": TEXT, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip

ENCODERS: Mapping[str, Mapping[str, Any]] = {  # whose first argument is a configuration
    "comfy.text_encoders.t5.T5": {
        "d_model": TEXT, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 32128,
    },
    "comfy.text_encoders.llama.Gemma3_12B": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCABULARY,
    },
    "comfy.text_encoders.minimax.MiniMaxQwen3VL": {
        "hidden_size": TEXT, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "comfy.text_encoders.llama.Qwen25_7BVLI": QWEN,
    "comfy.text_encoders.kandinsky5.Qwen25_7BVLI": QWEN,
    "comfy.clip_model.CLIPTextModel_": FEW,
    "comfy.clip_model.CLIPVision": FEW,
}  # fmt: skip
ROLLING = {"block_out_channels": [32, 32, 32, 64, 64], "num_res_blocks": 1}
NETWORKS: Mapping[str, Mapping[str, Any]] = {  # whose sizes are arguments
    "comfy.ldm.wan.vae2_2.WanVAE": {"dim": 16, "dec_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    "comfy.ldm.minimax.vae.ViT3DDecoder": {"num_layers": 1, "heads": 2},
    "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE": {"ch": 32, "ch_mult": (1,) * 6, "num_res_blocks": 1},
    "comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE": {"encoder_dim": 8, "latent_dim": 64, "decoder_dim": 128},
    "comfy.text_encoders.qwen_vl.Qwen2VLVisionTransformer": {
        "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_layers": 1,
    },
    "comfy.ldm.cosmos.predict2.MiniTrainDIT": {"num_heads": 2, "crossattn_emb_channels": TEXT, "adaln_lora_dim": 16},
    "comfy.ldm.kandinsky5.model.Kandinsky5": {"in_text_dim": TEXT},
    "comfy.ldm.hunyuan_video.vae_refiner.Encoder": ROLLING,
    "comfy.ldm.hunyuan_video.vae_refiner.Decoder": ROLLING,
    "comfy.sd.AutoencoderKL": {
        "ddconfig": {
            "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
            "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
            "time_compress": 4,
        },
    },
}  # fmt: skip
VISION: Mapping[str, Mapping[str, Any]] = {  # of the encoders, which reads no picture here
    "comfy.text_encoders.llama.GEMMA3_VISION_CONFIG": {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
    },
    "comfy.text_encoders.qwen3vl.QWEN3VL_VISION": {
        "qwen3vl_32b": {"hidden_size": 128, "intermediate_size": 32, "depth": 1, "deepstack_visual_indexes": [0]},
    },
}  # fmt: skip


@contextmanager
def small() -> Iterator[None]:
    """Core makes these classes in small sizes."""
    with ExitStack() as stack:
        for place, sizes in VISION.items():
            stack.enter_context(mock.patch.dict(named(place), sizes))
        for table, is_encoder in ((ENCODERS, True), (NETWORKS, False)):
            for place, sizes in table.items():
                stack.enter_context(mock.patch(place, _smaller(named(place), sizes, is_encoder)))
        yield


def named(place: str) -> Any:
    """What is under a dotted name in one of core's modules."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _smaller(kind: Any, sizes: Mapping[str, Any], is_encoder: bool) -> Any:
    def of_encoder(self: Any, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, {**config, **sizes}, *args, **kwargs)

    def of_network(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **{**kwargs, **sizes})

    return type(kind.__name__, (kind,), {"__init__": of_encoder if is_encoder else of_network})
