"""Scenes that hold the places of an IC-LoRA's control clip against core's own node."""

import torch
from anygpu.pipelines.base import ImageCondition, SampleSettings
from anygpu.pipelines.families.ltx import conditions
from comfy_extras.nodes_lt import LTXVAddGuide

FPS, RATIOS = 25.0, (8, 32, 32)


def against_core() -> dict[str, float]:
    """The largest difference of a token's place from core's, in pixels and frames, by what is compared."""
    moments, found = torch.randn(1, 256, 3, 2, 4), {}
    statistics = {conditions.MEAN: torch.zeros(128), conditions.STD: torch.ones(128)}
    video = conditions.VideoInput(SampleSettings(128, 64, 17, fps=FPS), torch.device("cpu"), None, 1.0)
    empty = torch.zeros(1, 0, 128)
    start = conditions.InitialTokens(empty, empty, {"video_coords": torch.zeros(1, 3, 0)})
    for pictured in (False, True):
        ours = conditions.with_controls(
            video,
            ImageCondition("ltx", statistics, 128, 64),
            start,
            [conditions.Keyframe(moments, 0, 1.0, controls=True)],
            pictured=pictured,
            generator=torch.Generator(),
        )
        (given,) = LTXVAddGuide.add_keyframe_index([[torch.zeros(1), {}]], 0, moments[:, :128], RATIOS)
        core = given[1]["keyframe_idxs"][..., 0].float()[:, :, 8 * pictured :]
        places = ours.place["video_coords"] * torch.tensor([FPS, 1.0, 1.0]).view(1, 3, 1)
        found[f"places, pictured {pictured}"] = float((places - core).abs().max())
        latents = moments[:, :128, pictured:].flatten(2).transpose(1, 2)
        found[f"tokens, pictured {pictured}"] = float((ours.tokens - latents).abs().max())
        assert ours.shares is not None and not ours.shares.any() and core.shape[2] == ours.tokens.shape[1]
    return found
