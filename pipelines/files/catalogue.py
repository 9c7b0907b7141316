"""Published models that can be downloaded, their pages and folders, and advice on the first one, in words."""

from __future__ import annotations

import shutil
from collections.abc import Container, Sequence
from pathlib import Path

from ...compat.device.facts import GIBIBYTE
from ...compat.errors import require_choice
from ..family import HUB, Download, FamilySpec, Offer
from ..registry import FAMILIES

FETCHER = "AnyGPU Download Model"  # the node
STORED = (("bf16", 1.0), ("fp8 or GGUF Q8_0", 0.53), ("GGUF Q4_K_M", 0.3))  # of a transformer, and its share of bf16
BESIDE_GIB = 2.0  # of activations and the driver


def offers() -> dict[str, Offer]:
    """The first download of each family that offers one, by the family's title, the smallest first."""
    each = [(known.title, known.published.offer) for known in FAMILIES.values() if known.published.offer is not None]
    return dict(sorted(each, key=lambda item: item[1].total_bytes))


def every_offer() -> dict[str, Offer]:
    """All downloads by title: :func:`offers`, followed by further variants of each family."""
    more = (family.published.more_offers.items() for family in FAMILIES.values())
    return offers() | {title: offer for family in more for title, offer in family}


def smallest_for(memory_bytes: int) -> tuple[str, Offer]:
    """Title and offer of the smallest whose largest part fits into ``memory_bytes``; of the smallest if none fits."""
    each = list(offers().items())
    return next((item for item in each if item[1].largest_bytes <= memory_bytes), each[0])


def published_family(name: str) -> FamilySpec | None:  # that publishes a repository named like the folder ``name``
    folder = Path(name).name
    pages = ((family, page) for family in FAMILIES.values() for page in family.published.pages)
    return next((family for family, page in pages if page.rsplit("/", 1)[1] == folder), None)


def remedy(name: str, root: Path, memory_bytes: int) -> str:
    """Advice on a missing model: its page where the name is a published one, else the smallest that fits, or of all."""
    each = (download for offer in every_offer().values() for download in offer.downloads)
    offered = next((download for download in each if download.folder == Path(name).name), None)
    if offered is not None:
        return f"Download {offered.text(root)}, or let {FETCHER} do it; then press R. Or choose another model."
    if (family := published_family(name)) is not None:
        page = next(page for page in family.published.pages if page.endswith(f"/{Path(name).name}"))
        return f"Download {page} into {root / Path(name).name} and press R, or choose another model."
    title, offer = smallest_for(memory_bytes)
    where = "; and ".join(download.text(root) for download in offer.downloads)
    return f"{_fits(offer, memory_bytes)}: {title}. Download {where}, or let {FETCHER} do it; then press R."


def _fits(offer: Offer, memory_bytes: int) -> str:  # the start of a sentence about :func:`smallest_for`
    fits = "The smallest that fits" if offer.largest_bytes <= memory_bytes else "None fits. The smallest for"
    return f"{fits} this machine"


def stored_for(offer: Offer, card_bytes: int) -> str:
    """A sentence on the form in which an offer's transformer fits whole on a card of ``card_bytes``, or that none does;
    empty for 0. Forms are the published files, else by 8.5 bits a weight for Q8_0 and about 4.8 for Q4_K_M."""
    if not card_bytes:
        return ""
    card_gib, size = card_bytes / GIBIBYTE, offer.gib["transformer"]
    room, card = card_gib - BESIDE_GIB, f"On a card of {card_gib:.0f} GB its transformer"
    if size <= room:
        return f"{card} fits in one piece as bf16, about {size:.1f} GiB."
    forms = [(str(file), file.gigabytes * 1e9 / GIBIBYTE) for file in offer.quantised.get("transformer", ())]
    forms = forms or [(f"{name}, about {size * share:.1f} GiB", size * share) for name, share in STORED[1:]]
    texts = offer.quantised.get("text", ())
    text = next((file for file in texts if file.gigabytes * 1e9 / GIBIBYTE <= room), texts[-1] if texts else "")
    beside = f", with {text} as text encoder" if text else ""
    name = next((name for name, gib in forms if gib <= room), "")
    if not name:
        return f"{card} is streamed in every form; the smallest useful one is {forms[-1][0]}{beside}."
    return f"{card} fits in one piece as {name}{beside}, by AnyGPU Compose Pipeline."


def variants_of(title: str) -> str:
    """A line on published folders of a family that AnyGPU Download Model lacks, such as 720p; empty for none."""
    family = next(family for family in FAMILIES.values() if title in (family.title, *family.published.more_offers))
    offered = {download.page for offer in every_offer().values() for download in offer.downloads}
    others = [page.removeprefix(HUB) for page in family.published.pages if page not in offered]
    return f"Other variants, for `hf download NAME --local-dir …`: {', '.join(others)}" if others else ""


def first_steps(searched: Sequence[Path], machine: str, memory_bytes: int, card_bytes: int = 0) -> str:
    """Advice while there is no model: the smallest that fits, its pages and folders, and the folders searched.
    ``memory_bytes`` are the computer's, which holds the weights; ``card_bytes`` the card's, 0 without one."""
    title, offer = smallest_for(memory_bytes)
    return "\n".join(
        [
            f"{_fits(offer, memory_bytes)} ({machine}): {title}, {offer.size}.",
            *filter(None, (stored_for(offer, card_bytes),)),
            *(f"Download {download.text(searched[0])}" for download in offer.downloads),
            f"Then press R and choose it. {FETCHER} can fetch it.",
            "Folders searched:",
            *(f"  {folder}" for folder in searched),
        ]
    )


def absent_offers(there: Container[str], roots: Sequence[Path]) -> dict[str, dict[str, str]]:
    """By folder name, each offer that is not ``there``: its ``title``, and a ``text`` on size, room, pages, folders."""
    offers_of = {offer.downloads[0].folder: (title, offer) for title, offer in every_offer().items()}
    return {
        name: {
            "title": title,
            "text": "\n".join(
                [
                    f"{offer.size}; {free_bytes(folder_of(offer.downloads[0], roots)) / 1e9:.0f} GB free on the disk. "
                    "An interrupted download resumes.",
                    *(download.text(folder_of(download, roots).parent) for download in offer.downloads),
                    "Their licences are on these pages; by downloading you accept them.",
                ]
            ),
        }
        for name, (title, offer) in offers_of.items()
        if name not in there
    }


def offer_of(title: str) -> Offer:
    """The offer under a title; raises InputError where none has it."""
    require_choice("model", title, every_offer())
    return every_offer()[title]


def folder_of(download: Download, roots: Sequence[Path]) -> Path:
    """The folder of a repository: in the first of ``roots`` that has it, in the first of all where none has."""
    return next((root for root in roots if (root / download.folder).is_dir()), roots[0]) / download.folder


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk that a folder, which need not be there yet, is or will be on; 0 for an absent disk."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    return 0 if there is None else shutil.disk_usage(there).free
