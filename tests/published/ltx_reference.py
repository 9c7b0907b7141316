"""Writes what Lightricks' own loop makes of tiny weights to `tests/fixtures/published/ltx_recipes.safetensors`.

    python tests/published/ltx_reference.py CLONE_OF_LTX_VIDEO

The clone is of github.com/Lightricks/LTX-Video; nothing of it is kept but its results. Weights, text and noise are
drawn by seeds here and in the test, so that the file holds latents alone.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), sys.argv[1]]

import layouts  # noqa: E402
import tiny  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from published import loops, ltx_runs  # noqa: E402

OUT = Path(__file__).parents[1] / "fixtures" / "published" / "ltx_recipes.safetensors"


def transformer_of(folder: Path, causal: bool) -> Any:
    """The publisher's transformer with the tiny weights; ``causal`` places are those since 0.9.5."""
    from ltx_video.models.transformers.transformer3d import Transformer3DModel

    config = layouts.config_in(folder)
    module = Transformer3DModel(
        num_attention_heads=config["num_attention_heads"],
        attention_head_dim=config["attention_head_dim"],
        in_channels=config["in_channels"],
        out_channels=config["out_channels"],
        num_layers=config["num_layers"],
        cross_attention_dim=config["cross_attention_dim"],
        caption_channels=config["caption_channels"],
        attention_bias=True,
        activation_fn="gelu-approximate",
        adaptive_norm="single_scale_shift",
        standardization_norm="rms_norm",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        qk_norm="rms_norm",
        positional_embedding_type="rope",
        positional_embedding_theta=10000.0,
        positional_embedding_max_pos=[20, 2048, 2048],
        timestep_scale_multiplier=1000,
        causal_temporal_positioning=causal,
    )
    tensors = layouts.released(layouts.tensors_of(folder), layouts.layout("LTX-Video as released"))
    module.load_state_dict(tensors, strict=True)
    return module.eval()


def pipeline_of() -> Any:
    """The publisher's pipeline without encoders, and with a VAE of which only the ratios are asked."""
    from ltx_video.models.autoencoders.causal_video_autoencoder import CausalVideoAutoencoder
    from ltx_video.models.transformers.symmetric_patchifier import SymmetricPatchifier
    from ltx_video.pipelines import pipeline_ltx_video as upstream

    class Ratios(CausalVideoAutoencoder):
        spatial_downscale_factor, temporal_downscale_factor = 32, 8

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    pipe = upstream.LTXVideoPipeline.__new__(upstream.LTXVideoPipeline)
    pipe.register_to_config()
    pipe.vae, pipe.patchifier = Ratios(), SymmetricPatchifier(patch_size=1)
    pipe.text_encoder = pipe.tokenizer = None
    pipe.video_scale_factor, pipe.vae_scale_factor, pipe.allowed_inference_steps = 8, 32, None
    return pipe


def main() -> None:
    """Run every case by the publisher's loop."""
    from ltx_video.pipelines import pipeline_ltx_video as upstream
    from ltx_video.schedulers.rf import RectifiedFlowScheduler
    from ltx_video.utils.skip_layer_strategy import SkipLayerStrategy

    folder = tiny.build("ltx", Path("/tmp/ltx_reference"))
    pipe, found = pipeline_of(), {}
    schedulers = {
        "linear-quadratic": RectifiedFlowScheduler(sampler="LinearQuadratic"),
        "shifted": RectifiedFlowScheduler(sampler="Uniform", shifting="SD3", target_shift_terminal=0.1),
    }

    def noise(shape: tuple[int, ...], generator: torch.Generator, **_: Any) -> torch.Tensor:
        frames, rows, columns = ltx_runs.GRID
        drawn = torch.randn(1, shape[2], frames, rows, columns, generator=generator)
        return drawn.flatten(2).transpose(1, 2)

    def noise_like(generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for name, case in ltx_runs.CASES.items():
        generator = torch.Generator().manual_seed(ltx_runs.SEED)
        pipe.scheduler = schedulers[case.schedule]
        pipe.transformer = transformer_of(folder / "transformer", case.schedule != "shifted")
        text = ltx_runs.text()
        arguments = {
            "stg_scale": [step.stg for step in case.guidance],
            "guidance_scale": [step.cfg for step in case.guidance],
            "rescaling_scale": [step.rescale or 1.0 for step in case.guidance],
            "skip_block_list": [list(step.blocks) for step in case.guidance],
            "guidance_timesteps": [step.level for step in case.guidance],
            "num_inference_steps": case.steps,
            "timesteps": None if case.timesteps is None else list(case.timesteps),
            "skip_initial_inference_steps": case.skip_first,
            "skip_final_inference_steps": case.skip_last,
            "cfg_star_rescale": case.star,
            "stochastic_sampling": case.stochastic,
        }
        with (
            mock.patch.object(upstream, "randn_tensor", noise),
            mock.patch.object(torch, "randn_like", partial(noise_like, generator)),
            mock.patch.object(type(pipe), "_execution_device", torch.device("cpu")),
            mock.patch.object(pipe, "progress_bar", mock.MagicMock(), create=True),
            mock.patch.object(pipe, "maybe_free_model_hooks", lambda: None, create=True),
            mock.patch.object(pipe, "prepare_extra_step_kwargs", lambda *_: {}),
        ):
            found[name] = pipe(
                height=ltx_runs.SIDE,
                width=ltx_runs.SIDE,
                num_frames=ltx_runs.FRAMES,
                frame_rate=ltx_runs.FPS,
                negative_prompt=None,
                prompt_embeds=text["prompt_embeds"][1:],
                prompt_attention_mask=text["prompt_attention_mask"][1:],
                negative_prompt_embeds=text["prompt_embeds"][:1],
                negative_prompt_attention_mask=text["prompt_attention_mask"][:1],
                generator=generator,
                latents=ltx_runs.start() if case.skip_first or (case.timesteps or (1.0,))[0] < 1.0 else None,
                skip_layer_strategy=SkipLayerStrategy.AttentionValues,
                output_type="latent",
                is_video=True,
                vae_per_channel_normalize=True,
                **arguments,
            ).images
    low, high = ltx_runs.start(), ltx_runs.upscaled()
    found["adain"] = upstream.adain_filter_latent(latents=high, reference_latents=low)
    found["tone_map"] = upstream.LTXVideoPipeline.tone_map_latents(high, 0.6)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    about = loops.Loop("Lightricks/LTX-Video", "5260738", "Apache-2.0", main).about("ltx_reference.py CLONE")
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, OUT, metadata=about)


if __name__ == "__main__":
    main()
