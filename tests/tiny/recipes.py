"""The table of tiny checkpoints: which parts each one has, under which class names, with which settings.

Class names and settings are those of the published ``model_index.json`` and ``scheduler_config.json`` files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import parts, vocabulary


@dataclass(frozen=True, slots=True)
class Part:
    """One subfolder of a checkpoint.

    Args:
        library, cls: what ``model_index.json`` names, in the words of the published file.
        make: returns an object with ``save_pretrained``.
        shard: largest file, as in ``max_shard_size``; empty for one file.
    """

    library: str
    cls: str
    make: Callable[[], Any]
    shard: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one checkpoint is built and run.

    Args:
        pipeline: the diffusers class that runs it; empty where none does.
        parts: subfolder -> part; ``.`` is the checkpoint's own folder.
        beside: for a lone transformer, the checkpoints that its pipeline takes the other parts from: first the one
            whose ``model_index.json`` it uses, then the one with the image encoder.
    """

    pipeline: str
    parts: Mapping[str, Part]
    beside: tuple[str, ...] = ()

    @property
    def indexed(self) -> bool:
        """Whether the folder has a ``model_index.json``."""
        return bool(self.pipeline) and not self.beside


def _diffusers(cls: str, make: Callable[[], Any], shard: str = "") -> Part:
    return Part("diffusers", cls, make, shard)


def _transformers(cls: str, make: Callable[[], Any], shard: str = "") -> Part:
    return Part("transformers", cls, make, shard)


def _scheduler(**settings: Any) -> Part:
    return _diffusers("FlowMatchEulerDiscreteScheduler", partial(parts.scheduler, **settings))


def _byt5_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _t5(max_length: int, shard: str = "") -> dict[str, Part]:
    files = partial(vocabulary.t5, max_length)
    return {
        "tokenizer": _transformers("T5TokenizerFast", files),
        "text_encoder": _transformers("T5EncoderModel", lambda: parts.t5(files()), shard),
    }


def _ltx(vae: Callable[[], Any], schedule: Part) -> dict[str, Part]:
    return {
        **_t5(128),
        "scheduler": schedule,
        "transformer": _diffusers("LTXVideoTransformer3DModel", parts.ltx_transformer),
        "vae": _diffusers("AutoencoderKLLTXVideo", vae),
    }


def _hunyuan(text_encoder: Part, shard: str = "", **transformer: Any) -> dict[str, Part]:
    make = partial(parts.hunyuan_transformer, **transformer)
    return {
        "tokenizer": _transformers("LlamaTokenizerFast", vocabulary.llama3),
        "tokenizer_2": _transformers("CLIPTokenizer", vocabulary.clip),
        "text_encoder": text_encoder,
        "text_encoder_2": _transformers("CLIPTextModel", parts.clip_text),
        "scheduler": _scheduler(shift=7.0),
        "transformer": _diffusers("HunyuanVideoTransformer3DModel", make, shard),
        "vae": _diffusers("AutoencoderKLHunyuanVideo", parts.hunyuan_vae),
    }


LLAVA: Mapping[str, Part] = {
    "text_encoder": _transformers("LlavaForConditionalGeneration", parts.llava),
    "image_processor": _transformers("CLIPImageProcessor", parts.llava_images),
}
SIGLIP: Mapping[str, Part] = {
    "image_encoder": _transformers("SiglipVisionModel", parts.siglip),
    "feature_extractor": _transformers("SiglipImageProcessor", parts.siglip_images),
}


def _hunyuan_i2v(**transformer: Any) -> dict[str, Part]:
    return {**_hunyuan(LLAVA["text_encoder"], **transformer), "image_processor": LLAVA["image_processor"]}


def _hunyuan15(task: str, shift: float) -> dict[str, Part]:
    return {
        "tokenizer": _transformers("Qwen2TokenizerFast", vocabulary.qwen2),
        "tokenizer_2": _transformers("ByT5Tokenizer", _byt5_tokenizer),
        "text_encoder": _transformers("Qwen2_5_VLTextModel", parts.qwen2_vl_text),
        "text_encoder_2": _transformers("T5EncoderModel", parts.byt5),
        "guider": _diffusers("ClassifierFreeGuidance", parts.guider),
        "scheduler": _scheduler(shift=shift),
        "transformer": _diffusers("HunyuanVideo15Transformer3DModel", partial(parts.hunyuan15_transformer, task)),
        "vae": _diffusers("AutoencoderKLHunyuanVideo15", parts.hunyuan15_vae),
    }


def _framepack() -> dict[str, Part]:
    return {".": _diffusers("HunyuanVideoFramepackTransformer3DModel", parts.framepack_transformer)}


LTX_SCHEDULE = _scheduler(
    use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
    shift_terminal=0.1,
)  # fmt: skip

TINY: Mapping[str, Recipe] = {
    "ltx": Recipe("LTXPipeline", _ltx(parts.ltx_vae, LTX_SCHEDULE)),
    # From 0.9.5 the pipeline passes its own timesteps, which a dynamic shift refuses.
    "ltx_condition": Recipe("LTXConditionPipeline", _ltx(parts.ltx_vae_095, _scheduler())),
    "hunyuan_video": Recipe(
        "HunyuanVideoPipeline", _hunyuan(_transformers("LlamaModel", parts.llama), shard="300KB", guidance_embeds=True)
    ),
    "hunyuan_video_i2v": Recipe(
        "HunyuanVideoImageToVideoPipeline", _hunyuan_i2v(guidance_embeds=True, image_condition_type="token_replace")
    ),
    "hunyuan_video_i2v_33ch": Recipe(
        "HunyuanVideoImageToVideoPipeline",
        _hunyuan_i2v(in_channels=33, out_channels=16, guidance_embeds=False, image_condition_type="latent_concat"),
    ),
    "hunyuan_video_15": Recipe("HunyuanVideo15Pipeline", _hunyuan15("t2v", shift=5.0)),
    "hunyuan_video_15_i2v": Recipe("HunyuanVideo15ImageToVideoPipeline", {**_hunyuan15("i2v", shift=5.0), **SIGLIP}),
    "framepack": Recipe("HunyuanVideoFramepackPipeline", _framepack(), beside=("hunyuan_video", "siglip")),
    "framepack_f1": Recipe("HunyuanVideoFramepackPipeline", _framepack(), beside=("hunyuan_video", "siglip")),
    "siglip": Recipe("", SIGLIP),
    "mochi": Recipe(
        "MochiPipeline",
        {
            **_t5(256, shard="100KB"),
            "scheduler": _scheduler(invert_sigmas=True),
            "transformer": _diffusers("MochiTransformer3DModel", parts.mochi_transformer),
            "vae": _diffusers("AutoencoderKLMochi", parts.mochi_vae),
        },
    ),
}
"""Name -> recipe of every tiny checkpoint."""
