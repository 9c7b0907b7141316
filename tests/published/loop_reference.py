"""Writes what a publisher's whole loop makes of tiny weights to `tests/fixtures/published/loop_NAME.safetensors`.

    python tests/published/loop_reference.py NAME CLONE [FOLDER]

NAME is a row of ``LOOPS`` below, with the repository, commit and licence of its clone; FOLDER has torchvision in it,
where that is not installed and the loop needs it. The publisher's own code is run
for text, picture, sampling and decoding, on the CPU in fp32; nothing of it is kept but the frames. Random numbers are
drawn in our order, since a loop's own draws depend on its device.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec
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

CLONE = Path(sys.argv[2])
FOLDER = Path(mkdtemp())


@dataclass(frozen=True)
class Loop:
    """One publisher's loop: where it is from, and what runs it, to frames (F, H, W, 3) in 0..1."""

    repository: str
    commit: str
    licence: str
    run: Callable[[], torch.Tensor]


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


def hunyuan_video() -> torch.Tensor:
    """``sample_video.py`` as its README calls it: 50 steps, shift 7, embedded guidance 6, with tiles."""
    pipe = tiny.one_shot("hunyuan_video", FOLDER)
    from hyvideo import config, inference, text_encoder
    from hyvideo.modules import attenion, models
    from hyvideo.vae.autoencoder_kl_causal_3d import AutoencoderKLCausal3D

    width, height = loops.SIZE
    command = ["", "--prompt", loops.PROMPT, "--seed", str(loops.SEED), "--flow-reverse"]
    command += ["--video-size", str(height), str(width)]
    command += [f"--{part}-precision=fp32" for part in ("vae", "text-encoder")]
    command += ["--precision=fp32", "--text-encoder-precision-2=fp32", "--text-states-dim=32", "--text-states-dim-2=32"]
    with mock.patch.object(sys, "argv", command):
        args = config.parse_args()
    own = {"mm_double_blocks_depth": 2, "mm_single_blocks_depth": 2, "rope_dim_list": [4, 6, 6], "hidden_size": 32}
    own |= {"heads_num": 2, "mlp_width_ratio": 2.0, "guidance_embed": True}
    folder = FOLDER / "hunyuan_video"
    with on_cpu(), mock.patch.object(attenion, "flash_attn_varlen_func", attention_of_lengths):
        model = models.HYVideoDiffusionTransformer(args, in_channels=16, out_channels=16, **own)
        model.load_state_dict(in_released_names(folder / "transformer", f"HunyuanVideo {layouts.ORIGINAL}"))
        vae = AutoencoderKLCausal3D(**hunyuan_vae_config(AutoencoderKLCausal3D))
        vae.load_state_dict(in_released_names(folder / "vae", "the VAE of HunyuanVideo"))
        encoders = {"llm": (pipe.text_encoder, pipe.tokenizer), "clipL": (pipe.text_encoder_2, pipe.tokenizer_2)}

        def part(index: int) -> Callable[..., Any]:
            return lambda kind=None, tokenizer_type=None, text_encoder_type=None, **_: (
                encoders[kind or tokenizer_type or text_encoder_type][index], None,
            )  # fmt: skip

        with (
            mock.patch.object(text_encoder, "load_text_encoder", part(0)),
            mock.patch.object(text_encoder, "load_tokenizer", part(1)),
        ):
            crop = inference.PROMPT_TEMPLATE[args.prompt_template_video]["crop_start"]
            first = text_encoder.TextEncoder(
                args.text_encoder,
                args.text_len + crop,
                prompt_template=inference.PROMPT_TEMPLATE[args.prompt_template],
                prompt_template_video=inference.PROMPT_TEMPLATE[args.prompt_template_video],
                hidden_state_skip_layer=args.hidden_state_skip_layer,
                apply_final_norm=args.apply_final_norm,
            )
            second = text_encoder.TextEncoder(args.text_encoder_2, args.text_len_2)
        sampler = inference.HunyuanVideoSampler(
            args, vae.eval(), {}, first, model.eval(), second, device="cpu",
            parallel_args={"ulysses_degree": 1, "ring_degree": 1},
        )  # fmt: skip
        made = sampler.predict(
            prompt=args.prompt, height=args.video_size[0], width=args.video_size[1], video_length=args.video_length,
            seed=args.seed, negative_prompt=args.neg_prompt, infer_steps=args.infer_steps,
            guidance_scale=args.cfg_scale, flow_shift=args.flow_shift, embedded_guidance_scale=args.embedded_cfg_scale,
        )  # fmt: skip
    return made["samples"][0].permute(1, 2, 3, 0)


def hunyuan_vae_config(cls: Any) -> dict[str, Any]:
    """Tencent's published VAE settings at the tiny widths."""
    return {
        "in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 256, "sample_tsize": 64,
        "scaling_factor": 0.476986, "spatial_compression_ratio": 8, "time_compression_ratio": 4,
        "mid_block_add_attention": True, "act_fn": "silu",
        "down_block_types": ("DownEncoderBlockCausal3D",) * 4, "up_block_types": ("UpDecoderBlockCausal3D",) * 4,
    }  # fmt: skip


def mochi() -> torch.Tensor:
    """``MochiSingleGPUPipeline`` as ``demos/api_example.py`` calls it, decoded whole, at the frames of our default.

    Run without assertions (``PYTHONOPTIMIZE=1``), which hold the published widths.
    """
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


LTX_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False, "encoder_base_channels": 8, "decoder_base_channels": 8,
}  # fmt: skip
DOWN = (("space", 1), ("time", 2), ("all", 1), ("all", 1))
LTX_VAES = {  # in the publisher's words: 0.9.0, and since 0.9.5; the names of their releases
    "ltx": (
        {"blocks": [["res_x", 1], ["compress_all", 1], ["res_x_y", 1]] * 2
         + [["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 1]]},
        "the VAE of LTX-Video 0.9.0 as released",
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
        vae=vae.eval(), transformer=transformer_of(folder / "transformer", name != "ltx"),
        scheduler=RectifiedFlowScheduler(**scheduler), patchifier=SymmetricPatchifier(patch_size=1),
        **dict.fromkeys(
            f"prompt_enhancer_{part}"
            for part in ("image_caption_model", "image_caption_processor", "llm_model", "llm_tokenizer")
        ),
    )  # fmt: skip


def ltx_picture(width: int, height: int) -> Any:
    """The first frame as ``inference.py`` prepares it, which needs torchvision."""
    from diffusers import DiffusionPipeline  # noqa: F401

    sys.path += sys.argv[3:]
    package = find_spec("torchvision")
    assert package is not None
    sys.modules["torchvision"] = module_from_spec(package)  # without its operators, which are compiled for one torch
    import torchvision.transforms.functional as filters
    from ltx_video.pipelines import crf_compressor
    from PIL import Image

    space = {"Image": Image, "TVF": filters, "crf_compressor": crf_compressor, "torch": torch, "Union": Union}
    prepare = functions(CLONE / "ltx_video" / "inference.py", {"load_image_to_tensor_with_resize_and_crop"}, space)
    shown = Image.fromarray((loops.picture(*loops.LTX_PICTURE)[0] * 255).round().byte().numpy())
    return prepare["load_image_to_tensor_with_resize_and_crop"](shown, height, width, just_crop=True)


def ltx(
    name: str,
    config: str,
    fps: int = 25,
    blocks: int = loops.LTX_BLOCKS,
    pictured: bool = False,
    **scheduler: Any,
) -> Callable[[], torch.Tensor]:
    """``inference.py`` with a published configuration, for a prompt that it does not rewrite."""

    def run() -> torch.Tensor:
        import yaml

        given = yaml.safe_load((CLONE / "configs" / config).read_text())
        picture = ltx_picture(*loops.LTX_SIZE) if pictured else None
        pipe = ltx_pipeline(name, scheduler, blocks)
        from ltx_video.models.autoencoders.latent_upsampler import LatentUpsampler
        from ltx_video.pipelines import pipeline_ltx_video as upstream
        from ltx_video.utils.skip_layer_strategy import SkipLayerStrategy

        draws, (width, height) = generator(), loops.LTX_SIZE
        if given["pipeline_type"] == "multi-scale":
            width, height = loops.LTX_FINAL
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
LIGHTRICKS = "Lightricks/LTX-Video", "5260738", "Apache-2.0"
FRAMEPACK = "lllyasviel/FramePack", "97fe5db", "Apache-2.0; its sampler CC BY-SA 4.0"
LOOPS = {
    "framepack": Loop(*FRAMEPACK, framepack("demo_gradio.py")),
    "framepack f1": Loop(*FRAMEPACK, framepack("demo_gradio_f1.py")),
    "ltx 0.9.0": Loop(
        *LIGHTRICKS, ltx("ltx", "ltxv-2b-0.9.yaml", sampler="Uniform", shifting="SD3", target_shift_terminal=0.1)
    ),
    "ltx 0.9.5": Loop(*LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.5.yaml", sampler="LinearQuadratic")),
    "ltx 0.9.5 picture": Loop(
        *LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.5.yaml", pictured=True, sampler="LinearQuadratic")
    ),
    "ltx 0.9.6 distilled": Loop(
        *LIGHTRICKS, ltx("ltx_condition", "ltxv-2b-0.9.6-distilled.yaml", fps=30, sampler="LinearQuadratic")
    ),
    **{
        f"ltx {size} 0.9.8 {kind}": Loop(
            *LIGHTRICKS,
            ltx("ltx_condition", f"ltxv-{size.lower()}-0.9.8-{kind}.yaml", 30, blocks, sampler="LinearQuadratic"),
        )
        for size, kind, blocks in (("2B", "distilled", loops.LTX_BLOCKS), ("13B", "distilled", 29), ("13B", "dev", 40))
    },
    "mochi": Loop("genmoai/mochi", "0c86aeb", "Apache-2.0", mochi),
    "hunyuan video": Loop("Tencent-Hunyuan/HunyuanVideo", "fa14b00", TENCENT, hunyuan_video),
}


def about(name: str) -> dict[str, str]:
    """What a fixture says of itself."""
    loop = LOOPS[name]
    return {
        "source": f"github.com/{loop.repository} at {loop.commit}, {loop.licence}; results of its code, none of it",
        "command": f"python tests/published/loop_reference.py '{name}' CLONE",
    }


def main() -> None:
    """Run the loop that is named."""
    loop = LOOPS[sys.argv[1]]
    with torch.no_grad():
        frames = loop.run()
    save_file(loops.kept(frames), loops.fixture(sys.argv[1]), metadata=about(sys.argv[1]))
    print(tuple(frames.shape), float(frames.mean()), float(frames.std()))


if __name__ == "__main__":
    main()
