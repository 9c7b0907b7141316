"""What runs need and move on the simulated device, by family and offload mode: ``python benchmarks/memory.py``.

Rows go to ``results/memory.csv`` (runs), ``results/memory_peers.csv`` and ``results/memory_decode.csv`` (forms of
decode), and the tables of `docs/memory.md` are written anew. The factors of forecasts are those of ``memory_fits.py``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from table import append, machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402
from anygpu.compat.memory.offloader import MODES  # noqa: E402
from anygpu.pipelines import stages  # noqa: E402
from anygpu.pipelines.base import Latents, Silent  # noqa: E402
from anygpu.pipelines.forecast.memory import forecast  # noqa: E402
from anygpu.pipelines.load.folder import load  # noqa: E402
from anygpu.pipelines.requests import LoadRequest  # noqa: E402
from anygpu.pipelines.vae.plan import DecodeRequest  # noqa: E402
from simulated import accelerator, fitting, peers  # noqa: E402

PAGE = ROOT / "docs" / "memory.md"
FORMS = (
    DecodeRequest("full"),
    DecodeRequest("chunked", frames=1),
    DecodeRequest("tiled", tile=64),
    DecodeRequest("streaming", tile=64),
    DecodeRequest("streaming", tile=16),
)


def runs(family: str, folder: Path) -> list[dict[str, Any]]:
    """One run per mode: measured and forecast peak, and what moved."""
    found = []
    for mode in MODES:
        with accelerator.fresh() as device:
            pipeline = fitting.heavy(family, folder, device, mode)
            fitting.run(pipeline)
            cost, memory_stats = fitting.peak(pipeline), pipeline.offloader.memory_stats
            said = forecast(pipeline, fitting.size_of(family)).peak
            weights = sum(part.total for part in pipeline.weights.values())
            seconds = sum(stage.seconds for stage in memory_stats.stages)
            found.append(
                {
                    **machine(),
                    "family": family,
                    "mode": mode,
                    "weights_bytes": weights,
                    "peak_bytes": cost,
                    "forecast_bytes": said,
                    "forecast_ratio": round(said / cost, 3),
                    "moved_bytes": memory_stats.moved_bytes,
                    "to_host_bytes": accelerator.traffic().to_host_bytes,
                    "time_ratio": round(seconds / max(seconds - memory_stats.moving_seconds, 1e-9), 3),
                }
            )
            fitting.forget(pipeline)
    return found


def bare(folder: Path) -> list[dict[str, Any]]:
    """Peers' ways on the LTX-Video run: diffusers' own offload, with its bytes moved and its peak."""
    found = []
    for mode in ("none", "model", "group", "sequential"):
        with accelerator.fresh() as device:
            pipe = _diffusers(folder)
            accelerator.reset_peak()
            before = accelerator.traffic()
            peers.offloaded(pipe, mode, device)
            with torch.no_grad():
                pipe(
                    prompt="a red fox",
                    negative_prompt="blurry",
                    width=64,
                    height=64,
                    num_frames=9,
                    num_inference_steps=2,
                    guidance_scale=2.0,
                    generator=torch.Generator().manual_seed(3),
                    output_type="pt",
                )
            traffic = accelerator.traffic()
            found.append(
                {
                    **machine(),
                    "way": f"bare diffusers, {mode}",
                    "peak_bytes": accelerator.memory().peak_bytes,
                    "to_device_bytes": traffic.to_device_bytes - before.to_device_bytes,
                    "to_host_bytes": traffic.to_host_bytes - before.to_host_bytes,
                }
            )
            del pipe
    for mode in MODES:
        with accelerator.fresh() as device:
            pipeline = fitting.heavy("ltx", folder, device, mode)
            before = accelerator.traffic()
            fitting.run(pipeline)
            traffic = accelerator.traffic()
            found.append(
                {
                    **machine(),
                    "way": f"AnyGPU, {mode}",
                    "peak_bytes": fitting.peak(pipeline),
                    "to_device_bytes": traffic.to_device_bytes - before.to_device_bytes,
                    "to_host_bytes": traffic.to_host_bytes - before.to_host_bytes,
                }
            )
            fitting.forget(pipeline)
    return found


def forms(family: str, folder: Path) -> list[dict[str, Any]]:
    """Each form of decode: its peak, and the largest difference to the whole, of 255."""
    found, whole = [], None
    with accelerator.fresh() as device:
        pipeline = load(LoadRequest(tiny.build(family, folder), precision="fp32", offload="model", device=device))
        latents = latents_for(pipeline)
        for form in FORMS:
            if form.method == "chunked" and family not in ("mochi", "hunyuan_video_15"):
                continue
            accelerator.reset_peak()
            with torch.no_grad():
                frames = stages.decode(pipeline, latents, Silent(), form=form)
            whole = frames if whole is None else whole
            found.append(
                {
                    **machine(),
                    "family": family,
                    "method": form.method,
                    "tile": form.tile,
                    "peak_bytes": accelerator.memory().peak_bytes,
                    "difference_of_255": round(float((frames - whole).abs().max()) * 255, 4),
                }
            )
    return found


def latents_for(pipeline: Any, side: int = 128, frames: int = 4) -> Latents:
    """Random latents of a square video."""
    spatial, temporal = pipeline.spec.sizes.ratios
    shape = (1, int(pipeline.configs["vae"].get("latent_channels", 16)), frames, side // spatial, side // spatial)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Latents(samples, pipeline.family, "text", (frames - 1) * temporal + 1, side, side, 24.0, 0)


def _diffusers(folder: Path) -> Any:
    from diffusers import LTXPipeline
    from heavy import build_heavy

    pipe = LTXPipeline.from_pretrained(build_heavy("ltx", folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def megabytes(count: float) -> str:
    """Bytes as MB with one decimal."""
    return f"{count / 1e6:.1f}"


def written(name: str, head: list[str], rows: list[list[str]]) -> None:
    """Put a table between its two marks on the page."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert pattern.search(text), f"no place for the table {name!r} in {PAGE.name}"
    PAGE.write_text(pattern.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text), encoding="utf-8")


def main() -> None:
    """Measure, append the rows, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".build" / "memory")
    parser.add_argument("--families", nargs="*", default=list(fitting.FAMILIES))
    parser.add_argument("--tables", nargs="*", default=["modes", "peers", "decode"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if "modes" in arguments.tables:
        measured = [row for family in arguments.families for row in runs(family, arguments.folder)]
        append("memory", measured)
        written(
            "modes",
            ["Family", "Mode", "Weights MB", "Peak MB", "Forecast MB", "Forecast / peak", "Moved MB"],
            [
                [f"`{row['family']}`", row["mode"],
                 *(megabytes(row[key]) for key in ("weights_bytes", "peak_bytes", "forecast_bytes")),
                 str(row["forecast_ratio"]), megabytes(row["moved_bytes"])]
                for row in measured
            ],
        )  # fmt: skip
    if "peers" in arguments.tables:
        ways = bare(arguments.folder)
        append("memory_peers", ways)
        written(
            "peers",
            ["Way", "Peak MB", "To the device MB", "To the host MB"],
            [
                [row["way"], *(megabytes(row[k]) for k in ("peak_bytes", "to_device_bytes", "to_host_bytes"))]
                for row in ways
            ],
        )
    if "decode" in arguments.tables:
        decoded = [
            row for family in arguments.families if family != "framepack" for row in forms(family, arguments.folder)
        ]
        append("memory_decode", decoded)
        written(
            "decode",
            ["Family", "Method", "Tile", "Peak MB", "Largest difference of 255"],
            [
                [f"`{row['family']}`", row["method"], str(row["tile"] or ""), megabytes(row["peak_bytes"]),
                 str(row["difference_of_255"])]
                for row in decoded
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()
