"""Downloads of published models: repositories at a commit, their sizes, and files in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..compat.device.facts import GIBIBYTE

HUB = "https://huggingface.co/"
HUB_FILES = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")  # of a download


@dataclass(frozen=True, slots=True)
class Download:
    """One published repository at one commit."""

    repository: str  # its name on the Hub
    revision: str  # the commit
    only: tuple[str, ...] = ()  # what of it is read; none means all
    sizes: Mapping[str, int] = field(default_factory=dict)  # weights in bytes by folder, "" for the top

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights that are read of it, as they are stored there; 0 where that is not known."""
        return sum(size for name, size in self.sizes.items() if not self.only or not name or name in self.only)

    @property
    def page(self) -> str:
        return HUB + self.repository

    @property
    def folder(self) -> str:
        return self.repository.rsplit("/", 1)[1]

    def text(self, root: Path) -> str:
        only = f" (only {', '.join(self.only)})" if self.only else ""
        return f"{self.page}{only} into {root / self.folder}"


@dataclass(frozen=True, slots=True)
class Quantised:
    """A published file in fewer bits: its repository, its name there, and its 10**9 bytes as the Hub lists them."""

    repository: str
    file: str
    gigabytes: float

    def __str__(self) -> str:
        return f"{self.file} of {self.repository} ({self.gigabytes:.1f} GB)"


T5_XXL = (
    Quantised("city96/t5-v1_1-xxl-encoder-gguf", "t5-v1_1-xxl-encoder-Q8_0.gguf", 5.06),
    Quantised("city96/t5-v1_1-xxl-encoder-gguf", "t5-v1_1-xxl-encoder-Q4_K_M.gguf", 2.9),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A model to start with."""

    downloads: tuple[Download, ...]  # its repositories
    gib: Mapping[str, float]  # weights per part as bf16, by the published configurations' parameter counts
    quantised: Mapping[str, tuple[Quantised, ...]] = field(default_factory=dict)  # files by part, largest first

    @property
    def total_bytes(self) -> int:
        return int(sum(self.gib.values()) * GIBIBYTE)

    @property
    def size(self) -> str:
        """Download size in words: some parts are stored wider than bf16."""
        each = [download.stored_bytes for download in self.downloads]
        stored = f"{sum(each) / 1e9:.0f} GB" if all(each) else "an unknown size"
        return f"{stored} to download, {self.total_bytes / 1e9:.0f} GB of weights in bf16"

    @property
    def largest_bytes(self) -> int:
        """The largest part, in bf16: the least that must fit into the computer's memory at a time."""
        return int(max(self.gib.values()) * GIBIBYTE)
