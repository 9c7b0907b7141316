"""Tiny checkpoints with random weights, built on the spot: the real classes, tokenizers and folder layout.

They let the demo and the tests run every step of every family, from prompt to pixels, without a download. What they
paint is noise, but noise that depends on the prompt, the negative prompt, the picture and the seed.
"""

import json
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.errors import CheckpointError
from torch import nn

from .recipes import TINY, Part, Recipe
from .weights import randomise

__all__ = ["TINY", "Part", "Recipe", "build", "matrices_of", "one_shot"]

RECIPE_VERSION = 1  # raised when a recipe changes, so that folders built before are built again
MARKER = ".anygpu-tiny.json"


def matrices_of(pipeline: Any) -> dict[str, tuple[int, ...]]:
    """Names and weight shapes of the transformers' matrices and convolutions; nothing is read for it."""
    from anygpu.pipelines.load.lora import _layers_of

    return {name: tuple(each.weight.shape) for name, each in _layers_of(pipeline).items() if each.weight.ndim > 1}


def build(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of the tiny checkpoint ``name``, built unless it is there already.

    Args:
        name: a key of :data:`TINY`.
        folder: where tiny checkpoints live; the checkpoint becomes ``folder / name``.
        seed: 0 to 2**32 - 1; the same seed gives the same files. The global random state is left alone.
        dtype: of every weight.

    Returns:
        ``folder / name``. It appears complete, by one rename, so two processes may build it at the same time.

    Raises:
        CheckpointError: ``folder / name`` exists and is not this checkpoint with this seed and dtype.
    """
    recipe = TINY[name]
    target = Path(folder) / name
    marker = {"name": name, "seed": seed, "dtype": str(dtype).removeprefix("torch."), "recipe": RECIPE_VERSION}
    if is_built(target, marker):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch, _silence():
        made = Path(scratch) / name
        for subfolder, part in recipe.parts.items():
            _write(part, made / subfolder, zlib.crc32(f"{seed}/{name}/{subfolder}".encode()), dtype)
        if recipe.indexed:
            (made / "model_index.json").write_text(_index(recipe), encoding="utf-8", newline="\n")
        (made / MARKER).write_text(json.dumps(marker), encoding="utf-8", newline="\n")
        if target.exists() and not is_built(target, marker):
            target.replace(Path(scratch) / "outdated")
        try:
            made.replace(target)
        except OSError:
            # Another process was first, and what it built is the same.
            if not is_built(target, marker):
                raise
    return target


def one_shot(name: str, folder: Path, *, pipeline: str = "", dtype: torch.dtype = torch.float32) -> Any:
    """The bare diffusers pipeline of the tiny checkpoint ``name``, on the CPU, as the reference to compare with.

    Args:
        name: a key of :data:`TINY` that has a pipeline.
        folder: as for :func:`build`, which is called for what is missing; what is there is used as it is.
        pipeline: another diffusers class for the same folder, such as ``LTXImageToVideoPipeline``.
        dtype: of the loaded weights.
    """
    import diffusers
    from transformers import PreTrainedTokenizerFast

    recipe = TINY[name]
    own, *beside = (_at_hand(key, Path(folder)) for key in (name, *recipe.beside))
    with _silence():
        home, given = own, {}
        if beside:
            home, images = beside
            given["transformer"] = _loaded(recipe.parts["."], own, dtype)
            for key, part in TINY[recipe.beside[1]].parts.items():
                given[key] = _loaded(part, images / key, dtype)
        if "LlamaTokenizerFast" in (home / "model_index.json").read_text(encoding="utf-8"):
            # transformers 5 rebuilds this class with the splitting rule of Llama 1, which drops every space.
            given["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(home / "tokenizer")
        cls = getattr(diffusers, pipeline or recipe.pipeline)
        pipe = cls.from_pretrained(home, torch_dtype=dtype, local_files_only=True, **given)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def is_built(target: Path, marker: dict[str, Any]) -> bool:
    """Whether ``target`` is the checkpoint that ``marker`` describes; no, too, if it is that of an older recipe.

    Raises:
        CheckpointError: something else is there.
    """
    if not target.exists():
        return False
    note = target / MARKER
    noted = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
    if noted is None or {**noted, "recipe": marker["recipe"]} != marker:
        raise CheckpointError(
            f"{target} holds {'something else' if noted is None else noted}",
            expected=f"nothing, or the tiny checkpoint {marker}",
            fix="Name another folder, or remove this one.",
        )
    return noted == marker


def _at_hand(name: str, folder: Path) -> Path:
    """``folder / name``, built if it is not there, whatever seed and dtype it was built with."""
    return folder / name if (folder / name / MARKER).is_file() else build(name, folder)


def _write(part: Part, folder: Path, seed: int, dtype: torch.dtype) -> None:
    """Build one part, with weights drawn from ``seed``, and save it into ``folder``."""
    with torch.random.fork_rng(devices=[]):  # the classes' constructors draw from the global generator
        made = part.make()
    save = made.save_pretrained
    if not isinstance(made, nn.Module):
        save(folder)
        return
    randomise(made, seed)
    nn.Module.to(made, dtype)  # the classes' own `to` warns of modules to keep in fp32, of which none here has any
    save(folder, **({"max_shard_size": part.shard} if part.shard else {}))


def _loaded(part: Part, folder: Path, dtype: torch.dtype) -> Any:
    """A part read back from its folder."""
    import diffusers
    import transformers

    cls = getattr({"diffusers": diffusers, "transformers": transformers}[part.library], part.cls)
    return cls.from_pretrained(folder, **({"torch_dtype": dtype} if issubclass(cls, nn.Module) else {}))


def _index(recipe: Recipe) -> str:
    """``model_index.json`` with the published class names, where diffusers would write those of this transformers."""
    import diffusers

    rows = {key: [part.library, part.cls] for key, part in sorted(recipe.parts.items())}
    about = {"_class_name": recipe.pipeline, "_diffusers_version": diffusers.__version__}
    return json.dumps({**about, **rows}, indent=2) + "\n"


@contextmanager
def _silence() -> Iterator[None]:
    """Without the libraries' own progress bars, which would draw over the caller's.

    Nor with the warning that ``torch_dtype`` gets a shorter name, which older versions of the libraries do not know.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            yield
    finally:
        for library in shown:
            library.enable_progress_bar()
