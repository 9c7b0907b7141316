"""One training: resumable, with fixed seeds, its loss kept as a table and as a picture."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
STATES = HERE.parent / ".build" / "training"
EVERY = 25  # steps between two rows of the table


def train(
    name: str,
    modules: dict[str, nn.Module],
    loss_of: Callable[[int, torch.Generator], torch.Tensor],
    *,
    steps: int,
    rate: float,
    save_every: int = 200,
    falling: float = 0.25,
) -> None:
    """Minimise ``loss_of(step, generator)``; goes on from the last saved step.

    Args:
        modules: what is trained, by name.
        rate: the learning rate, after a warm-up and before the last steps, in which it falls to zero.
        falling: the share of those last steps.
    """
    STATES.mkdir(parents=True, exist_ok=True)
    state, table = STATES / f"{name}.pt", HERE / "curves" / f"{name}.csv"
    table.parent.mkdir(exist_ok=True)
    weights = [weight for module in modules.values() for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=1e-3)
    first, rows = 0, []
    if state.exists():
        saved = torch.load(state)
        for key, module in modules.items():
            module.load_state_dict(saved["modules"][key])
        optimizer.load_state_dict(saved["optimizer"])
        first, rows = saved["step"], saved["rows"]
    began, total = time.monotonic(), 0.0
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100, (steps - step) / (falling * steps))
        loss = loss_of(step, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        total += float(loss.detach())
        if (step + 1) % EVERY == 0:
            rows.append((step + 1, round(total / EVERY, 6)))
            seconds = (time.monotonic() - began) / (step + 1 - first)
            print(f"{name} {step + 1}/{steps}: {rows[-1][1]}, {seconds:.2f} s a step", flush=True)
            total = 0.0
        if (step + 1) % save_every == 0 or step + 1 == steps:
            held = {key: module.state_dict() for key, module in modules.items()}
            torch.save(
                {"modules": held, "optimizer": optimizer.state_dict(), "step": step + 1, "rows": rows},
                state.with_suffix(".new"),
            )
            state.with_suffix(".new").replace(state)
            with table.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([("step", "loss"), *rows])
            draw_curve(rows, table.with_suffix(".png"))


def saved(name: str) -> dict[str, Any]:
    """The weights of each module of a training, as last saved."""
    return torch.load(STATES / f"{name}.pt")["modules"]


def with_weights(modules: dict[str, nn.Module], name: str) -> dict[str, nn.Module]:
    """``modules`` with the weights that a training of this name last saved."""
    for key, weights in saved(name).items():
        modules[key].load_state_dict(weights)
    return modules


def draw_curve(rows: list[tuple[int, float]], path: Path) -> None:
    """The loss over the steps as a picture, on a logarithmic scale."""
    from PIL import Image, ImageDraw

    width, height, left, below = 640, 320, 60, 30
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    last, logs = rows[-1][0], [math.log10(max(loss, 1e-9)) for _, loss in rows]
    low, high = math.floor(min(logs) * 4) / 4, math.ceil(max(logs) * 4) / 4 + 1e-9

    def place(step: float, log: float) -> tuple[float, float]:
        across = left + (width - left - 15) * step / last
        return across, 10 + (height - 10 - below) * (high - log) / (high - low)

    for quarter in range(round(low * 4), round(high * 4) + 1):
        across, down = place(0, quarter / 4)
        pen.line([(left, down), (width - 15, down)], fill="#dddddd")
        pen.text((6, down - 6), f"{10 ** (quarter / 4):.2g}", fill="#555555")
    for part in range(5):
        across, _ = place(last * part / 4, low)
        pen.text((across - 12, height - below + 8), f"{last * part // 4}", fill="#555555")
    pen.line([place(step, log) for (step, _), log in zip(rows, logs, strict=True)], fill="#2060c0", width=2)
    picture.save(path)
