"""What to download first, and into which folder: published models with the size of their weights, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...compat.device.facts import GIBIBYTE
from ..family import Offer
from ..registry import FAMILIES

FETCHER = "AnyGPU Download Model"  # the node


def offers() -> dict[str, Offer]:
    """Title of each family that somebody may start with to what to download, the smallest first."""
    each = [(family.title, family.offer) for family in FAMILIES.values() if family.offer is not None]
    return dict(sorted(each, key=lambda item: item[1].total_bytes))


def smallest_for(memory_bytes: int) -> tuple[str, Offer]:
    """Title and offer of the smallest whose largest part fits into ``memory_bytes``; of the smallest if none fits."""
    each = list(offers().items())
    return next((item for item in each if item[1].largest_bytes <= memory_bytes), each[0])


def known_page(name: str) -> str:
    """The page from which a folder of this name comes; empty for a name that is not a published one."""
    pages = [page for family in FAMILIES.values() for page in family.pages]
    return next((page for page in pages if page.rsplit("/", 1)[1] == Path(name).name), "")


def remedy(name: str, root: Path, memory_bytes: int) -> str:
    """What to do about a model that is not there: its page where the name is a published one, else the smallest."""
    page = known_page(name)
    if page:
        return f"Download {page} into {root / Path(name).name} and press R, or choose another model."
    title, offer = smallest_for(memory_bytes)
    where = "; and ".join(download.text(root) for download in offer.downloads)
    return f"The smallest that fits this machine is {title}: download {where}, or let {FETCHER} do it; then press R."


def first_steps(searched: Sequence[Path], machine: str, memory_bytes: int) -> str:
    """What to do while there is no model: the folders searched, the smallest model that fits, its pages and folders.

    Args:
        searched: the model folders; the first is where the model goes. machine: the machine in words.
        memory_bytes: of the computer that holds the weights.
    """
    title, offer = smallest_for(memory_bytes)
    fits = "The smallest that fits" if offer.largest_bytes <= memory_bytes else "None fits. The smallest for"
    gib = offer.total_bytes / GIBIBYTE
    return "\n".join(
        [
            "No model was found in:",
            *(f"  {folder}" for folder in searched),
            f"{fits} this machine ({machine}): {title}, {gib:.1f} GiB of weights in bf16.",
            *(f"Download {download.text(searched[0])}" for download in offer.downloads),
            f"Then press R and choose it. {FETCHER} can fetch it.",
        ]
    )
