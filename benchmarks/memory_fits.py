"""The factors of the forecasts, measured and fitted anew.

Every family runs on the simulated device at sizes that no test uses. Each row has the terms that `pipelines/sizes.py`
counts copies of; the copies that fit the last rows of each family best are written into its `spec.py`, so nobody copies
a number. With no family they are fitted to the rows at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from anygpu.pipelines import sizes, stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.vae.plan import DecodeRequest
from runner import SCRATCH, Case, Row, known_rows
from simulated import accelerator, fitting

TABLE = "memory_fits"
SIZES: Mapping[str, tuple[tuple[int, int, int], ...]] = {  # width, height, frames: none of them is a test's
    "ltx": ((96, 64, 17), (128, 96, 25), (160, 128, 33)),
    "mochi": ((96, 64, 13), (128, 96, 19)),
    "hunyuan_video": ((96, 64, 9), (128, 96, 13), (128, 128, 21)),
    "hunyuan_video_15": ((96, 64, 9), (128, 96, 13), (128, 128, 21)),
    "framepack": ((96, 64, 5), (128, 96, 5), (128, 128, 5)),
}
SAME_VAE = {"framepack": "hunyuan_video"}  # whose frames are those of sections: the other family's decode tells more
FORMS = (DecodeRequest("full"), DecodeRequest("streaming", tile=16), DecodeRequest("chunked", frames=1))
PROMPTS = ("a fox", "a red fox in the snow, seen from the side, slow camera, morning light")
ORDER = ("tokens", "latents", "pixels", "plain", "text", "streamed", "chunked")
PLAIN = {"ltx": 3.95, "hunyuan_video": 3.35}  # channels per pixel that do not grow with the decoder's
# width: its picture and what is made of it; all decoders at hand have one width, which cannot tell them apart
FIT = re.compile(r"FIT = family.FitFactors\([^)]*\)")  # of a `spec.py`


def rows(families: tuple[str, ...]) -> Iterator[Row]:
    """Activations of each stage of a few runs, beside the terms of their formulas."""
    for family in families:
        for index, (width, height, frames) in enumerate(SIZES[family]):
            for guided, words in ((False, PROMPTS[index % 2]), (True, PROMPTS[(index + 1) % 2])):
                with accelerator.fresh() as device:
                    pipeline = fitting.heavy(family, SCRATCH, device, "model")
                    found = _stages(pipeline, Size(width, height, frames, guided, 2), words)
                    fitting.forget(pipeline)
                yield from ({"family": family, **row} for row in found)


def _stages(pipeline: Pipeline, size: Size, words: str) -> list[dict[str, Any]]:
    """The rows of one run."""
    settings = SampleSettings(size.width, size.height, size.frames, steps=2, cfg=2.0 if size.guided else 1.0)
    progress, image = Silent(), None
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest(words, "blurry"), progress)
        if pipeline.spec.recipes.sections:
            picture = torch.rand(1, size.height, size.width, 3, generator=torch.Generator().manual_seed(0))
            image = stages.encode_image(pipeline, ImageRequest(picture, size.width, size.height), "stretch", progress)
            framepack = FramePackSettings(size.frames / 30, window=size.window)
            latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress)
        else:
            latents = stages.sample(pipeline, prompt, image, settings, progress)
        for form in FORMS if pipeline.family not in SAME_VAE else ():
            if form.method != "chunked" or pipeline.spec.rewrites.causal_decoder:
                stages.decode(pipeline, latents, progress, form=form)
    costs = [(cost.stage, cost.peak_bytes) for cost in pipeline.offloader.memory_stats.stages if cost.stage != "image"]
    size = replace(size, text=sizes.tokens_in(prompt))
    wide, plain = sizes.decoding_terms(pipeline, size)
    text = max(
        (part for part in pipeline.weights if part.startswith("text_encoder")),
        key=lambda part: pipeline.weights[part].total + sizes.text_bytes(pipeline, part, sizes.PAIR),
    )
    terms = (
        ("text", text, (sizes.text_term(pipeline, text, sizes.PAIR), 0)),
        ("sampling", "transformer", sizes.sampling_terms(pipeline, size)),
        ("decoding", "vae", (wide, plain)),
        ("streaming", "vae", (sizes.streamed_term(pipeline, size, 0, 0, 16), 0)),
        ("chunked", "vae", (sizes.decoding_bytes(pipeline, size, 1), 0)),
    )
    asked = {"width": size.width, "height": size.height, "frames": size.frames, "guided": size.guided}
    return [
        {
            "stage": stage,
            **asked,
            "text_tokens": size.text,
            "measured_bytes": peak - pipeline.weights[part].total,
            "first_term_bytes": int(first),
            "second_term_bytes": int(second),
        }
        for (stage, part, (first, second)), (_, peak) in zip(terms, costs, strict=False)
    ]


def factors(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The factors of each family that fit ``rows`` best, by relative error.

    Of chunks and streamed tiles the largest, since they step in where memory is short and must not ask for too little.
    """
    by_stage: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        values = tuple(float(row[f"{name}_bytes"]) for name in ("measured", "first_term", "second_term"))
        by_stage.setdefault((row["family"], row["stage"]), []).append(values)  # type: ignore[arg-type]
    found: dict[str, dict[str, float]] = {}
    for (family, stage), values in sorted(by_stage.items()):
        mine = found.setdefault(family, {})
        if stage == "sampling":
            mine["tokens"], mine["latents"] = _two(values)
        elif stage == "text":
            mine["text"] = _one(values)
        elif stage == "decoding":
            plain = PLAIN.get(family, 0.0)
            mine["plain"] = plain
            mine["pixels"] = _one([(whole - plain * second, first, 0.0) for whole, first, second in values])
        else:
            name = "streamed" if stage == "streaming" else stage
            mine[name] = round(max(whole / first for whole, first, _ in values), 2)
    for family, other in SAME_VAE.items():
        if family in found:
            found[family] |= {name: found[other][name] for name in ("pixels", "plain", "streamed")}
    return found


def _one(values: list[tuple[float, float, float]]) -> float:
    """The factor of the first term, the least squares of relative errors."""
    shares = [first / whole for whole, first, _ in values]
    return round(sum(shares) / sum(share * share for share in shares), 2)


def _two(values: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The factors of both terms, neither below nought."""
    rows = torch.tensor([[first / whole, second / whole] for whole, first, second in values], dtype=torch.float64)
    both = torch.linalg.lstsq(rows, torch.ones(len(values), 1, dtype=torch.float64)).solution.flatten().tolist()
    if both[1] < 0 or both[0] < 0:
        return _one(values), 0.0
    return round(both[0], 2), round(both[1], 2)


def written(spec: str, mine: Mapping[str, float]) -> str:
    """The text of a family's `spec.py` with these factors."""
    factors = ", ".join(f"{name}={mine[name]}" for name in ORDER if name in mine)
    return FIT.sub(f"FIT = family.FitFactors({factors})", spec)


def last_rows() -> list[dict[str, str]]:
    """The rows of each family's last run: the newest for each of its sizes."""
    names = ("family", "stage", "width", "height", "frames", "guided")
    return list({tuple(row[name] for name in names): row for row in known_rows(TABLE)}.values())


def specs(_rows: list[Row]) -> None:
    """Write the factors into each `spec.py`."""
    for family, mine in factors(last_rows()).items():
        spec = FAMILIES[family].folder / "spec.py"
        spec.write_text(written(spec.read_text(encoding="utf-8"), mine), encoding="utf-8")


CASES = [Case("memory_fits", rows, {"families": fitting.FAMILIES}, TABLE, page=specs)]
