"""What to download first, and into which folder: published models with the size of their weights, as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...compat.device.facts import GIBIBYTE
from ..registry import FAMILIES

PARTS = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")
TWO_TEXTS = (*PARTS, "text_encoder_2", "tokenizer_2")
VISION = ("image_encoder", "feature_extractor")
HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class Download:
    """One published repository at one commit: its page, and the files and folders that are read; none means all."""

    page: str
    revision: str
    only: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """Its name on the Hub."""
        return self.page.removeprefix(HUB)

    @property
    def folder(self) -> str:
        """The name of the folder that it goes into, as published."""
        return self.page.rsplit("/", 1)[1]

    def text(self, root: Path) -> str:
        """Where it is, what of it is needed and where it goes, in one line."""
        only = f" (only {', '.join(self.only)})" if self.only else ""
        return f"{self.page}{only} into {root / self.folder}"


@dataclass(frozen=True, slots=True)
class Offer:
    """A model somebody may start with.

    Args:
        gib: weights per part in GiB as bf16, from the parameter counts of the published configurations.
    """

    family: str
    downloads: tuple[Download, ...]
    gib: Mapping[str, float]

    @property
    def total_bytes(self) -> int:
        """All weights, in bf16."""
        return int(sum(self.gib.values()) * GIBIBYTE)

    @property
    def largest_bytes(self) -> int:
        """The largest part, in bf16: the least that must fit into the computer's memory at a time."""
        return int(max(self.gib.values()) * GIBIBYTE)


# The commits are those that other public projects pin these repositories to (five or more of each, seen in 2026-11).
LTX = Download(f"{HUB}Lightricks/LTX-Video", "8984fa25007f376c1a299016d0957a37a2f797bb", PARTS)
MOCHI = Download(f"{HUB}genmo/mochi-1-preview", "14be5fcea23095ed330cb214647916a451e38b6e", PARTS)
HUNYUAN = Download(f"{HUB}hunyuanvideo-community/HunyuanVideo", "e8c2aaa66fe3742a32c11a6766aecbf07c56e773", TWO_TEXTS)
HUNYUAN_15 = Download(
    f"{HUB}hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "286be7ce72277246578a3e3cc2487e95ddae5bcf",
    (*TWO_TEXTS, "guider"),
)
FRAMEPACK = Download(f"{HUB}lllyasviel/FramePackI2V_HY", "86cef4396041b6002c957852daac4c91aaa47c79")
REDUX = Download(f"{HUB}lllyasviel/flux_redux_bfl", "45b801affc54ff2af4e5daf1b282e0921901db87", VISION)

FETCHER = "AnyGPU Download Model"  # the node
OFFERS: tuple[Offer, ...] = (
    Offer("ltx", (LTX,), {"text": 8.9, "transformer": 3.6, "vae": 0.8}),
    Offer("mochi", (MOCHI,), {"text": 8.9, "transformer": 18.7, "vae": 0.9}),
    Offer("hunyuan_video_15", (HUNYUAN_15,), {"text": 13.2, "text 2": 0.4, "transformer": 15.5, "vae": 2.3}),
    Offer("hunyuan_video", (HUNYUAN,), {"text": 14.0, "text 2": 0.2, "transformer": 23.9, "vae": 0.5}),
    Offer(
        "framepack",
        (FRAMEPACK, replace(HUNYUAN, only=tuple(part for part in TWO_TEXTS if part != "transformer")), REDUX),
        {"text": 14.0, "text 2": 0.2, "image": 0.8, "transformer": 24.0, "vae": 0.5},
    ),
)


def smallest_for(memory_bytes: int) -> Offer:
    """The smallest model whose largest part fits into ``memory_bytes``; the smallest of all where none does."""
    ordered = sorted(OFFERS, key=lambda offer: offer.total_bytes)
    return next((offer for offer in ordered if offer.largest_bytes <= memory_bytes), ordered[0])


def known_page(name: str) -> str:
    """The page from which a folder of this name comes; empty for a name that is not a published one."""
    pages = [page for family in FAMILIES.values() for page in family.pages]
    return next((page for page in pages if page.rsplit("/", 1)[1] == Path(name).name), "")


def remedy(name: str, root: Path, memory_bytes: int) -> str:
    """What to do about a model that is not there: its page where the name is a published one, else the smallest."""
    page = known_page(name)
    if page:
        return f"Download {page} into {root / Path(name).name} and press R, or choose another model."
    offer = smallest_for(memory_bytes)
    where = "; and ".join(download.text(root) for download in offer.downloads)
    title = FAMILIES[offer.family].title
    return f"The smallest that fits this machine is {title}: download {where}, or let {FETCHER} do it; then press R."


def first_steps(searched: Sequence[Path], machine: str, memory_bytes: int) -> str:
    """What to do while there is no model: the folders searched, the smallest model that fits, its pages and folders.

    Args:
        searched: the model folders; the first is where the model goes. machine: the machine in words.
        memory_bytes: of the computer that holds the weights.
    """
    offer = smallest_for(memory_bytes)
    fits = "The smallest that fits" if offer.largest_bytes <= memory_bytes else "None fits; the smallest for"
    title, gib = FAMILIES[offer.family].title, offer.total_bytes / GIBIBYTE
    return "\n".join(
        [
            "No model was found in:",
            *(f"  {folder}" for folder in searched),
            f"{fits} this machine ({machine}): {title}, {gib:.1f} GiB of weights in bf16.",
            *(f"Download {download.text(searched[0])}" for download in offer.downloads),
            f"Then press R and choose it. {FETCHER} can fetch it.",
        ]
    )
