"""The components of a pipeline without weights: schedulers, tokenizers, processors, read from their folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...compat.checkpoints.weights import read_json
from ...compat.errors import CheckpointError
from ...compat.packages import attribute, unusable
from ..family import FamilySpec
from .configs import require_counts, require_plausible
from .formats import tool_configs


def tool_reader(family: FamilySpec, library: str, folder: Path) -> Callable[[], Any]:
    """Reads a configuration (``diffusers``) or a tokenizer or processor (``transformers``)."""

    def read() -> Any:
        if library == "diffusers":
            file = next((f for f in sorted(folder.glob("*_config.json"))), folder / "scheduler_config.json")
            config = read_json(file, f"the {folder.name}")
            require_plausible(folder.name, file, config, [tool_configs(family).get(folder.name, {})])
            return config
        for file in folder.glob("*config.json"):
            require_counts(file, read_json(file, f"the {folder.name}"))
        cls: Any = attribute("transformers", _processor_class(folder))
        try:
            return cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise unusable("transformers", error) from error
        except Exception as error:  # each tokenizer's reader has errors of its own for a damaged file
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{str(folder)!r} cannot be read ({reason})",
                expected=f"a {folder.name}",
                fix="Download this folder again.",
            ) from error

    return read


def _processor_class(folder: Path) -> str:
    """The transformers class that reads a tokenizer or an image processor.

    A Llama 3 tokenizer is a byte-level ``tokenizer.json`` under the name of a class that transformers 5.0 rebuilds as
    another kind and drops every space (huggingface/transformers#45488), so such a file is taken as it is.
    """
    if folder.name.endswith(("processor", "extractor")):
        return "AutoImageProcessor"
    config = folder / "tokenizer_config.json"
    named = read_json(config, "a tokenizer").get("tokenizer_class", "") if config.is_file() else ""
    whole = (folder / "tokenizer.json").is_file()
    return "PreTrainedTokenizerFast" if whole and str(named).startswith("Llama") else "AutoTokenizer"
