"""Makes the video of a receipt again, and says whether it is the same and what differs if not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from . import jobs
from .base import Progress
from .job_format import Job
from .jobs import Machine, Rendered
from .latents.store import load_latent
from .receipts import LATENT_FILES, differences_from, job_of, latents_hash, read_receipt


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay made.

    Args:
        same: whether the latents are bit for bit those of the receipt; None where it does not say.
        differences: between this machine and the one that made the file, which may be why.
    """

    rendered: Rendered
    job: Job
    same: bool | None
    differences: tuple[str, ...]

    def text(self) -> str:
        """The outcome in lines."""
        first = {True: "the same latents, bit for bit", False: "other latents", None: "nothing to compare with"}
        why = self.differences or (("no difference is known that explains it",) if self.same is False else ())
        return "\n".join([first[self.same], *(f"differs: {line}" for line in why)])


def replay(path: Path, machine: Machine, progress: Progress) -> Replayed:
    """Make the video of a file again; what is not here by content but by name is taken, and told.

    Raises:
        PackError: no receipt, one that says too little, a model or picture that is not here, or what a stage refuses.
    """
    record = read_receipt(path)
    job = job_of(record)
    machine.places.differences = differences = []
    with torch.no_grad():
        pipeline = jobs.load_pipeline(job, machine, progress)
        differences += differences_from(record, pipeline)
        for line in differences:
            progress.notify(f"differs: {line}")
        made = jobs.run(job, machine, progress, pipeline)
    expected = record.get("latents")
    same = latents_hash(made.latents) == expected if isinstance(expected, str) else None
    if path.suffix in LATENT_FILES and same is False:
        there = load_latent(path, progress.notify)["samples"]
        if there.shape == made.latents.samples.shape:
            largest = float((there - made.latents.samples).abs().max())
            differences.append(f"latents by at most {largest:.3g} of {float(there.abs().max()):.3g}")
    return Replayed(made, job, same, tuple(dict.fromkeys(differences)))
