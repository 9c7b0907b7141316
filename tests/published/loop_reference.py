"""Writes what a publisher's whole loop makes of tiny weights to `tests/fixtures/published/loop_NAME.safetensors`.

    python tests/published/loop_reference.py NAME CLONE [TORCHVISION]

NAME is a row of ``LOOPS`` below, with the repository, commit and licence of its clone. TORCHVISION is a folder with it,
for loops that bring a picture to size by it: transformers would use it too where it is installed.

The publisher's own code is run for text, picture, sampling and decoding, on the CPU in fp32; nothing of it is kept but
the frames. Random numbers are drawn in our order, since a loop's own draws depend on its device."""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, Union
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), sys.argv[2]]

import layouts  # noqa: E402
import tiny  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from published import loops  # noqa: E402
from published.loops import Loop  # noqa: E402

CLONE = Path(sys.argv[2])
FOLDER = Path(mkdtemp())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(loops.SEED)


def drawn(draws: torch.Generator) -> Callable[..., torch.Tensor]:
    """``torch.randn`` in fp32 from ``draws``, whatever generator, device and dtype are asked."""
    real = torch.randn

    def randn(*size: Any, **_: Any) -> torch.Tensor:
        return real(*size, generator=draws)

    return randn


def functions(file: Path, names: set[str], space: dict[str, Any]) -> dict[str, Any]:
    """``space`` with the functions ``names`` of a script that opens windows or loads models where it is imported."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    exec(compile(tree, str(file), "exec"), space)
    return space


def stub(*names: str) -> None:
    """Modules that are imported and not needed here. Libraries that ask for them have been imported before."""
    for name in names:
        sys.modules.setdefault(name, mock.MagicMock(__name__=name))


def find_torchvision() -> None:
    """Let a publisher import torchvision, whose operators for boxes may be built for another torch and go unused."""
    sys.path.append(sys.argv[3])
    with mock.patch.object(torch.library, "register_fake", lambda *_, **__: lambda function: function):
        import torchvision  # noqa: F401


def framepack(script: str) -> Callable[[], torch.Tensor]:
    """The worker of a demo with its inputs as they stand, but for TeaCache, which is off."""

    def run() -> torch.Tensor:
        import os
        import traceback

        import einops
        import numpy
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        name = "framepack_f1" if "f1" in script else "framepack"
        pipe = tiny.one_shot(name, FOLDER)
        stub("torchvision")
        from diffusers_helper import hunyuan, utils
        from diffusers_helper.clip_vision import hf_clip_vision_encode
        from diffusers_helper.models.hunyuan_video_packed import HunyuanVideoTransformer3DModelPacked
        from diffusers_helper.pipelines.k_diffusion_hunyuan import sample_hunyuan
        from PIL import Image

        transformer = HunyuanVideoTransformer3DModelPacked(
            **tiny_config(pipe.transformer, HunyuanVideoTransformer3DModelPacked)
        )
        transformer.load_state_dict(pipe.transformer.state_dict(), strict=True)
        films, draws = [], generator()
        sample = DiagonalGaussianDistribution.sample

        def sampled(**given: Any) -> torch.Tensor:
            given |= {"generator": draws, "dtype": torch.float32}
            return sample_hunyuan(**given)

        queue = SimpleNamespace(push=lambda _: None, top=lambda: None)
        space = functions(
            CLONE / script,
            {"worker"},
            {
                **vars(hunyuan),
                **vars(utils),
                **{"torch": torch, "np": numpy, "os": os, "traceback": traceback, "einops": einops, "Image": Image},
                "hf_clip_vision_encode": hf_clip_vision_encode,
                "find_nearest_bucket": lambda *_, **__: loops.FRAMEPACK_SIZE,
                "save_bcthw_as_mp4": lambda film, *_, **__: films.append(film),
                "make_progress_bar_html": lambda *_: "",
                "sample_hunyuan": sampled,
                "stream": SimpleNamespace(output_queue=queue, input_queue=queue),
                **{"high_vram": True, "gpu": torch.device("cpu"), "outputs_folder": str(FOLDER)},
                **{"transformer": transformer.eval(), "vae": pipe.vae, "image_encoder": pipe.image_encoder},
                "feature_extractor": pipe.feature_extractor,
                **{n: getattr(pipe, n) for n in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")},
            },
        )  # fmt: skip
        picture = (loops.picture(*loops.FRAMEPACK_PICTURE)[0] * 255).round().to(torch.uint8).numpy()
        with mock.patch.object(DiagonalGaussianDistribution, "sample", lambda self: sample(self, draws)):
            space["worker"](
                picture, loops.PROMPT, "", loops.SEED, loops.FRAMEPACK_SECONDS, 9, 25, 1.0, 10.0, 0.0, 6, False, 16
            )
        return (films[-1][0].permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1)

    return run


def framepack_clip(kind: str, ended: bool = False, blend: int = 0) -> Callable[[], torch.Tensor]:
    """The latents of FramePack-Studio's worker, which goes on with a clip, in the transformer's space.

    The mixed states of the image encoder, which ``video_generator.py`` computes and drops, reach the transformer here.
    """

    def run() -> torch.Tensor:
        import json
        import os
        import time
        import traceback

        import einops
        import numpy
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        pipe = tiny.one_shot("framepack_f1" if "F1" in kind else "framepack", FOLDER)
        stub("torchvision", "cv2", "decord", "modules.settings", "diffusers_helper.memory")
        from diffusers_helper import clip_vision, hunyuan, utils
        from diffusers_helper.models.hunyuan_video_packed import HunyuanVideoTransformer3DModelPacked
        from diffusers_helper.pipelines import k_diffusion_hunyuan
        from modules import DUMMY_LORA_NAME, generators
        from modules.generators import video_base_generator
        from modules.prompt_handler import parse_timestamped_prompt

        transformer = HunyuanVideoTransformer3DModelPacked(
            **tiny_config(pipe.transformer, HunyuanVideoTransformer3DModelPacked)
        )
        transformer.load_state_dict(pipe.transformer.state_dict(), strict=True)
        histories, states, draws = [], [], generator()
        see, sample_hunyuan = clip_vision.hf_clip_vision_encode, k_diffusion_hunyuan.sample_hunyuan
        draw = DiagonalGaussianDistribution.sample
        pictures = (loops.clip() * 255).round().to(torch.uint8).numpy()

        def sampled(**given: Any) -> torch.Tensor:
            if ended:
                weight, (_, last, end) = loops.FRAMEPACK_END, states
                given["image_embeddings"] = (1 - weight) * last + weight * end
            return sample_hunyuan(**given | {"generator": draws, "dtype": torch.float32})

        def seen(*given: Any) -> Any:
            found = see(*given)
            states.append(found.last_hidden_state)
            return found

        def drawn_by_us(self: Any) -> torch.Tensor:
            if self.mean.shape[2] == 1 and not unused:  # of the end image at its own size, which nothing sees
                unused.append(self)
                return self.mode()
            return draw(self, draws)

        def made(name: str, **given: Any) -> Any:
            found = create(name, **given)
            found.gpu, update = torch.device("cpu"), found.update_history_latents
            found.load_model = lambda: setattr(found, "transformer", transformer.eval())
            found.unload_loras = lambda: None

            def kept(*latents: torch.Tensor) -> torch.Tensor:
                histories.append(update(*latents))
                return histories[-1]

            found.update_history_latents = kept
            return found

        class Reader:
            def __init__(self, _: str) -> None: ...

            def __len__(self) -> int:
                return len(pictures)

            def get_avg_fps(self) -> float:
                return 30.0

            def get_batch(self, frames: Any) -> Any:
                return SimpleNamespace(asnumpy=lambda: pictures[list(frames)])

        unused: list[Any] = []
        create = generators.create_model_generator
        video_base_generator.decord.VideoReader = Reader
        video_base_generator.find_nearest_bucket = lambda *_, **__: loops.FRAMEPACK_SIZE
        clip_vision.hf_clip_vision_encode, k_diffusion_hunyuan.sample_hunyuan = seen, sampled
        queue = SimpleNamespace(push=lambda _: None, top=lambda: None)
        stream = SimpleNamespace(output_queue=queue, input_queue=queue)
        known = {"high_vram": True, "args": SimpleNamespace(offline=False), "settings": {}, "stream": stream}
        known |= {"prompt_embedding_cache": {}, "current_generator": None, "vae": pipe.vae}
        known |= {n: getattr(pipe, n) for n in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")}
        known |= {n: getattr(pipe, n) for n in ("image_encoder", "feature_extractor")}
        main = sys.modules["__main__"]
        for name, value in known.items():
            setattr(main, name, value)
        steps = SimpleNamespace(
            validate_parameters=lambda _: (True, ""),
            prepare_parameters=lambda given: given,
            preprocess_inputs=lambda _: {"input_files_dir": None},
            handle_results=lambda *_: None,
        )
        space = functions(
            CLONE / "modules" / "pipelines" / "worker.py",
            {"worker", "get_cached_or_encode_prompt"},
            {
                **vars(hunyuan),
                **vars(utils),
                **{"torch": torch, "np": numpy, "os": os, "json": json, "time": time, "traceback": traceback},
                **{"einops": einops, "studio_module": main, "DUMMY_LORA_NAME": DUMMY_LORA_NAME},
                **{"gpu": torch.device("cpu"), "cpu": torch.device("cpu"), "datetime": import_module("datetime")},
                **{"unload_enhancing_model": lambda: None, "unload_captioning_model": lambda: None},
                "parse_timestamped_prompt": parse_timestamped_prompt,
                "make_progress_bar_html": lambda *_: "",
                "create_pipeline": lambda *_: steps,
                "create_model_generator": made,
                "save_bcthw_as_mp4": lambda *_, **__: None,
            },
        )  # fmt: skip
        end = (loops.framepack_end() * 255).round().to(torch.uint8)[0].numpy() if ended else None
        cached = {"use_teacache": False, "teacache_num_steps": 0, "teacache_rel_l1_thresh": 0.0, "use_magcache": False}
        cached |= dict.fromkeys(("magcache_threshold", "magcache_max_consecutive_skips", "magcache_retention_ratio"), 0)
        with mock.patch.object(DiagonalGaussianDistribution, "sample", drawn_by_us):
            space["worker"](
                **{"model_type": kind, "input_image": "clip.mp4", "end_frame_image": end, "has_input_image": True},
                **{"end_frame_strength": loops.FRAMEPACK_END, "n_prompt": ""},
                prompt_text=loops.FRAMEPACK_TIMED if blend else loops.PROMPT,
                **{"seed": loops.SEED, "total_second_length": loops.FRAMEPACK_CLIP_SECONDS, "latent_window_size": 9},
                **{"steps": loops.FRAMEPACK_CLIP_STEPS, "cfg": 1.0, "gs": 10.0, "rs": 0.0, "blend_sections": blend},
                **{"latent_type": "Black", "selected_loras": [], "job_stream": stream, "output_dir": str(FOLDER)},
                **cached,
            )
        new = 0 if "F1" in kind else 9 * len(histories)  # latents that stand before the clip there
        return histories[-1].roll(-new, dims=2)

    return run


@contextmanager
def on_cpu() -> Iterator[None]:
    """Without CUDA: ``torch.zeros`` where "cuda" is asked, and autocast, which is off in fp32."""
    zeros = torch.zeros

    def here(*size: Any, **given: Any) -> torch.Tensor:
        return zeros(*size, **{**given, "device": None} if given.get("device") == "cuda" else given)

    with mock.patch.object(torch, "zeros", here):
        yield


def attention_of_lengths(q: Any, k: Any, v: Any, ends: Any, *_: Any) -> torch.Tensor:
    """``flash_attn_varlen_func``: tokens (N, heads, D), of which those between two ``ends`` see each other."""
    found, bounds = torch.zeros_like(q), ends.tolist()
    for first, last in pairwise(bounds):
        own = (each[first:last].transpose(0, 1)[None] for each in (q, k, v))
        found[first:last] = torch.nn.functional.scaled_dot_product_attention(*own)[0].transpose(0, 1)
    return found


def in_released_names(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a tiny part in the names of its release."""
    return layouts.released(layouts.tensors_of(folder), layouts.layout(name))


def llava_as_published(llava: Any) -> Callable[..., Any]:
    """Llava as Tencent's version of transformers calls it: one ``<image>`` becomes all its states in the model."""

    def call(input_ids: torch.Tensor, attention_mask: torch.Tensor, **given: Any) -> Any:
        config, rows, kept = llava.config, [], []
        for token, valid in zip(input_ids[0], attention_mask[0], strict=True):
            count = config.image_seq_length if int(token) == config.image_token_id else 1
            rows += [token] * count
            kept += [valid] * count
        mask = torch.stack(kept)[None]
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return llava(input_ids=torch.stack(rows)[None], attention_mask=mask, position_ids=places, **given)

    return call


def hunyuan_video(kind: str = "", stable: bool = True) -> Callable[[], torch.Tensor]:
    """``sample_video.py`` as its README calls it: 50 steps, shift 7, embedded guidance 6, with tiles; with a ``kind``
    of picture ``sample_image2video.py``, stable or dynamic, with buckets of a tenth of a side."""

    def run() -> torch.Tensor:
        name = {"": "hunyuan_video", "token_replace": "hunyuan_video_i2v"}.get(kind, "hunyuan_video_i2v_33ch")
        pipe, guided = tiny.one_shot(name, FOLDER), kind != "latent_concat"
        if kind:
            find_torchvision()
            stub("deepspeed", "torch.utils.tensorboard")
        from hyvideo import config, inference, text_encoder
        from hyvideo.modules import attenion, models
        from hyvideo.vae.autoencoder_kl_causal_3d import AutoencoderKLCausal3D

        width, height = loops.SIZE
        command = ["", "--prompt", loops.PROMPT, "--seed", str(loops.SEED), "--flow-reverse"]
        command += [f"--flow-shift={7.0 if stable else 17.0}"]
        command += ["--video-size", str(height), str(width)]
        command += [f"--{part}-precision=fp32" for part in ("vae", "text-encoder")]
        command += ["--precision=fp32", "--text-encoder-precision-2=fp32"]
        command += ["--text-states-dim=32", "--text-states-dim-2=32"]
        if guided:
            command += ["--embedded-cfg-scale=6.0"]
        if kind:
            command += ["--i2v-mode", *["--i2v-stability"] * stable, f"--i2v-condition-type={kind}"]
            command += ["--i2v-image-path", str(FOLDER / "picture.png")]
            loops.saved_picture(*loops.BUCKETED, FOLDER / "picture.png")
        with mock.patch.object(sys, "argv", command):
            args = config.parse_args()
        own = {"mm_double_blocks_depth": 2, "mm_single_blocks_depth": 2, "rope_dim_list": [4, 6, 6], "hidden_size": 32}
        own |= {"heads_num": 2, "mlp_width_ratio": 2.0, "guidance_embed": guided}
        folder, wide = FOLDER / name, 33 if kind == "latent_concat" else 16
        with on_cpu(), mock.patch.object(attenion, "flash_attn_varlen_func", attention_of_lengths):
            model = models.HYVideoDiffusionTransformer(args, in_channels=wide, out_channels=16, **own)
            model.load_state_dict(in_released_names(folder / "transformer", f"HunyuanVideo {layouts.ORIGINAL}"))
            vae = AutoencoderKLCausal3D(**hunyuan_vae_config(AutoencoderKLCausal3D))
            vae.load_state_dict(in_released_names(folder / "vae", "the VAE of HunyuanVideo"))
            templates, pictured, processor = inference.PROMPT_TEMPLATE, {}, ()
            if kind:
                args.text_encoder, args.prompt_template = "llm-i2v", "dit-llm-encode-i2v"
                args.prompt_template_video = "dit-llm-encode-video-i2v"
                (mark,) = pipe.tokenizer("\n\n", add_special_tokens=False).input_ids
                templates[args.prompt_template_video]["double_return_token_id"] = mark
                pictured = {"i2v_mode": True, "image_embed_interleave": {"token_replace": 4, "latent_concat": 2}[kind]}
                llava, processor = torch.nn.Module(), (pipe.image_processor,)
                llava.forward = llava_as_published(pipe.text_encoder)
                llava.dtype, llava.device = torch.float32, torch.device("cpu")
                pipe.tokenizer.padding_side = "right"
            encoders = {
                "llm": (pipe.text_encoder, pipe.tokenizer),
                "llm-i2v": (llava if kind else None, pipe.tokenizer),
                "clipL": (pipe.text_encoder_2, pipe.tokenizer_2),
            }

            def part(index: int) -> Callable[..., Any]:
                return lambda tokenizer_type=None, text_encoder_type=None, **_: (
                    encoders[tokenizer_type or text_encoder_type][index], None, *processor * index,
                )  # fmt: skip

            with (
                mock.patch.object(text_encoder, "load_text_encoder", part(0)),
                mock.patch.object(text_encoder, "load_tokenizer", part(1)),
            ):
                crop = templates[args.prompt_template_video]["crop_start"]
                first = text_encoder.TextEncoder(
                    args.text_encoder,
                    args.text_len + crop,
                    prompt_template=templates[args.prompt_template],
                    prompt_template_video=templates[args.prompt_template_video],
                    hidden_state_skip_layer=args.hidden_state_skip_layer,
                    apply_final_norm=args.apply_final_norm,
                    **pictured,
                )
                second = text_encoder.TextEncoder(args.text_encoder_2, args.text_len_2)
            sampler = inference.HunyuanVideoSampler(
                args, vae.eval(), {}, first, model.eval(), second, device="cpu",
                parallel_args={"ulysses_degree": 1, "ring_degree": 1},
            )  # fmt: skip
            more = {}
            if kind:
                more = {
                    f"i2v_{name}": getattr(args, f"i2v_{name}") for name in ("mode", "image_path", "condition_type")
                }
                more |= {"i2v_resolution": args.i2v_resolution, "i2v_stability": args.i2v_stability}
                sizes = inference.generate_crop_size_list
                inference.generate_crop_size_list = lambda side, step: sizes(side // 10, step)
            made = sampler.predict(
                prompt=args.prompt, height=args.video_size[0], width=args.video_size[1],
                video_length=args.video_length, seed=args.seed, negative_prompt=args.neg_prompt,
                infer_steps=args.infer_steps, guidance_scale=args.cfg_scale, flow_shift=args.flow_shift,
                embedded_guidance_scale=args.embedded_cfg_scale, **more,
            )  # fmt: skip
        return made["samples"][0].permute(1, 2, 3, 0)

    return run


def hunyuan_vae_config(cls: Any) -> dict[str, Any]:
    """Tencent's published VAE settings at the tiny widths."""
    return {
        "in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 256, "sample_tsize": 64,
        "scaling_factor": 0.476986, "spatial_compression_ratio": 8, "time_compression_ratio": 4,
        "mid_block_add_attention": True, "act_fn": "silu",
        "down_block_types": ("DownEncoderBlockCausal3D",) * 4, "up_block_types": ("UpDecoderBlockCausal3D",) * 4,
    }  # fmt: skip


def hunyuan_15(name: str, kind: str = "", end: str = "", start: str = "480p") -> Callable[[], torch.Tensor]:
    """The pipeline of HunyuanVideo 1.5 as ``generate.py`` calls it, at a tenth of its ``start`` and without
    super-resolution; or with it, to a tenth of the size at its ``end``."""
    start = "720p" if end == "1080p" else start

    def run() -> torch.Tensor:
        side = {"480p": 64, "720p": 96}[start]
        pipe, folder = tiny.one_shot(name, FOLDER), loops.hunyuan_15(name, FOLDER, kind, side)
        find_torchvision()
        from hyvideo import commons
        from hyvideo.commons import parallel_states

        alone = SimpleNamespace(sp_enabled=False)
        with mock.patch.object(parallel_states, "get_parallel_state", lambda: alone):
            from hyvideo.models import text_encoders
            from hyvideo.models.autoencoders.hunyuanvideo_15_vae import AutoencoderKLConv3D
            from hyvideo.models.text_encoders.byT5.format_prompt import MultilingualPromptFormat
            from hyvideo.models.transformers import hunyuanvideo_1_5_transformer as networks
            from hyvideo.models.transformers.modules import attention, upsample
            from hyvideo.models.vision_encoder import VisionEncoder
            from hyvideo.pipelines import hunyuan_video_pipeline as upstream
            from hyvideo.pipelines import hunyuan_video_sr_pipeline as after

        task, wide = "i2v" if name.endswith("i2v") else "t2v", 32

        class Mapper(networks.ByT5Mapper):
            """Glyph states of the tiny width, among zeros of the published one."""

            def __init__(self, in_dim: int, **given: Any) -> None:
                super().__init__(in_dim=wide, **given)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x[..., :wide])

        def glyphs(ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
            states = pipe.text_encoder_2(ids, attention_mask=attention_mask)[0]
            return (torch.nn.functional.pad(states, (0, 1472 - wide)),)

        def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any) -> torch.Tensor:
            rows, tokens = torch.arange(len(q)).view(-1, 1, 1, 1), torch.arange(q.shape[2])
            bias = score_mod(torch.zeros(()), rows, 0, tokens.view(1, 1, -1, 1), tokens.view(1, 1, 1, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias == 0)

        networks.ByT5Mapper, attention.flex_attention = Mapper, masked

        def network(place: Path, channels: int, resolution: str, goal: str | None, **more: bool) -> Any:
            model = networks.HunyuanVideo_1_5_DiffusionTransformer(
                patch_size=[1, 1, 1], in_channels=channels, out_channels=32, hidden_size=32, heads_num=2,
                mlp_width_ratio=2.0, mm_double_blocks_depth=2, mm_single_blocks_depth=0, rope_dim_list=[4, 6, 6],
                text_states_dim=wide, text_states_dim_2=None, attn_mode="torch", glyph_byT5_v2=True,
                vision_projection="linear", vision_states_dim=wide, use_cond_type_embedding=True,
                ideal_resolution=resolution, ideal_task=goal, **more,
            )  # fmt: skip
            split = {}
            for key, tensor in in_released_names(place, f"HunyuanVideo 1.5 {layouts.ORIGINAL}").items():
                apart = key.startswith("double_blocks") and "_attn_qkv" in key
                pieces = zip("qkv", tensor.chunk(3), strict=True) if apart else (("qkv", tensor),)
                split |= {key.replace("qkv", one): piece for one, piece in pieces}
            model.load_state_dict(split)
            return model.eval()

        model = network(folder / "transformer", 32, start, task, use_meanflow=kind == "step distilled")
        vae = AutoencoderKLConv3D(
            in_channels=3, out_channels=3, latent_channels=32, block_out_channels=(8, 8, 16, 16, 64),
            layers_per_block=1, ffactor_spatial=16, ffactor_temporal=4, sample_size=256, sample_tsize=64,
            scaling_factor=float(pipe.vae.config.scaling_factor),
        )  # fmt: skip
        vae.load_state_dict(in_released_names(folder / "vae", "the VAE of HunyuanVideo 1.5 as released"))
        templates = text_encoders.PROMPT_TEMPLATE
        templates["li-dit-encode-video-json"]["crop_start"] = 108  # what it counts with Qwen's own words
        pipe.tokenizer.padding_side = "right"
        with (
            mock.patch.object(text_encoders, "load_text_encoder", lambda **_: (pipe.text_encoder, None)),
            mock.patch.object(text_encoders, "load_tokenizer", lambda **_: (pipe.tokenizer, None, None)),
        ):
            first = text_encoders.TextEncoder(
                "llm", 1000, prompt_template=templates["li-dit-encode-image-json"],
                prompt_template_video=templates["li-dit-encode-video-json"], hidden_state_skip_layer=2,
            )  # fmt: skip
        eyes = VisionEncoder.__new__(VisionEncoder)
        torch.nn.Module.__init__(eyes)
        if task == "i2v":
            eyes.model, eyes.processor = pipe.image_encoder, pipe.feature_extractor
            eyes.device, eyes.dtype = torch.device("cpu"), torch.float32
        for file in ("font", "color"):
            (FOLDER / f"{file}.json").write_text("{}")
        version = f"{start}_{task}" + (f"_{kind.replace(' ', '_').removeprefix('cfg_')}" if kind else "")
        common = {
            "vae": vae.eval(), "text_encoder": first, "scheduler": upstream.FlowMatchDiscreteScheduler(),
            "vision_states_dim": wide, "byt5_model": glyphs, "byt5_tokenizer": pipe.tokenizer_2,
            "vision_encoder": eyes if task == "i2v" else None, "execution_device": "cpu",
            "prompt_format": MultilingualPromptFormat(FOLDER / "font.json", FOLDER / "color.json"),
        }  # fmt: skip
        made = upstream.HunyuanVideo_1_5_Pipeline(transformer=model, **common, **commons.PIPELINE_CONFIGS[version])
        runs = [made]
        if end:
            weights = load_file(loops.hunyuan_15_upscaler(FOLDER, end))
            upscaler = upsample.SRTo720pUpsampler(32, 32, 48, 2) if end == "720p" else upsample.SRTo1080pUpsampler(
                32, 32, (64, 96)
            )  # fmt: skip
            upscaler.load_state_dict(weights)
            place = loops.hunyuan_15_super(name, FOLDER, end) / "transformer"
            more = network(place, 65, end, None, is_reshape_temporal_channels=True, use_meanflow=True)
            made.sr_pipeline = after.HunyuanVideo_1_5_SR_Pipeline(
                transformer=more, upsampler=upscaler.eval(), **common,
                **commons.SR_PIPELINE_CONFIGS[f"{end}_sr_distilled"],
            )  # fmt: skip
            runs.append(made.sr_pipeline)
        for one in runs:
            one.target_dtype = one.vae_dtype = torch.float32
            one.autocast_enabled = one.vae_autocast_enabled = False
        after.generate_crop_size_list = loops.tenth(after.generate_crop_size_list)
        upstream.generate_crop_size_list = loops.tenth(upstream.generate_crop_size_list)
        given = {}
        if task == "i2v":
            given["reference_image"] = str(FOLDER / "picture.png")
            loops.saved_picture(*loops.BUCKETED, FOLDER / "picture.png")

        def second(like: torch.Tensor) -> torch.Tensor:
            draws = generator()
            torch.randn(like.shape, generator=draws)  # the first are the noise that is sampled
            return torch.randn(like.shape, generator=draws)

        with mock.patch.object(torch, "randn_like", second):
            film = made(
                enable_sr=bool(end), prompt=loops.QUOTED, aspect_ratio="16:9", video_length=121, seed=loops.SEED,
                negative_prompt=loops.QUOTED_NEGATIVE, prompt_rewrite=False, **given,
            )  # fmt: skip
        return (film.sr_videos if end else film.videos)[0].permute(1, 2, 3, 0)

    return run


def skyreels(name: str) -> Callable[[], torch.Tensor]:
    """Skywork's pipeline with what ``video_generate.py`` gives it: 97 frames, 30 steps, cfg 6, tiles.

    It decodes in windows of 64 frames, as Tencent does and we; without the line that says so it has 16."""

    def run() -> torch.Tensor:
        from diffusers import HunyuanVideoTransformer3DModel
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from PIL import Image

        parts, pictured = tiny.one_shot("hunyuan_video", FOLDER).components, name == loops.SKYREELS_I2V
        from skyreelsinfer.pipelines.pipeline_skyreels_video import SkyreelsVideoPipeline

        transformer = HunyuanVideoTransformer3DModel.from_pretrained(loops.skyreels(name, FOLDER))
        pipe = SkyreelsVideoPipeline(**{**parts, "transformer": transformer.eval()})
        pipe.vae.enable_tiling()
        width, height = loops.SKYREELS_SIZE if pictured else loops.SIZE
        pipe.vae.tile_sample_min_num_frames, pipe.vae.tile_sample_stride_num_frames = 64, 48
        # Its diffusers counts latent frames where it draws noise, ours pixel frames.
        noise = torch.randn(1, 16, 25, height // 8, width // 8, generator=generator())
        given, draw = {}, DiagonalGaussianDistribution.sample
        if pictured:
            loops.saved_picture(*loops.BUCKETED, FOLDER / "picture.png")
            given = {"image": Image.open(FOLDER / "picture.png").convert("RGB")}
        # The seed of AnyGPU Encode Image draws the picture's latents.
        draws = torch.Generator().manual_seed(0)
        with mock.patch.object(DiagonalGaussianDistribution, "sample", lambda self: draw(self, draws)):
            film = pipe(
                prompt=loops.SKYREELS, negative_prompt=loops.NEGATIVE, height=height, width=width, num_frames=97,
                num_inference_steps=30, guidance_scale=6.0, embedded_guidance_scale=1.0, latents=noise,
                cfg_for=False, output_type="pt", **given,
            ).frames  # fmt: skip
        return film[0].permute(0, 2, 3, 1)

    return run


def mochi() -> torch.Tensor:
    """``MochiSingleGPUPipeline`` as ``demos/api_example.py`` calls it, decoded whole, at the frames of our default.

    Run without assertions (``PYTHONOPTIMIZE=1``), which hold the published widths."""
    from contextlib import nullcontext

    pipe = tiny.one_shot("mochi", FOLDER)
    folder = FOLDER / "mochi"
    stub("ray", "moviepy", "moviepy.editor", "genmo.lib.attn_imports")
    sys.path.insert(0, str(CLONE / "src"))
    import torch.distributed.fsdp
    from genmo.mochi_preview import pipelines
    from genmo.mochi_preview.dit.joint_model import asymm_models_joint as joint
    from genmo.mochi_preview.vae.models import Decoder

    layer = joint.FeedForward
    with (
        mock.patch.object(joint, "sdpa_kernel", lambda _: nullcontext()),
        mock.patch.object(joint, "sdpa_attn_ctx", lambda **_: nullcontext()),
        mock.patch.object(joint, "FeedForward", lambda **given: layer(**{**given, "multiple_of": 1})),
    ):
        network = joint.AsymmDiTJoint(
            depth=2, patch_size=2, num_heads=2, hidden_size_x=32, hidden_size_y=32, mlp_ratio_x=4.0, mlp_ratio_y=4.0,
            in_channels=12, qk_norm=True, qkv_bias=False, out_bias=True, patch_embed_bias=True, timestep_mlp_bias=True,
            timestep_scale=1000.0, t5_feat_dim=32, t5_token_length=256, rope_theta=10000.0, attention_mode="sdpa",
        )  # fmt: skip
        network.load_state_dict(in_released_names(folder / "transformer", "Mochi 1 as released"), strict=True)
        decoder = Decoder(
            out_channels=3, base_channels=32, channel_multipliers=[1, 1, 1, 1], temporal_expansions=[1, 2, 3],
            spatial_expansions=[2, 2, 2], num_res_blocks=[1] * 5, latent_dim=12, has_attention=[False] * 5,
            output_norm=False, nonlinearity="silu", output_nonlinearity="silu", causal=True,
        )  # fmt: skip
        whole = in_released_names(folder / "vae", "the VAE of Mochi 1 as released")
        decoder.load_state_dict({name[8:]: each for name, each in whole.items() if name.startswith("decoder.")})
        run = pipelines.MochiSingleGPUPipeline.__new__(pipelines.MochiSingleGPUPipeline)
        run.device, run.decode_type, run.tokenizer = torch.device("cpu"), "full", pipe.tokenizer
        run.text_encoder, run.dit, run.decoder = pipe.text_encoder, network.eval(), decoder.eval()
        width, height = loops.SIZE
        frames = run(
            width=width, height=height, num_frames=85, num_inference_steps=64, batch_cfg=False, seed=loops.SEED,
            sigma_schedule=pipelines.linear_quadratic_schedule(64, 0.025), cfg_schedule=[4.5] * 64,
            prompt=loops.PROMPT, negative_prompt="",
        )  # fmt: skip
    return torch.from_numpy(frames[0])


def attention_of_masked(qkv: torch.Tensor, valid: torch.Tensor, **_: Any) -> torch.Tensor:
    """``flash_attn_no_pad``: of tokens (B, N, 3, heads, D) those that are ``valid`` see each other; zeros elsewhere."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None].bool())
    return found.transpose(1, 2) * valid[:, :, None, None]


def fast_mochi() -> torch.Tensor:
    """``sample_t2v_mochi.py`` of FastVideo as its ``inference_mochi_hf.sh`` calls it.

    It decodes with Genmo's decoder, as we do; FastVideo takes diffusers', which drops other frames."""
    pipe, folder = tiny.one_shot("mochi", FOLDER), FOLDER / "mochi" / "transformer"
    flash = SimpleNamespace(flash_attn_no_pad=attention_of_masked)
    silu = SimpleNamespace(apply=lambda gate, states: torch.nn.functional.silu(gate) * states)
    sys.modules["fastvideo.models.flash_attn_no_pad"] = flash  # type: ignore[assignment]
    stub("liger_kernel", "liger_kernel.ops")
    sys.modules["fastvideo.version"] = SimpleNamespace(__version__="")  # type: ignore[assignment]
    stub(*(f"fastvideo.v1.{name}" for name in ("configs.pipelines", "configs.sample", "entrypoints.video_generator")))
    sys.modules["liger_kernel.ops.swiglu"] = SimpleNamespace(LigerSiLUMulFunction=silu)  # type: ignore[assignment]
    from anygpu.pipelines.vae.tiled import decode_as_published
    from fastvideo.distill.solver import PCMFMScheduler
    from fastvideo.models.mochi_hf.modeling_mochi import MochiTransformer3DModel
    from fastvideo.models.mochi_hf.pipeline_mochi import MochiPipeline

    width, height = loops.SIZE
    decode_as_published(pipe.vae)
    made = MochiPipeline(
        scheduler=PCMFMScheduler(1000, 8.0, 100, True, 0.1, 0.75), vae=pipe.vae, text_encoder=pipe.text_encoder,
        tokenizer=pipe.tokenizer, transformer=MochiTransformer3DModel.from_pretrained(folder).eval(),
    )  # fmt: skip
    made.enable_vae_tiling()
    film = made(
        prompt=[loops.PROMPT], height=height, width=width, num_frames=163, num_inference_steps=8, guidance_scale=1.5,
        generator=generator(), output_type="pt",
    ).frames  # fmt: skip
    return film[0].permute(0, 2, 3, 1)


def fast_hunyuan() -> torch.Tensor:
    """``sample_t2v_hunyuan.py`` of FastVideo as ``inference_hunyuan.sh`` calls it, on one device: 6 steps, shift 17."""
    sys.modules["fastvideo.models.flash_attn_no_pad"] = SimpleNamespace(flash_attn_no_pad=attention_of_masked)  # type: ignore[assignment]
    sys.modules["fastvideo.version"] = SimpleNamespace(__version__="")  # type: ignore[assignment]
    stub(*(f"fastvideo.v1.{name}" for name in ("configs.pipelines", "configs.sample", "entrypoints.video_generator")))
    args = SimpleNamespace(
        denoise_type="flow", flow_shift=17, flow_reverse=True, flow_solver="euler", vae="884-16c-hy", precision="fp32",
        vae_precision="fp32", disable_autocast=False, vae_tiling=True, vae_sp=False,
    )  # fmt: skip
    return distilled_hunyuan("fastvideo.models.hunyuan", args, (), frames=125, steps=6)


def acc_video() -> torch.Tensor:
    """``sample_t2v.py`` of AccVideo as its README calls it: 5 steps, shift 7, 93 frames."""
    script = (CLONE / "sample_t2v.py").read_text()
    asks = textwrap.dedent(script[script.index("    parser = ") :])
    space: dict[str, Any] = {"argparse": argparse, "main": lambda _: None}
    command = f"--height {loops.SIZE[1]} --width {loops.SIZE[0]} --num_frames 93 --num_inference_steps 5 "
    command += "--guidance_scale 1 --embedded_cfg_scale 6 --flow_shift 7 --flow-reverse --precision fp32 "
    command += "--vae-precision fp32 --text-states-dim 32 --text-states-dim-2 32"
    with mock.patch.object(sys, "argv", ["", *command.split()]):
        exec(asks, space)
    args = space["args"]
    from models.hunyuan.modules import attenion

    with mock.patch.object(attenion, "flash_attn_varlen_func", attention_of_lengths):
        return distilled_hunyuan(
            "models.hunyuan", args, (args,), args.num_frames, args.num_inference_steps, few_step=True
        )


def distilled_hunyuan(
    package: str, args: Any, first: tuple[Any, ...], frames: int, steps: int, **asked: Any
) -> torch.Tensor:
    """A loop of a fork of Tencent's code, whose transformer may take its arguments ``first``."""
    pipe, folder = tiny.one_shot("hunyuan_video", FOLDER), FOLDER / "hunyuan_video"
    inference, text_encoder, models, vaes = (
        import_module(f"{package}.{name}")
        for name in ("inference", "text_encoder", "modules.models", "vae.autoencoder_kl_causal_3d")
    )
    own = {"mm_double_blocks_depth": 2, "mm_single_blocks_depth": 2, "rope_dim_list": [4, 6, 6], "hidden_size": 32}
    own |= {"heads_num": 2, "mlp_width_ratio": 2.0, "guidance_embed": True}
    if not first:
        own |= {"text_states_dim": 32, "text_states_dim_2": 32}
    with on_cpu():
        model = models.HYVideoDiffusionTransformer(*first, in_channels=16, out_channels=16, **own)
        model.load_state_dict(in_released_names(folder / "transformer", f"HunyuanVideo {layouts.ORIGINAL}"))
        vae = vaes.AutoencoderKLCausal3D(**hunyuan_vae_config(vaes.AutoencoderKLCausal3D))
        vae.load_state_dict(in_released_names(folder / "vae", "the VAE of HunyuanVideo"))
        encoders = {"llm": (pipe.text_encoder, pipe.tokenizer), "clipL": (pipe.text_encoder_2, pipe.tokenizer_2)}

        def part(index: int) -> Callable[..., Any]:
            return lambda tokenizer_type=None, text_encoder_type=None, **_: (
                encoders[tokenizer_type or text_encoder_type][index], None,
            )  # fmt: skip

        with (
            mock.patch.object(text_encoder, "load_text_encoder", part(0)),
            mock.patch.object(text_encoder, "load_tokenizer", part(1)),
        ):
            template, video = (inference.PROMPT_TEMPLATE[f"dit-llm-encode{end}"] for end in ("", "-video"))
            llama = text_encoder.TextEncoder(
                "llm", 256 + video["crop_start"], prompt_template=template, prompt_template_video=video,
                hidden_state_skip_layer=2, apply_final_norm=False,
            )  # fmt: skip
            clip = text_encoder.TextEncoder("clipL", 77)
        alone = {"parallel_args": {"ulysses_degree": 1, "ring_degree": 1}} if first else {}
        sampler = inference.HunyuanVideoSampler(args, vae.eval(), {}, llama, model.eval(), clip, device="cpu", **alone)
        encode, (width, height) = sampler.pipeline.encode_prompt, loops.SIZE

        def in_rows(
            *given: Any, **named: Any
        ) -> tuple[Any, ...]:  # CLIP's vector, which at other widths is padded to one
            embeds, *rest = encode(*given, **named)
            return embeds[:, None] if embeds.ndim == 2 else embeds, *rest

        if not first:
            sampler.pipeline.encode_prompt = in_rows
        made = sampler.predict(
            prompt=loops.PROMPT, height=height, width=width, video_length=frames, seed=loops.SEED, infer_steps=steps,
            guidance_scale=1.0, flow_shift=args.flow_shift, embedded_guidance_scale=6.0, **asked,
        )  # fmt: skip
    return made["samples"][0].permute(1, 2, 3, 0)


LTX_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False, "encoder_base_channels": 8, "decoder_base_channels": 8,
}  # fmt: skip
DOWN = (("space", 1), ("time", 2), ("all", 1), ("all", 1))
LTX_VAES = {  # in the publisher's words: 0.9.0, 0.9.1, and since 0.9.5; the names of their releases
    "ltx": (
        {"blocks": [["res_x", 1], ["compress_all", 1], ["res_x_y", 1]] * 2
         + [["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 1]]},
        "the VAE of LTX-Video 0.9.0 as released",
    ),
    "ltx_091": (
        {"encoder_blocks": [["res_x", 1], ["compress_all", 1], ["res_x_y", 1]] * 2
         + [["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 1]],
         "decoder_blocks": [
             row for _ in range(3) for row in (
                 ["res_x", {"num_layers": 1, "inject_noise": True}],
                 ["compress_all", {"residual": True, "multiplier": 2}],
             )
         ] + [["res_x", {"num_layers": 1, "inject_noise": False}]],
         "timestep_conditioning": True, "decoder_base_channels": 4},
        "the VAE of LTX-Video 0.9.1 as released",
    ),
    "ltx_condition": (
        {"encoder_blocks": [["res_x", {"num_layers": 1}]] + [
            row for kind, more in DOWN
            for row in ([f"compress_{kind}_res", {"multiplier": more}], ["res_x", {"num_layers": 1}])
        ],
         "decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": False}]]
         + [["compress_all", {"residual": True, "multiplier": 2}], ["res_x", {"num_layers": 1, "inject_noise": False}]]
         * 3, "timestep_conditioning": True, "decoder_base_channels": 4},
        "the VAE of LTX-Video 0.9.5 and later as released",
    ),
}  # fmt: skip


def ltx_pipeline(name: str, scheduler: dict[str, Any], blocks: int = loops.LTX_BLOCKS) -> Any:
    """Lightricks' pipeline with the weights of a tiny checkpoint."""
    import transformers  # noqa: F401
    from diffusers import DiffusionPipeline  # noqa: F401
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

    folder = loops.ltx(name, FOLDER, blocks)
    stub("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    from ltx_video.models.autoencoders.causal_video_autoencoder import CausalVideoAutoencoder
    from ltx_video.models.transformers.symmetric_patchifier import SymmetricPatchifier
    from ltx_video.pipelines.pipeline_ltx_video import LTXVideoPipeline
    from ltx_video.schedulers.rf import RectifiedFlowScheduler

    from published.ltx_reference import transformer_of

    config, names = LTX_VAES[name]
    vae = CausalVideoAutoencoder.from_config({**LTX_VAE, **config})
    vae.load_state_dict(in_released_names(folder / "vae", names), strict=True)
    return LTXVideoPipeline(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
        text_encoder=T5EncoderModel.from_pretrained(folder / "text_encoder"),
        vae=vae.eval(), transformer=transformer_of(folder / "transformer", name == "ltx_condition"),
        scheduler=RectifiedFlowScheduler(**scheduler), patchifier=SymmetricPatchifier(patch_size=1),
        **dict.fromkeys(
            f"prompt_enhancer_{part}"
            for part in ("image_caption_model", "image_caption_processor", "llm_model", "llm_tokenizer")
        ),
    )  # fmt: skip


def ltx_picture(width: int, height: int) -> Any:
    """The first frame as ``inference.py`` prepares it, which needs torchvision."""
    from diffusers import DiffusionPipeline  # noqa: F401

    find_torchvision()
    import torchvision.transforms.functional as filters
    from ltx_video.pipelines import crf_compressor
    from PIL import Image

    space = {"Image": Image, "TVF": filters, "crf_compressor": crf_compressor, "torch": torch, "Union": Union}
    prepare = functions(CLONE / "ltx_video" / "inference.py", {"load_image_to_tensor_with_resize_and_crop"}, space)
    shown = Image.fromarray((loops.picture(*loops.LTX_PICTURE)[0] * 255).round().byte().numpy())
    return prepare["load_image_to_tensor_with_resize_and_crop"](shown, height, width, just_crop=True)


def ltx(
    name: str, config: str, fps: int = 25, blocks: int = loops.LTX_BLOCKS, pictured: bool = False, **scheduler: Any
) -> Callable[[], torch.Tensor]:
    """``inference.py`` with a published configuration, for a prompt that it does not rewrite."""

    def run() -> torch.Tensor:
        import yaml

        given = yaml.safe_load((CLONE / "configs" / config).read_text())
        size = loops.LTX_FINAL if given["pipeline_type"] == "multi-scale" else loops.LTX_SIZE
        picture = ltx_picture(*size) if pictured else None
        pipe = ltx_pipeline(name, scheduler, blocks)
        from ltx_video.models.autoencoders.latent_upsampler import LatentUpsampler
        from ltx_video.pipelines import pipeline_ltx_video as upstream
        from ltx_video.utils.skip_layer_strategy import SkipLayerStrategy

        draws, (width, height) = generator(), size
        if given["pipeline_type"] == "multi-scale":
            network = LatentUpsampler(mid_channels=32, num_blocks_per_stage=1)
            network.load_state_dict(load_file(loops.ltx_upscaler(FOLDER)), strict=True)
            pipe = upstream.LTXMultiScalePipeline(pipe, network.eval())
        real, passes = torch.randn, set[tuple[int, ...]]()

        def noise(shape: tuple[int, ...], **_: Any) -> torch.Tensor:
            if shape in passes:  # the noise on a picture before each step
                return real(shape, generator=draws)
            passes.add(shape)
            draws.manual_seed(loops.SEED)  # each pass is a node with its seed
            grid = 16, *loops.LTX_GRIDS[shape[1]]
            return real(1, shape[2], *grid, generator=draws).flatten(2).transpose(1, 2)

        conditions = None if picture is None else [upstream.ConditioningItem(picture, 0, 1.0)]
        assert given.pop("stg_mode") == "attention_values"
        with (
            mock.patch.object(upstream, "randn_tensor", noise),
            mock.patch.object(torch, "randn_like", lambda like, **_: real(like.shape, generator=draws)),
            mock.patch("diffusers.models.autoencoders.vae.randn_tensor", drawn(draws)),
            mock.patch.object(torch, "randn", drawn(draws)),  # the noise in 0.9.1's decoder, the last that is drawn
        ):
            film = pipe(
                **given, skip_layer_strategy=SkipLayerStrategy.AttentionValues, generator=draws, output_type="pt",
                height=height, width=width, num_frames=121, frame_rate=fps, prompt=loops.PROMPT,
                negative_prompt=loops.NEGATIVE, prompt_attention_mask=None, negative_prompt_attention_mask=None,
                media_items=None, conditioning_items=conditions, is_video=True, vae_per_channel_normalize=True,
                image_cond_noise_scale=0.15, mixed_precision=False, offload_to_cpu=False, enhance_prompt=False,
            ).images  # fmt: skip
        return film[0].permute(1, 2, 3, 0)

    return run


def tiny_config(module: Any, like: Any) -> dict[str, Any]:
    """The settings of a module of diffusers that the publisher's class ``like`` takes too."""
    taken = inspect.signature(like.__init__).parameters
    return {name: value for name, value in module.config.items() if name in taken}


TENCENT = "Tencent Hunyuan Community License"
HUNYUAN_I2V = "Tencent-Hunyuan/HunyuanVideo-I2V", "1481c1d", TENCENT
HUNYUAN_15 = "Tencent-Hunyuan/HunyuanVideo-1.5", "60783e7", TENCENT
LIGHTRICKS = "Lightricks/LTX-Video", "5260738", "Apache-2.0"
LIGHTRICKS_097, LATER = ("Lightricks/LTX-Video", "20799e5", "Apache-2.0"), "LinearQuadratic"
SKYWORK = "SkyworkAI/SkyReels-V1", "cb0ceaa", f"Apache-2.0 and {TENCENT}"
FRAMEPACK = "lllyasviel/FramePack", "97fe5db", "Apache-2.0; its sampler CC BY-SA 4.0"
STUDIO = "colinurbs/FramePack-Studio", "f4369da", "Apache-2.0; its sampler CC BY-SA 4.0"
LOOPS = {
    "framepack": Loop(*FRAMEPACK, framepack("demo_gradio.py")),
    "framepack f1": Loop(*FRAMEPACK, framepack("demo_gradio_f1.py")),
    "framepack clip": Loop(*STUDIO, framepack_clip("Video")),
    "framepack clip end": Loop(*STUDIO, framepack_clip("Video", ended=True)),
    "framepack f1 clip": Loop(*STUDIO, framepack_clip("Video F1")),
    "framepack clip blend": Loop(*STUDIO, framepack_clip("Video", blend=2)),
    "framepack f1 clip blend": Loop(*STUDIO, framepack_clip("Video F1", blend=2)),
    "ltx 0.9.0": Loop(
        *LIGHTRICKS, ltx("ltx", "ltxv-2b-0.9.yaml", sampler="Uniform", shifting="SD3", target_shift_terminal=0.1)
    ),
    "ltx 0.9.1": Loop(
        *LIGHTRICKS, ltx("ltx_091", "ltxv-2b-0.9.1.yaml", sampler="Uniform", shifting="SD3", target_shift_terminal=0.1)
    ),
    "ltx 0.9.5": Loop(*LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.5.yaml", sampler="LinearQuadratic")),
    "ltx 0.9.5 picture": Loop(
        *LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.5.yaml", pictured=True, sampler="LinearQuadratic")
    ),
    **{
        f"ltx 0.9.6 {kind}": Loop(*LIGHTRICKS, ltx("ltx_condition", f"ltxv-2b-0.9.6-{kind}.yaml", 30, sampler=LATER))
        for kind in ("dev", "distilled")
    },
    **{
        f"ltx {size} {kind}": Loop(
            *(LIGHTRICKS_097 if "0.9.7" in kind else LIGHTRICKS),
            ltx("ltx_condition", f"ltxv-{size}-{kind}.yaml".lower().replace(" ", "-"), 30, blocks, sampler=LATER),
        )
        for size, kind, blocks in (
            *(("2B", "0.9.8 distilled", loops.LTX_BLOCKS), ("13B", "0.9.8 distilled", 29), ("13B", "0.9.8 dev", 40)),
            *(("13B", "0.9.7 distilled", 29), ("13B", "0.9.7 dev", 40)),
        )
    },
    **{
        loops.named(task, kind): Loop(
            *HUNYUAN_15, hunyuan_15(f"hunyuan_video_15{'_i2v' if task == 'i2v' else ''}", kind)
        )
        for task, kind in loops.HUNYUAN_15
    },
    "ltx 2B 0.9.8 distilled picture": Loop(
        *LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.8-distilled.yaml", 30, pictured=True, sampler=LATER)
    ),
    **{
        f"{loops.named(task, '')} 720p": Loop(
            *HUNYUAN_15, hunyuan_15(f"hunyuan_video_15{'_i2v' if task == 'i2v' else ''}", start="720p")
        )
        for task in ("t2v", "i2v")
    },
    **{
        loops.named(task, *rest): Loop(
            *HUNYUAN_15, hunyuan_15(f"hunyuan_video_15{'_i2v' if task == 'i2v' else ''}", *rest)
        )
        for task, *rest in loops.HUNYUAN_15_TWICE
    },
    "skyreels v1 t2v": Loop(*SKYWORK, skyreels(loops.SKYREELS_T2V)),
    "skyreels v1 i2v": Loop(*SKYWORK, skyreels(loops.SKYREELS_I2V)),
    "fast hunyuan": Loop("hao-ai-lab/FastVideo", "b79d1fc", "Apache-2.0", fast_hunyuan),
    "acc video": Loop("aejion/AccVideo", "a2752d2", TENCENT, acc_video),
    "fast mochi": Loop("hao-ai-lab/FastVideo", "b79d1fc", "Apache-2.0", fast_mochi),
    "mochi": Loop("genmoai/mochi", "0c86aeb", "Apache-2.0", mochi),
    "hunyuan video": Loop("Tencent-Hunyuan/HunyuanVideo", "fa14b00", TENCENT, hunyuan_video()),
    "hunyuan video i2v": Loop(*HUNYUAN_I2V, hunyuan_video("token_replace")),
    "hunyuan video i2v dynamic": Loop(*HUNYUAN_I2V, hunyuan_video("token_replace", stable=False)),
    "hunyuan video i2v 33 channels": Loop(*HUNYUAN_I2V, hunyuan_video("latent_concat")),
}


def main() -> None:
    """Run the loop that is named."""
    name = sys.argv[1]
    loop = LOOPS[name]
    with torch.no_grad():
        frames = loop.run()
    save_file(loops.kept(frames), loops.fixture(name), metadata=loop.about(f"loop_reference.py '{name}' CLONE"))
    print(tuple(frames.shape), float(frames.mean()), float(frames.std()))


if __name__ == "__main__":
    main()
