"""The sections of a FramePack video: where each one is, what it sees of the others, how their frames are joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....compat.checkpoints.latents import dtype_name
from ....compat.device.execution import to_host
from ....compat.errors import InputError, require_choice, require_range
from ...base import MASK, SECTION_ORDERS, VISION, FramePackSettings, ImageCondition, PromptRequest
from ...latents.musubi import sized
from ...vae.fallback import unsigned
from .spec import F1, TEMPORAL_RATIO

INVERTED, VANILLA = SECTION_ORDERS
ORDERS = ("auto", *SECTION_ORDERS)
HISTORY = (1, 2, 16)  # latent frames that a section sees at full, half and quarter scale, the nearest first
LARGEST_WINDOW, ADVICE = 33, "; the models were trained with 9"  # of the slider in lllyasviel's own application
CLIP_NEAREST = 4  # latent frames of a clip that a section sees at full scale: 5 cleaned frames, as the fork counts
TIMED = re.compile(r"\[(\d{1,6}(?:\.\d{1,6})?)s(?:-(\d{1,6}(?:\.\d{1,6})?)s)?\s*:([^\]]*)\]")
NUMBERED, NEXT = re.compile(r"\s*(-?\d{1,3})(?:-(-?\d{1,3}))?\s*:(.*)", re.DOTALL), ";;;"
SPAN = "seconds"  # tensor of a section prompt: its start and end, below 0 for the end of the film
PLACES = "places"  # the same in sections: its first and last one, below 0 counted from the end of the film
MOST_BLENDED = 10  # of that pack's slider
INDICES = {  # its names of what the transformer's arguments are called here
    "latent_indices": "indices_latents",
    "clean_latent_indices": "indices_latents_clean",
    "clean_latent_2x_indices": "indices_latents_history_2x",
    "clean_latent_4x_indices": "indices_latents_history_4x",
}
CLEAN = {"latents_clean": "latents_clean"} | {f"latents_clean_{n}x": f"latents_history_{n}x" for n in (2, 4)}


@dataclass(frozen=True, slots=True)
class Plan:
    """Division of a video into sections."""

    order: str  # ``inverted_anti_drifting`` samples the last section first, ``vanilla`` the first one
    count: int  # sections
    window: int  # latent frames per section
    single: bool = False  # one latent frame is sampled instead, the last one of the window that follows the start image
    clip: int = 0  # latent frames of the clip that the video goes on with; 0 for a start image

    @property
    def inverted(self) -> bool:
        """True if sampling goes from the end to the start."""
        return self.order == INVERTED

    @property
    def sampled(self) -> int:
        """Latent frames that one section samples."""
        return 1 if self.single else self.window

    @property
    def frames(self) -> int:
        """Pixel frames of all sections and the start image together."""
        return 1 if self.single else self.count * self.window * TEMPORAL_RATIO + 1

    def place(self, step: int) -> int:
        """The place in the film, from 0, of the section that is sampled at ``step``."""
        return self.count - 1 - step if self.inverted else step

    def context(self, step: int, ended: bool = False) -> tuple[int, int, int, int]:
        """Latent frames that a section sees: of the start, of its neighbour at full scale, at half, and at quarter.

        They differ by section with a clip alone: the last one sampled in inverted order has a start and neighbour of 1,
        an end image (``ended``) counts 1 too, and the quarter scale has no more than is known. Source: with a clip
        colinurbs/FramePack-Studio f4369da, ``video_generator.py`` and ``video_f1_generator.py``."""
        if not self.clip:
            return (1, *HISTORY)
        last = self.inverted and step == self.count - 1
        near = 1 if last else CLIP_NEAREST
        known = self.clip if last else self.clip + step * self.window
        sides = (near, 1 if ended and step == 0 else near) if self.inverted else (1, near)
        return *sides, HISTORY[1], min(HISTORY[2], known - near - HISTORY[1])

    def indices(self, step: int, ended: bool = False) -> dict[str, Tensor]:
        """Positions in time, by the transformer's argument names; the start image is always at 0.

        Source: FramePack's paper, figure 2 (c), for the inverted order; the gaps are those of the author's own code."""
        first, near, half, quarter = self.context(step, ended)
        if self.inverted:
            sizes: tuple[int, ...] = (first, self._gap(step) * self.window, self.window, near, half, quarter)
            start, _, latents, nearest, halves, quarters = torch.arange(sum(sizes)).split(sizes)
        else:
            sizes = first, quarter, half, near, self.window
            start, quarters, halves, nearest, latents = torch.arange(sum(sizes)).split(sizes)
        return {
            "indices_latents": latents[-self.sampled :],
            "indices_latents_clean": torch.cat([start, nearest]),
            "indices_latents_history_2x": halves,
            "indices_latents_history_4x": quarters,
        }

    def _gap(self, step: int) -> int:
        """Windows between the start image and the section, as the author's code counts them: with more than 4 sections
        3 for the first that is sampled, and at most 2 for later ones."""
        left = self.count - 1 - step
        return left if self.count <= 4 else min(left, 3 if step == 0 else 2)


def plan_for(variant: str, framepack: FramePackSettings, frames: int, ended: bool, start: int = 1) -> Plan:
    """The sections nearest to ``frames`` pixel frames, as many as the publisher's own application takes.

    ``variant`` decides the order ``auto``; more than one latent frame at the ``start`` are a clip that the video goes
    on with. Raises InputError for a setting out of range, or an order that cannot reach the end image of an ``ended``
    video. Source: lllyasviel/FramePack 97fe5db ``demo_gradio.py``: ``max(round(seconds * 30 / (window * 4)), 1)``."""
    window, single, order = framepack.window, framepack.single_frame, framepack.order
    require_range("window", window, 1, LARGEST_WINDOW, "latent frames", advice=ADVICE)
    require_choice("order", order, ORDERS, "Choose auto.")
    require_range("end_strength", framepack.end_strength, 0, 1)
    require_range("blend_sections", framepack.blend_sections, 0, MOST_BLENDED, "sections")
    if order == "auto":
        order = VANILLA if variant == F1 else INVERTED
    if ended and order == VANILLA:
        other = "Load the FramePack I2V checkpoint (not F1)" if variant == F1 else "Choose order auto"
        found, expected = f"an end image with the order {VANILLA}", f"the order {INVERTED}, which starts from the end"
        raise InputError(found, expected=expected, fix=f"{other}, or remove the end image.")
    count = 1 if single else max(1, round(frames / (window * TEMPORAL_RATIO)))
    return Plan(order, count, window, single=single, clip=start if start > 1 else 0)


@dataclass(slots=True)
class History:
    """The latents sampled so far, in the order of the film, and what the next section sees of them; all on the CPU."""

    plan: Plan
    start: Tensor  # latents of the start image or of a clip (1, C, T, H, W), in the transformer's space
    end: Tensor | None = None  # of the end image, in the place of what would follow the last section
    latents: Tensor = field(init=False)
    lengths: list[int] = field(default_factory=list)  # latent frames there were after each section

    def __post_init__(self) -> None:
        self.latents = self.start[:, :, :0] if self.plan.inverted else self.start

    def seen(self) -> dict[str, Tensor]:
        """Clean latents at three scales, by the transformer's argument names; zeros where there is nothing yet.

        The end image is the neighbour of the first section sampled. With a clip, the inverted order takes half and
        quarter scale from the clip's end, before the frames at full scale."""
        first, *sizes = self.plan.context(len(self.lengths), self.end is not None)
        batch, channels, _, *sides = self.start.shape
        total, (_, *far) = sum(sizes), sizes
        nothing = self.start.new_zeros((batch, channels, total, *sides))
        if self.plan.inverted:
            near, half, quarter = torch.cat([self.latents, nothing], dim=2)[:, :, :total].split(sizes, dim=2)
            if self.end is not None and not self.lengths:
                near = self.end
            if self.plan.clip:
                before = torch.cat([self.latents, self.start], dim=2)[:, :, :-first]
                quarter, half = before[:, :, -sum(far) :].split(far[::-1], dim=2)
        else:
            before = torch.cat([nothing, self.latents], dim=2)[:, :, -total:]
            quarter, half, near = before.split(sizes[::-1], dim=2)
        clean = torch.cat([self.start[:, :, -first:], near], dim=2)
        return {"latents_clean": clean, "latents_history_2x": half, "latents_history_4x": quarter}

    def add(self, latents: Tensor) -> None:
        """Add the latents (1, C, T, H, W) of the next section, in the order of sampling.

        The inverted order puts the start before the last one; single-frame mode keeps these latents alone."""
        if self.plan.single:
            self.latents = latents
        elif self.plan.inverted:
            reached = [self.start] if len(self.lengths) == self.plan.count - 1 else []
            self.latents = torch.cat([*reached, latents, self.latents], dim=2)
        else:
            self.latents = torch.cat([self.latents, latents], dim=2)
        self.lengths.append(self.latents.shape[2])


def spans(lengths: Sequence[int], window: int, inverted: bool) -> list[slice]:
    """Latent frames decoded together, in sampling order: the first section whole, later ones with what they blend into.
    ``lengths`` are the latent frames there were after each section."""
    total = lengths[-1]
    if inverted:
        later = [slice(total - after, total - before + window) for before, after in pairwise(lengths)]
        return [slice(total - lengths[0], total), *later]
    return [slice(0, lengths[0]), *(slice(before - window, after) for before, after in pairwise(lengths))]


def joined(videos: Iterable[Tensor], window: int, inverted: bool) -> Tensor:
    """Frames (F, H, W, 3) in 0..1 of sections that were decoded by :func:`spans` and overlap.

    ``videos`` are in sampling order, (1, 3, F, H, W) in -1..1, on the CPU; each is read once the one before is joined,
    and frames that no other is blended into are converted at once."""
    from diffusers import HunyuanVideoFramepackPipeline

    append = HunyuanVideoFramepackPipeline._soft_append
    overlap = (window - 1) * TEMPORAL_RATIO + 1
    done: list[Tensor] = []
    edge: Tensor | None = None
    for video in videos:
        if edge is None:
            edge = video
        elif inverted:
            done.insert(0, unsigned(edge[:, :, overlap:]))
            edge = append(None, video, edge[:, :, :overlap], overlap)
        else:
            done.append(unsigned(edge[:, :, :-overlap]))
            edge = append(None, edge[:, :, -overlap:], video, overlap)
    if edge is None:
        raise ValueError("no section was decoded")
    last = unsigned(edge)
    return torch.cat([last, *done] if inverted else [*done, last])


def training_plan(frames: int, window: int, order: str) -> tuple[Plan, int]:
    """The sections of a film of latent ``frames``, and the pixel frames left out at its end; raises for too few."""
    require_range("window", window, 1, LARGEST_WINDOW, "latent frames", advice=ADVICE)
    require_choice("order", order, SECTION_ORDERS)
    count = (frames - 1) // window
    if count < 1:
        found = f"{frames} latent frames for a section of {window}"
        expected = f"at least {window + 1}, which are {window * TEMPORAL_RATIO + 1} frames of video"
        raise InputError(found, expected=expected, fix="Use a longer video or a smaller window.")
    return Plan(order, count, window), (frames - 1 - count * window) * TEMPORAL_RATIO


def training_sections(film: Tensor, image: ImageCondition, plan: Plan) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The place in the film and the tensors of each section as its trainer caches them, in the order of sampling.

    A section is trained as it is sampled, so its clean latents and indices are those of our own sampling. ``film`` has
    latents (C, T, H, W) in the transformer's space, the first of the start image alone, which is encoded in ``image``.
    Source: kohya-ss/musubi-tuner at 30c658c, ``fpack_cache_latents.py``, ``dataset/bucket.py`` and
    ``dataset/image_video_dataset.py``."""
    history = History(plan, film[None, :, :1])
    for step in range(plan.count):
        place = plan.place(step)
        first = 1 + place * plan.window
        target, seen, indices = film[:, first : first + plan.window], history.seen(), plan.indices(step)
        size = sized(target)
        tensors = {f"latents_{size}": target}
        tensors |= {f"{theirs}_{size}": seen[ours][0] for theirs, ours in CLEAN.items()}
        tensors |= {f"{theirs}_{dtype_name(torch.int64)}": indices[ours] for theirs, ours in INDICES.items()}
        tensors[f"image_embeddings_{dtype_name(film.dtype)}"] = to_host(image.tensors[VISION][0]).to(film.dtype)
        yield place, tensors
        history.add(target[None])


def timed(text: str, sections: Sequence[str]) -> list[tuple[float, float, str]]:
    """Start and end in seconds (-1 for the film's end) and words of each ``[3s: words]`` or ``[0s-2s: words]``, by
    start; the rest of ``text`` starts at 0. Raises InputError for other section prompts beside these. Source:
    colinurbs/FramePack-Studio f4369da ``prompt_handler.py``."""
    whole = "\n".join((text, *sections))
    prompts = [(float(start), float(end or -1), words.strip()) for start, end, words in TIMED.findall(whole)]
    if prompts and (NEXT in whole or any(TIMED.sub("", line).strip() for line in sections)):
        fix = "Write each section prompt as [3s: text], or none."
        raise InputError("section prompts with and without a time", expected="one of the two", fix=fix)
    if prompts and (rest := TIMED.sub("", text).strip()):
        prompts.append((0.0, -1.0, rest))
    prompts.sort(key=lambda prompt: prompt[0])
    nexts = [*(start for start, _, _ in prompts[1:]), -1.0]  # where a prompt without an end ends
    return [(start, after if end < 0 else end, w) for (start, end, w), after in zip(prompts, nexts, strict=False)]


def by_span(request: PromptRequest) -> tuple[PromptRequest, list[dict[str, Tensor]]]:
    """``request`` with prompts by time or number as section prompts, the first as its text too, and the span of each as
    a tensor under :data:`SPAN` or :data:`PLACES`; without any, ``request`` as it is and no spans."""
    seconds = timed(request.text, request.sections)
    if not (found := seconds or numbered(request.text, request.sections)):
        return request, []
    texts = tuple(words or found[0][2] for *_, words in found)
    spans = [{SPAN if seconds else PLACES: torch.tensor([each[:2]])} for each in found]
    return replace(request, text=found[0][2], sections=texts), spans


def shown_at(spans: Sequence[Sequence[float]], plan: Plan, seconds: float, fps: float = 30.0) -> list[int]:
    """The index in ``spans`` of each section's prompt, by its place in the film; the first where none covers it. Spans
    are in seconds, rounded here to whole sections. Source: FramePack-Studio's ``worker.py``, equal to it at 30 fps."""
    size, indices = (plan.window * TEMPORAL_RATIO - 3) / fps, [0] * plan.count  # seconds of a section, as counted there
    rounded = [[round(each / size) * size for each in (start, seconds if end < 0 else end)] for start, end in spans]
    known = [(start, end if end > start else start + size, index) for index, (start, end) in enumerate(rounded)]
    if plan.inverted:  # time runs from the film's end
        known = sorted(((seconds - end, seconds - start, index) for start, end, index in known), key=lambda row: row[0])
    image = 1 if not plan.inverted and not plan.clip else 0  # latent frames of a start image before the first section
    for step in range(plan.count):
        now = max(0.01, ((step * plan.window + image) * TEMPORAL_RATIO - 3) / fps)
        indices[plan.place(step)] = next((index for start, end, index in known if start <= now < end), known[0][2])
    return indices


def numbered(text: str, sections: Sequence[str]) -> list[tuple[float, float, str]]:
    """First and last section and words of each part of ``0:words;;;-1:words;;;0-2:words``, 0 for one without a number;
    empty without ``;;;``. Source: kohya-ss/musubi-tuner 30c658c ``parse_section_strings``; there words before a colon
    are dropped."""
    if not any(NEXT in line for line in (text, *sections)):
        return []
    found: list[tuple[float, float, str]] = []
    for part in NEXT.join((text, *sections)).split(NEXT):
        known = NUMBERED.fullmatch(part)
        first, last, words = known.groups() if known else ("0", None, part)
        if words := words.strip():
            found.append((int(first), int(first if last is None else last), words))
    return found


def shown_in(places: Sequence[Sequence[float]], plan: Plan) -> list[int]:
    """The index in ``places`` of each section's prompt: by number from the end, else from the start, else
    section 0's or, if that has none, another's."""
    known = {n: index for index, (a, b) in enumerate(places) for n in range(int(a), max(int(a), int(b)) + 1)}
    usual = known[0 if 0 in known else min((n for n in known if n > 0), default=min(known))]
    return [known.get(place - plan.count, known.get(place, usual)) for place in range(plan.count)]


def shown(prompts: Sequence[Any], plan: Plan, seconds: float, fps: float) -> list[Mapping[str, Tensor]]:
    """The embeddings of each section's prompt, by its place, where ``prompts`` are by time or number; else empty."""
    spans = [to_host(each[name]).flatten().tolist() for each in prompts for name in (SPAN, PLACES) if name in each]
    if not spans:
        return []
    plain = [{name: tensor for name, tensor in each.items() if name not in (SPAN, PLACES)} for each in prompts]
    return [plain[n] for n in (shown_at(spans, plan, seconds, fps) if SPAN in prompts[0] else shown_in(spans, plan))]


def blended(texts: Sequence[Mapping[str, Tensor]], plan: Plan, fade: int) -> list[Mapping[str, Tensor]]:
    """``texts`` by place, each change of prompt faded over ``fade`` sections in the order of sampling: the first has
    1 / ``fade`` of the new embeddings. Until the last of them the old text's mask and length stay: longer ones are cut.

    Source: colinurbs/FramePack-Studio f4369da ``worker.py``, which mixes the first section alone, in the section that
    has the number of the prompt."""
    mixed: list[Any] = list(texts)
    order, old, change = [plan.place(step) for step in range(plan.count)], texts[0], -fade  # nothing to blend yet
    for step, (before, place) in enumerate(pairwise(order), 1):
        if any(not torch.equal(texts[place][name], tensor) for name, tensor in texts[before].items()):
            old, change = texts[before], step
        if (share := (step + 1 - change) / max(fade, 1)) < 1:
            mixed[place] = dict(old)
            for name, tensor in ((name, tensor) for name, tensor in old.items() if name != MASK):
                new, sides = texts[place][name], (0, 0) * (tensor.ndim - 2)
                new = torch.nn.functional.pad(new, (*sides, 0, tensor.shape[1] - new.shape[1]))  # as many tokens
                mixed[place][name] = (1 - share) * tensor + share * new
    return mixed
