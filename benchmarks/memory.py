"""Bytes that runs need and move on the simulated device, and the forecast of published models on cards.

`memory`: runs by family and offload mode; `memory_peers`: the same LTX-Video run with diffusers' own offload;
`memory_decode`: methods of decode. `memory_host`: the run twice inside a real ComfyUI (COMFYUI_PATH, else
~/comfy/ComfyUI), ours under its memory manager at shares of the full offloader, whole parts moved by hand as other
packs do it, and diffusers' own offload. `fits`: which published model fits which card, by the forecast alone, of files
of the published shapes without weights; the README's table. `gains`: minutes of these on three cards by their data
sheets, as `field` compares them with published runs: eager, with fused kernels, and with each change that is advised.

`memory_fits`: the factors of the forecasts. Every family runs at sizes that no test uses; each row has the terms that
`pipelines/sizes.py` counts copies of. The copies that fit the last rows of each family best are written into its
`spec.py`, so nobody copies a number; with no family they are fitted to the rows at hand.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import published
import torch
from anygpu.compat.device.facts import GIBIBYTE, DeviceFacts, free_bytes
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.transforms.attention import Attention
from anygpu.kernels.library import TRITON
from anygpu.pipelines import sizes, stages
from anygpu.pipelines.base import FramePackSettings, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.forecast.memory import forecast, forecasts
from anygpu.pipelines.forecast.savings import savings
from anygpu.pipelines.forecast.seconds import planned_run, quickest
from anygpu.pipelines.forecast.times import time_forecast, times_of
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.vae.plan import DecodeRequest
from runner import SCRATCH, Row, data, known_rows
from simulated import accelerator, fitting, peers
from times import latents_for, opened, sampled_latents

FORMS = [DecodeRequest(**given) for given in data("decode_forms")]
BARE = {  # the run of `fitting.run` through diffusers
    "prompt": "a red fox", "negative_prompt": "blurry", "width": 64, "height": 64, "num_frames": 9,
    "num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt",
}  # fmt: skip
CARDS = (6, 8, 12, 16, 24)
NAMED = {  # back end, architecture, class, torch's fused kernel of attention, GB
    "NVIDIA GeForce RTX 2060": ("cuda", "sm75", "cuda-old", "memory-efficient", 6),
    "NVIDIA GeForce RTX 3060": ("cuda", "sm86", "cuda-sm80+", "flash", 12),
    "AMD Radeon RX 6800": ("rocm", "gfx1030", "rocm", "", 16),
}
SHARES = (1.0, 0.6, 0.4, 0.25, 0.15)  # of the full offloader, inside ComfyUI
RUNS = {name: Size(**given) for name, given in data("runs").items()}  # the sizes of the shipped workflows


def mode_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per family and mode: measured and forecast peak, and what moved."""
    for family in families:
        for mode in MODES:
            with accelerator.fresh() as device:
                pipeline = fitting.heavy(family, SCRATCH, device, mode)
                fitting.run(pipeline)
                cost, memory_stats = fitting.peak(pipeline), pipeline.offloader.memory_stats
                predicted = forecast(pipeline, fitting.size_of(family), room=free_bytes(device)).peak
                seconds = sum(stage.seconds for stage in memory_stats.stages)
                yield {
                    "family": family, "mode": mode,
                    "weights_bytes": sum(part.total for part in pipeline.weights.values()), "peak_bytes": cost,
                    "forecast_bytes": predicted, "forecast_ratio": round(predicted / cost, 3),
                    "moved_bytes": memory_stats.moved_bytes, "to_host_bytes": accelerator.traffic().to_host_bytes,
                    "time_ratio": round(seconds / max(seconds - memory_stats.moving_seconds, 1e-9), 3),
                }  # fmt: skip
                fitting.forget(pipeline)


def peer_rows() -> Iterator[Row]:
    """A row per way of diffusers and of ours to offload the LTX-Video run."""
    from diffusers import LTXPipeline
    from heavy import build_heavy

    def row(way: str, run: Callable[[], int]) -> Row:
        before = accelerator.traffic()
        peak, after = run(), accelerator.traffic()
        moved = {f"{name}_bytes": getattr(after, f"{name}_bytes") - getattr(before, f"{name}_bytes")
                 for name in ("to_device", "to_host")}  # fmt: skip
        return {"way": way, "peak_bytes": peak, **moved}

    for mode in ("none", "model", "group", "sequential"):
        with accelerator.fresh() as device:
            pipe = LTXPipeline.from_pretrained(build_heavy("ltx", SCRATCH), local_files_only=True)
            pipe.set_progress_bar_config(disable=True)
            accelerator.reset_peak()

            def bare(pipe: Any = pipe, mode: str = mode, device: torch.device = device) -> int:
                peers.offloaded(pipe, mode, device)
                with torch.no_grad():
                    pipe(**BARE, generator=torch.Generator().manual_seed(3))
                return int(accelerator.memory().peak_bytes)

            yield row(f"bare diffusers, {mode}", bare)
            del pipe, bare
    for mode in MODES:
        with accelerator.fresh() as device:
            pipeline = fitting.heavy("ltx", SCRATCH, device, mode)
            yield row(f"AnyGPU, {mode}", lambda pipeline=pipeline: fitting.run(pipeline) and fitting.peak(pipeline))
            fitting.forget(pipeline)


def decode_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per family and method of decode: its peak, and the largest difference to the whole, of 255."""
    for family in families:
        with accelerator.fresh() as device:
            pipeline = opened(family, precision="fp32", offload="model", device=device)
            latents, whole = latents_for(pipeline, Size(128, 128, 3 * pipeline.spec.sizes.ratios[1] + 1), 1), None
            for form in FORMS:
                if form.method == "chunked" and family not in ("mochi", "hunyuan_video_15"):
                    continue
                accelerator.reset_peak()
                with torch.no_grad():
                    frames = stages.decode(pipeline, latents, Silent(), form=form)
                whole = frames if whole is None else whole
                yield {
                    "family": family,
                    "method": form.method,
                    "tile": form.tile,
                    "peak_bytes": accelerator.memory().peak_bytes,
                    "difference_of_255": round(float((frames - whole).abs().max()) * 255, 4),
                }


def host_rows() -> Iterator[Row]:
    """A row per way to share a device with ComfyUI, played by a scene of tests/host/inside."""
    from host.inside.asking import Inside

    from host.server import environment, find_host

    worker = Inside(find_host(), SCRATCH, environment())
    try:
        if worker.reason:
            raise SystemExit(worker.reason)
        result = worker.play("ways", "compared", shares=list(SHARES))
    finally:
        worker.close()
    known = {"torch": result["torch"], "comfyui": result["comfyui"], "full_residency_bytes": result["full"]}
    yield from (known | row for row in result["rows"])


def fit_rows() -> Iterator[Row]:
    """A row per published model and card."""
    with published.large_host(), tempfile.TemporaryDirectory() as folder:
        for model, size in RUNS.items():
            pipeline = published.on_card(published.composed(model, Path(folder)))
            for card in CARDS:
                room = published.room_of(card)
                best = next((each for each in forecasts(pipeline, size, room) if each.fits(room)), None)
                stages_by_name = {} if best is None else {stage.name: stage for stage in best.stages}
                yield {
                    "model": model, "width": size.width, "height": size.height, "frames": size.frames,
                    "card_gb": card, "offload": "too much" if best is None else best.mode,
                    "peak_gib": "" if best is None else f"{best.peak / 2**30:.1f}",
                    "decode": stages_by_name["decoding"].form or "whole" if best else "",
                }  # fmt: skip


def named_card(model: str, folder: Path, card: str) -> Pipeline:
    """A published model as it is loaded on a card of this name, without fused kernels."""
    backend, arch, arch_class, kernel, gigabytes = NAMED[card]
    facts = DeviceFacts(torch.device("cpu"), backend, arch, arch_class, card, gigabytes * GIBIBYTE, torch.__version__)
    pipeline = published.on_card(published.composed(model, folder, device=facts))
    speed = replace(pipeline.plan.speed, forms={}, attention=replace(pipeline.plan.speed.attention, kernel=kernel))
    facts = replace(facts, device=torch.device("cuda"))  # to which weights are copied
    device, plan = replace(pipeline.device, facts=facts), replace(pipeline.plan, speed=speed)
    return replace(pipeline, device=device, plan=plan)


def gain_rows() -> Iterator[Row]:
    """A row per published model and card: its offload, and minutes before and after each change, one on the other."""
    with published.large_host(), tempfile.TemporaryDirectory() as folder:
        for (model, size), card in product(RUNS.items(), NAMED):
            pipeline, room = named_card(model, Path(folder), card), published.room_of(NAMED[card][-1])
            run = planned_run(pipeline, size)
            speed = replace(pipeline.plan.speed, forms=dict.fromkeys(("transformer", "vae"), TRITON))
            fused = replace(pipeline, plan=replace(pipeline.plan, speed=speed))
            modes = [each.mode for each in forecasts(fused, size, room) if each.fits(room)]
            mode = quickest(modes, times_of(fused, run, modes, room))
            row = {"model": model, "steps": run.settings.steps, "card": card, "offload": mode or "too much"}
            if not mode:
                yield row | {"eager": "", "kernels": "", "changes": ""}
                continue
            eager, now = (time_forecast(each, run, mode, room).seconds for each in (pipeline, fused))
            row |= {"eager": f"{eager / 60:.1f}", "kernels": f"{now / 60:.1f}"}
            changes = [f"{(now := now - one.seconds) / 60:.1f} {one.change}" for one in savings(fused, run, mode, room)]
            yield row | {"changes": "; ".join(changes)}


SIZES = data("fit_sizes")  # width, height, frames: none of them is a test's
SAME_VAE = {"framepack": "hunyuan_video"}  # whose frames are those of sections: the other family's decode tells more
FITTED = (DecodeRequest("full"), DecodeRequest("streaming", tile=16), DecodeRequest("chunked", frames=1))
PROMPTS = ("a fox", "a red fox in the snow, seen from the side, slow camera, morning light")
ORDER = ("tokens", "latents", "pixels", "plain", "text", "streamed", "chunked", "attending")
PLAIN = {"ltx": 3.95, "hunyuan_video": 3.35}  # channels per pixel that do not grow with the decoder's
# width: its picture and what is made of it; all decoders at hand have one width, which cannot tell them apart
LINE = 120  # columns
FIT = re.compile(r"FIT = family.FitFactors\([^)]*\)")  # of a `spec.py`


def term_rows(families: tuple[str, ...]) -> Iterator[Row]:
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
    sections, picture = FramePackSettings(size.frames / 30, window=size.window), (size.height, size.width)
    request, alive = PromptRequest(words, "blurry"), list[int]()
    call = Attention.__call__

    def seen(attention: Attention, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = call(attention, query, *rest)
        alive.append(accelerator.memory().allocated_bytes)
        return result

    with torch.no_grad():
        with patch.object(Attention, "__call__", seen):
            prompt, latents = sampled_latents(pipeline, request, settings, sections, picture)
        for form in FITTED if pipeline.family not in SAME_VAE else ():
            if form.method != "chunked" or pipeline.spec.rewrites.causal_decoder:
                stages.decode(pipeline, latents, Silent(), form=form)
    costs = [(cost.stage, cost.peak_bytes) for cost in pipeline.offloader.memory_stats.stages if cost.stage != "image"]
    size = replace(size, text=sizes.size_of(settings, prompt).text)
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
    found = [
        (stage, peak - pipeline.weights[part].total, first, second)
        for (stage, part, (first, second)), (_, peak) in zip(terms, costs, strict=False)
    ]
    peak = next(measured for stage, measured, *_ in found if stage == "sampling")
    found.append(("attending", max(alive) - pipeline.weights["transformer"].total, peak, 0))
    return [
        {
            "stage": stage,
            **asked,
            "text_tokens": size.text,
            "measured_bytes": measured,
            "first_term_bytes": int(first),
            "second_term_bytes": int(second),
        }
        for stage, measured, first, second in found
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
        elif stage in ("text", "attending"):
            mine[stage] = _one(values)
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
    line = f"FIT = family.FitFactors({factors})"
    return FIT.sub(line if len(line) <= LINE else f"FIT = family.FitFactors(\n    {factors}\n)", spec)


def last_rows() -> list[dict[str, str]]:
    """The rows of each family's last run: the newest for each of its sizes."""
    names = ("family", "stage", "width", "height", "frames", "guided")
    return list({tuple(row[name] for name in names): row for row in known_rows("memory_fits")}.values())


def write_specs(_rows: list[Row]) -> None:
    """Write the factors into each `spec.py`."""
    for family, mine in factors(last_rows()).items():
        spec = FAMILIES[family].folder / "spec.py"
        spec.write_text(written(spec.read_text(encoding="utf-8"), mine), encoding="utf-8")
