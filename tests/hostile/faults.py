"""How a function of the outside is made to misbehave, for shipped files alone; and what runs beside it."""

import copy
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anygpu

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ROOTS = (f"{ROOT}/", f"{Path(anygpu.__file__).parent}/")  # as it is, and by the link through which it is imported
BESIDE = tuple(f"{root}{name}/" for root in ROOTS for name in ("tests", ".venv"))
ABSENT = object()
LIES = (0, -1, 1 << 62, None, "much", (), (0, 0), (-1, 5), {}, [], 1.5)


def is_ours(depth: int = 2) -> bool:
    """Whether a shipped file asks: what torch or diffusers ask themselves is theirs to survive."""
    place = sys._getframe(depth).f_code.co_filename
    return place.startswith(ROOTS) and not place.startswith(BESIDE)


def misbehaving(original: Any, behaviour: Any, count: list[int]) -> Callable[..., Any]:
    """A function that does so when a shipped file calls it."""

    @functools.wraps(original, updated=())
    def ask(*args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return original(*args, **kwargs)
        count[0] += 1
        if isinstance(behaviour, BaseException):
            raise copy.copy(behaviour)  # one that lives on would keep the frames it passed, and their tensors
        return behaviour

    return ask


def clip(folder: Path, device: Any, state: Path | None) -> tuple[Any, Any]:
    """Latents and frames of one short run, with its memory plan before it; ours is imported when it is called.

    Args:
        state: where what is kept goes, latents and unfinished steps too.
    """
    import tiny
    import torch
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.forecast.page import memory_plan
    from anygpu.pipelines.latents import recovery
    from anygpu.pipelines.latents.steps import SavedSteps
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest
    from anygpu.pipelines.sizes import Size

    pipeline = load(LoadRequest(tiny.build("ltx", folder), precision="fp32", device=device, state=state))
    assert memory_plan(pipeline, Size(64, 64, 9))
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", ""), Silent())
        steps = None if state is None else SavedSteps(state / "kept" / "steps", str, share=math.inf)
        latents = stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2, seed=3), Silent(), steps)
        if state is not None:
            recovery.save(state / "kept", latents, str)
        return latents.samples, stages.decode(pipeline, latents, Silent())
