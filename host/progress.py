"""ComfyUI's progress bar, previews, cancel and node text, as the plain callbacks that the layers below call."""

from __future__ import annotations

import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.utils
import torch
from server import PromptServer

from ..compat.decision import CHOSEN, Decision
from ..compat.device.execution import to_host
from ..compat.errors import InputError
from ..compat.memory.parts import PACED
from ..compat.memory.statistics import TimeLeft
from ..pipelines.base import Preview, ProgressStage
from ..pipelines.latents import recovery
from ..pipelines.latents.recovery import Sampled
from ..pipelines.latents.steps import SavedSteps
from ..pipelines.sampling.resume import painting_steps
from .families import latent_format_of
from .folders import saved_folder, unfinished_folder
from .preview import preview_method, previewer_for, rough_previewer
from .server import paused
from .server.panel import NodeRun, memory_now, on_canvas, stop, window

if TYPE_CHECKING:  # painting is read when it is used, not at ComfyUI's start
    from ..paint.sampling.painting import Painted

log = logging.getLogger(__name__)
TEXT_SECONDS = 0.25
EVENT = "anygpu.run"
BREAK = "  \n"  # a line break on the canvas, and in Nodes 2.0, which takes the text for Markdown
# Look-alikes for names from files: older canvases read HTML, Nodes 2.0 reads Markdown, newer frontends show entities.
LIKE = str.maketrans("&<>[]*`~|\\", "＆‹›()∗'∼¦/")
KINDS: dict[str, Any] = {"STRING": str, "COMBO": str, "LATENT": dict, "CONDITIONING": list}  # by kind of input
KINDS |= dict.fromkeys(("INT", "FLOAT", "BOOLEAN"), Real) | dict.fromkeys(("IMAGE", "MASK", "SIGMAS"), torch.Tensor)
PLAIN = (Real, str, torch.Tensor, dict, list)  # values that no input of another kind takes
PREVIEW_SIZE = 768  # pixels of the longer side, to which ComfyUI enlarges or shrinks a picture


class Paused(comfy.model_management.InterruptProcessingException):
    """Raised to end a prompt that pauses; ComfyUI takes it for a cancel."""


def send(node_id: str, text: str, entry: dict[str, Any]) -> None:
    """Show ``text`` and the node's record in the window that queued the prompt, if there is one."""
    client = window()
    if client is None:
        return
    server, node_id = PromptServer.instance, on_canvas(node_id)
    prompt = getattr(server, "last_prompt_id", "")  # of the running one; web/runs.js needs its event before the text
    server.send_sync(EVENT, {"prompt_id": prompt, "node": node_id, "entry": entry, "memory": memory_now()}, client)
    server.send_progress_text(text.replace("->", "→").translate(LIKE).replace("\n", BREAK), node_id, sid=client)


def with_an_end(node: Any, kinds: Mapping[str, str]) -> Any:
    """The class ``node`` with an execute that ends text and record of a run also at a cancel or failure. InputError for
    NaN, and for values of other ``kinds`` (by input), which ComfyUI lets through from nodes such as Switch."""
    run = node.execute.__func__

    @functools.wraps(run)
    def execute(cls: Any, *arguments: Any, **inputs: Any) -> Any:
        try:
            for name, value in inputs.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise InputError(f"{name} {value}", expected="a finite number", fix=f"Set {name} to a number.")
                if value is not None and not any(_is_a(kind, value) for kind in kinds.get(name, "").split(",")):
                    found, fix = f"{name} of type {type(value).__name__}", "Connect another output."
                    raise InputError(found, expected=kinds.get(name, "nothing"), fix=fix)
            return run(cls, *arguments, **inputs)
        except BaseException as error:  # a cancel is not an Exception
            cancelled = isinstance(error, comfy.model_management.InterruptProcessingException)
            how = "paused" if isinstance(error, Paused) else "cancelled" if cancelled else "stopped by an error"
            entry = stop(cls.hidden.unique_id, how)
            if entry is not None:
                send(cls.hidden.unique_id, "\n".join([entry["status"], *entry["said"]]), entry)
            raise

    node.execute = classmethod(execute)
    return node


def _is_a(kind: str, value: Any) -> bool:
    """True if ``value`` may go into an input of ``kind``; a kind of our own takes all but plain values."""
    return isinstance(value, KINDS[kind]) if kind in KINDS else not isinstance(value, PLAIN)


class NodeProgress:
    """One node's progress in one run: bar, text, previews by the latent format of ``family``, cancel and pause."""

    def __init__(self, node_id: str | None, family: str | None = None) -> None:
        self.node_id, self.family = node_id, family
        self._run = NodeRun(node_id)
        self.lines: list[str] = self._run.entry["said"]
        self._bar: Any = None
        self._stage, self._sent_at = "", 0.0
        self.time_left: dict[str, TimeLeft] = {}  # by stage
        self._pace = ""  # such as ``4.1 s per step``

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        """Show that ``done`` of ``total`` steps have ended; raises at a cancel, or Paused once a pause is saved."""
        self.check()
        name, text = stage.name, str(stage)
        self._run.step(name)
        if self._bar is None or name != self._stage:
            self._bar, self._stage = comfy.utils.ProgressBar(total, node_id=self.node_id), name
            if stage.resumable or name in PACED:
                paused.forget_resumed()
        left = "" if stage.counted and name not in PACED else self._time_left(name, done, total)
        now = text if stage.counted else f"{text} {done}/{total}"
        self._run.at(now, left)
        picture = None if preview is None or window() is None else self._picture(preview)
        self._bar.update_absolute(done, total, picture)
        self._send_throttled(now + left)
        if stage.resumable and (run := paused.wanted_run()):
            rough = rough_previewer(latent_format_of(self.family))  # ComfyUI's previews are off by default
            if paused.save(run, now, picture or (preview and self._picture(preview, rough))):
                raise Paused

    def _time_left(self, name: str, done: int, total: int) -> str:
        """The time left in words, by stage, as others may report between its steps; notes its pace for the end."""
        left, now = self.time_left.setdefault(name, TimeLeft()), time.monotonic()
        text, (began, first) = left.after(now, done, total), left.began
        if name in PACED:
            self._pace = f"{(now - began) / (done - first):.2g} s per step" if done > first else ""
        return text

    def check(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def notify(self, text: str) -> None:
        if text not in self.lines:
            self.lines.append(text)
            log.info("AnyGPU: %s", text)

    def show(self) -> None:
        """Show the lines of a node that has ended."""
        self._run.entry["done"] = True
        self._send("\n".join(self.lines))

    def chosen(self, status: str, decisions: Sequence[Decision], only: str = "") -> None:
        """Finish with ``status`` and brief decisions: those that are not off, or of the subject ``only``, and all that
        the user chose or that alarm. The log has each in full."""
        for decision in decisions:
            log.info("AnyGPU: %s", decision)
        usual = {only} if only else {each.subject for each in decisions if each.verdict != "off"}
        shown = (each for each in decisions if each.subject in usual or each.source == CHOSEN or each.alarming)
        self.finish("\n".join((status, *(decision.brief for decision in shown))))

    def drawn(self, text: str) -> None:
        """:meth:`notify` ``text``: what a demo model draws instead of what was asked, which App mode lists, too."""
        if text not in self.lines:
            self._run.entry["demo"].append(text)
        self.notify(text)

    def finish(self, status: str, *more: str) -> None:
        """End the run with a text that stays under the node: status, ``more`` of it and the pace, then the lines."""
        status = "; ".join(filter(None, (status, *more, self._pace)))
        self._run.finish(status)
        self._send("\n".join([status, *self.lines]))

    def _send_throttled(self, text: str) -> None:
        now = time.monotonic()
        if now - self._sent_at >= TEXT_SECONDS:
            self._sent_at = now
            self._send("\n".join([text, *self.lines]))

    def _send(self, text: str) -> None:
        if self.node_id is not None:
            send(self.node_id, text, dict(self._run.entry))

    @functools.cached_property
    def _previewer(self) -> Any:
        return previewer_for(self.family)

    def _picture(self, preview: Preview, previewer: Any = None) -> Any:
        """The preview as (format, PIL image, longest side); None where previews are off or have other channels."""
        previewer = previewer or self._previewer
        if previewer is None:
            return None
        estimate = preview()
        factors = getattr(previewer, "latent_rgb_factors", None)  # (3, C)
        if factors is not None and estimate.shape[1] != factors.shape[1]:
            return None
        return previewer.decode_latent_to_preview_image("JPEG", to_host(estimate))


class PaintProgress(NodeProgress):
    """A node's progress whose previews (V, H, W, 3) in 0..1 are shown side by side."""

    def _picture(self, preview: Callable[[], torch.Tensor], previewer: Any = None) -> Any:
        from PIL import Image

        views = list(preview()) if preview_method() != "none" else []
        if not views:
            return None
        row = to_host(torch.cat(views, dim=1).clamp(0, 1).mul(255).to(torch.uint8)).numpy()
        return "JPEG", Image.fromarray(row), PREVIEW_SIZE

    def saved_steps(self, pipeline: Any, *decided: Any) -> Any:
        """The store of a painting's steps, to go on after a stop as a video does; None without weights in a file."""
        return painting_steps(SavedSteps(unfinished_folder(), self.notify), self, pipeline, *decided)

    def sampled(self, latents: torch.Tensor, family: str, seed: int, latent_format: str) -> None:
        """Save what was sampled, (B, 4, h, w), before it is decoded; ``latent_format`` names core's class."""
        height, width = (side * 8 for side in latents.shape[-2:])  # pixels of Stable Diffusion's VAE
        record = Sampled([latents], family, seed, len(latents), height=height, width=width, latent_format=latent_format)
        recovery.save_plain_recovery(saved_folder(), record, self.notify)


def saved_views(painted: Painted) -> AbstractContextManager[None]:
    """Keep painted views as files in the state folder until the block, which bakes them, has succeeded."""
    from ..paint import texturing

    folder = saved_folder() / f"views-{uuid.uuid4().hex[:8]}"
    return texturing.saved_views(painted, folder, folder.relative_to(saved_folder().parent.parent).as_posix())
