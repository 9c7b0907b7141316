"""Receipts: records inside videos and latents, without paths, from which they are made again on any machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.identity import content_of, picture_content, values_hash, whole_of
from ...compat.checkpoints.latents import metadata_of, record_in
from ...compat.decision import AUTO
from ...compat.device.facts import GIBIBYTE, value_or
from ...compat.errors import CheckpointError, InputError, PackError
from ...compat.records import json_in, parse, shown, versioned
from ...compat.redaction import own_names, redact
from ..base import (
    RECEIPT,
    RESOLVED,
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    PictureSource,
    Prompt,
    PromptRequest,
    SampleSettings,
)
from ..family import FITS
from ..load import lora
from ..movie import tags_of
from ..pipeline import Pipeline
from ..requests import BECAME, LoadRequest, inputs_of
from ..vae.plan import DecodeRequest
from .job import Adapter, Caching, Content, J, Job, Picture, VideoJob, decides, encoding_of, job_in, load_inputs, parsed

VERSION, HEAD = 1, "anygpu_receipt"
TAG = "anygpu"  # of a video's metadata
LATENT_FILES = (".safetensors", ".latent")
PACKAGES = ("torch", "diffusers", "transformers")
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def with_receipt(
    latents: Latents, pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings,
    framepack: FramePackSettings | None = None, video: Content | None = None,
) -> Latents:  # fmt: skip
    """``latents`` with the record of what made them; ``video``: the whole file that ``settings.latents`` come from."""
    first = None if settings.latents is None else _job_behind(settings.latents)
    missing, extra = _missing(prompt, image, settings, video, first), dict(latents.extra)
    resolved = extra.pop(RESOLVED, None)

    def job() -> VideoJob:  # record_of calls it, and catches what it raises
        own = resolved is None or isinstance(resolved, SampleSettings)  # else a file's record, or another pack's value
        known = resolved if own else parse(SampleSettings, resolved, RESOLVED, ("latents", "noise_mask"))
        return replace(_job(pipeline, prompt, image, settings, framepack), video=video, first=first, resolved=known)

    record = record_of(job, pipeline, missing, latents=latents_hash(latents))
    return replace(latents, extra={**extra, RECEIPT: record})


def record_of(job: Callable[[], Job], pipeline: Any, missing: Sequence[str], **made: Any) -> dict[str, Any]:
    """The receipt of a job that a pipeline of any kind ran, with the hashes of what was ``made``. ``missing`` names the
    inputs that no file describes; an error of ``job`` is added to them."""
    record: dict[str, Any] = {HEAD: VERSION, **made}
    try:
        record["job"] = job().record()
    except (PackError, OSError, TypeError) as error:
        missing = [*missing, f"a request that can be written down ({type(error).__name__})"]
    record |= _report_of(pipeline)
    return record | ({"missing": list(missing)} if missing else {})


def with_upscaler(before: Latents, after: Latents, path: Path, state: Path | None) -> Latents:
    """``after``, which the upscaler in the file ``path`` made of ``before``, with the receipt of ``before`` and that
    upscaler; as it is where ``before`` has no complete receipt."""
    job = _job_behind(before)
    if job is None:
        return after
    record = {**before.extra[RECEIPT], "latents": latents_hash(after)}
    record["job"] = replace(job, upscalers=(*job.upscalers, named(path, state))).record()
    return replace(after, extra={**after.extra, RECEIPT: record})


def sources_of(frames: torch.Tensor, request: ImageRequest, fit: str) -> tuple[PictureSource, ...]:
    """The sources of an image condition: those of ``request.previous``, then ``frames`` (F, H, W, 3) before ``fit``."""
    content, seen = picture_content(frames), request.vision is not None
    size = int(frames.shape[2]), int(frames.shape[1])
    source = PictureSource(content=content, fit=fit, vision=seen, size=size, **encoding_of(request))
    return (*(request.previous.sources if request.previous is not None else ()), source)


def decoded_receipt(latents: Latents, form: DecodeRequest) -> dict[str, Any] | None:
    """The receipt of a video that ``form`` decodes of ``latents``; None where they have none. It says so where they
    were changed after sampling; a damaged job is handed on as it is."""
    record = latents.extra.get(RECEIPT)
    if not isinstance(record, dict):
        return None
    if record.get("latents") != latents_hash(latents):
        known = record.get("missing", [])
        known = known if isinstance(known, list) else [str(known)]
        record = {**record, "missing": [*known, "what changed the latents after sampling"]}
    noise = {name: latents.extra.get(name, -1.0) for name in ("decode_timestep", "decode_noise_scale")}
    with suppress(PackError):  # a record that somebody edited
        return {**record, "job": replace(job_in(record.get("job")), decode=form, **noise).record()}
    return dict(record)


def tags_for(record: Mapping[str, Any] | None) -> dict[str, str]:
    return {} if record is None else {TAG: json.dumps(record)}


def read_receipt(path: Path) -> dict[str, Any]:
    """The receipt in a video or latents; CheckpointError for none, InputError for a damaged or newer one."""
    if path.suffix.lower() in LATENT_FILES:
        record = record_in(metadata_of(path), path).get("extra", {})
        record = record.get(RECEIPT) if isinstance(record, dict) else None
    else:
        text = tags_of(path).get(TAG)
        record = None if text is None else json_in(text, f"the receipt of {path.name!r}")
    return checked(record, path)


def checked(record: Any, path: Path) -> dict[str, Any]:
    """``record``, found in the file ``path``, as a receipt; raises as :func:`read_receipt`, also where it is None."""
    if record is None:
        expected = "a video, latents or a textured mesh that AnyGPU saved, with metadata"
        fix = "Choose another file; converting or uploading a video often removes its metadata."
        raise CheckpointError(f"no receipt in {path.name!r}", expected=expected, fix=fix)
    return versioned(record, HEAD, VERSION, "a receipt")


def job_of(
    record: Mapping[str, Any],
    kind: type[J] = VideoJob,  # type: ignore[assignment]
) -> J:
    """The job of class ``kind`` that a receipt is of; InputError for parts that are in no file, or a damaged job."""
    missing = record.get("missing")
    if missing:
        named = ", ".join(map(str, missing)) if isinstance(missing, list) else shown(missing)
        expected = "a file made of prompts, pictures and settings alone"
        fix = "Open the workflow in the file instead: drop it onto ComfyUI."
        raise InputError(f"a receipt without {named}", expected=expected, fix=fix)
    return parsed(kind, record.get("job"))


def settings_of(path: Path) -> VideoJob:
    """The job in a file's receipt as a pattern for others: without seed, text, model files, pictures, video and
    upscalers. Raises as :func:`read_receipt`, and InputError for a job of several passes, whose settings differ."""
    job = job_in(read_receipt(path).get("job"))
    if job.first is not None:
        found, fix = f"{path.name!r} of several passes", "Choose another file."
        raise InputError(found, expected="a video that was sampled once", fix=fix)
    own: dict[str, Any] = {"base": None, "image_encoder": None, **dict.fromkeys(("family", *BECAME), "")}
    own |= {"prompt": replace(job.prompt, text="", sections=()), "settings": replace(job.settings, seed=0, denoise=1.0)}
    return replace(job, task=AUTO, files={}, pictures=(), video=None, upscalers=(), resolved=None, **own)


@dataclass(frozen=True, slots=True)
class Replayed:
    rendered: Any  # as the kind of job gives it
    same: bool | None  # True if the result is bit for bit that of the receipt; None where the receipt has no hash
    differences: tuple[str, ...]  # between this machine and the one that made the file, which may be why
    what: str = "latents"  # that are compared

    def text(self) -> str:
        same, other = f"the same {self.what}, bit for bit", f"other {self.what}"
        first = {True: same, False: other, None: "nothing to compare with"}
        why = self.differences or (("no difference is known that explains it",) if self.same is False else ())
        return "\n".join([first[self.same], *(f"differs: {line}" for line in why)])


def differences_from(record: Mapping[str, Any], pipeline: Any) -> list[str]:
    """A line for each version, device fact and decision that a receipt and this machine both know and differ in."""
    return [
        f"{name} {shown(then)}, here {now!r}"
        for name, then, now in differing(record, _report_of(pipeline))
        if then is not None and now is not None
    ]


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Differences of two receipts in device, versions and decisions: name, value ``before``, value ``now``, or None."""
    rows = []
    for group in ("device", "made_with", "decisions"):
        old, new = _by_name(before.get(group)), _by_name(now.get(group))
        rows += [(name, old.get(name), new.get(name)) for name in {**new, **old} if old.get(name) != new.get(name)]
    return rows


def _job_behind(latents: Latents) -> VideoJob | None:
    """The job that made exactly these latents; None where they have no receipt, or one that says too little."""
    record = latents.extra.get(RECEIPT)
    if not isinstance(record, dict) or record.get("missing") or record.get("latents") != latents_hash(latents):
        return None
    with suppress(PackError):  # a record that somebody edited
        return job_in(record.get("job"))
    return None


def latents_hash(latents: Latents) -> str:
    return values_hash(latents.samples)


def named(path: Path, state: Path | None) -> Content:
    """A model, LoRA or folder by its content; the hash of every byte where ``state`` has it already."""
    return Content(path.name, content_of(path), whole_of(path, state))


@cache
def versions() -> dict[str, str]:
    """The versions of the pack, of Python and of the packages that compute, and the system; unknown ones left out."""
    ask: dict[str, Callable[[], str]] = {"anygpu": pack_version, "python": platform.python_version}
    ask |= {"system": platform.system, **{name: partial(importlib.metadata.version, name) for name in PACKAGES}}
    return {name: str(answer) for name in ask if (answer := value_or(ask[name], ""))}


def pack_version() -> str:
    """The version by the checkout's ``pyproject.toml``, else by the installed package; "" where neither says it."""
    with suppress(OSError, ValueError):
        if match := re.search(r'^version = "([^"]+)"', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE):
            return match[1]
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("anygpu")
    return ""


def _job(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings,
    framepack: FramePackSettings | None,
) -> VideoJob:  # fmt: skip
    """The job of a sampling with these inputs, without the ``video`` or ``first`` pass that it started from."""
    request: LoadRequest = pipeline.model.request
    files, cache, sources = request.files, pipeline.plan.step_cache, () if image is None else image.sources
    known = partial(named, state=request.state)
    return VideoJob(
        model=known(request.model), family=pipeline.family, prompt=prompt.extra.get("request", PromptRequest("")),
        settings=replace(settings, latents=None, noise_mask=None, guidance_steps=()),
        files={} if files is None else {part: known(path) for part, path in files.parts.items()},
        task="auto" if files is None else files.task, fit=sources[0].fit if sources else FITS[0], framepack=framepack,
        load={name: value for name, value in load_inputs(inputs_of(request)).items() if decides(name, value)},
        loras=tuple(Adapter(known(one.path), one.strength, one.blocks, one.mode) for one in lora.on(pipeline)),
        step_cache=Caching() if cache is None else Caching("custom", cache),
        pictures=tuple(Picture(Content("", one.content, size=one.size), **encoding_of(one)) for one in sources),
        resolved_variant=pipeline.model.variant, resolved_recipe=pipeline.model.recipe,
        resolved_model="" if files is None else files.known,
        base=None if request.base is None else known(request.base),
        image_encoder=None if request.image_encoder is None else known(request.image_encoder),
    )  # fmt: skip


def _missing(
    prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, video: Content | None,
    first: VideoJob | None,
) -> list[str]:  # fmt: skip
    """Inputs of a video that no file describes."""
    looks = prompt.extra.get("looks_at", "")
    sources = () if image is None else image.sources
    absent = {
        "a prompt that was not encoded by AnyGPU Encode Prompt": "request" not in prompt.extra,
        "the latents that it started from": settings.latents is not None and video is None and first is None,
        "a noise mask": settings.noise_mask is not None,
        "the pictures that it started from": image is not None and not sources,
        "states of another image encoder": any(one.vision for one in sources),
        "pictures fitted in several ways": len({one.fit for one in sources}) > 1,
        "the picture that its text encoder saw": bool(looks) and looks not in [one.content for one in sources[:1]],
    }
    return [name for name, is_absent in absent.items() if is_absent]


def _report_of(pipeline: Any) -> dict[str, Any]:
    """The versions, device and decisions of a receipt, without what names a person or a machine."""
    facts, decisions = pipeline.facts, [[line.subject, line.verdict] for line in pipeline.plan.decisions]
    device = {"device": facts.name, "backend": facts.backend, "arch": facts.arch, "driver": facts.driver}
    device |= {"memory_gb": round(facts.total_bytes / GIBIBYTE, 1)}
    return redact({"made_with": versions(), "device": device, "decisions": decisions}, own_names())


def _by_name(values: Any) -> dict[str, Any]:
    """A group of a receipt, a dictionary or a list of [name, value], as a dictionary, without what is malformed."""
    if isinstance(values, list):
        values = {str(pair[0]): pair[1] for pair in values if isinstance(pair, list) and len(pair) == 2}
    return values if isinstance(values, dict) else {}
