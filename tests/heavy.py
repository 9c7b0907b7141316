"""Checkpoints whose weights outweigh their activations, as the published ones do: the tiny ones, wide and deep.

With them the share of a model that is on the device decides what a run needs, as it does at full size. No layer holds
more than a twentieth of the whole, but for HunyuanVideo 1.5's glyph projection, which is 2048 wide whatever is asked.
"""

import json
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny import TINY, _silence, build
from tiny.weights import randomise
from torch import nn

VERSION = 2
MARKER = ".anygpu-heavy.json"
SIXTEEN = {"num_attention_heads": 16}
GREATER: Mapping[
    str, Mapping[str, Mapping[str, Any]]
] = {  # checkpoint -> part -> settings that differ from the tiny one
    "ltx": {
        "transformer": {**SIXTEEN, "num_layers": 8, "cross_attention_dim": 256},
        "text_encoder": {"d_ff": 2048, "num_layers": 24},
    },
    "mochi": {"transformer": {**SIXTEEN, "num_layers": 24}, "text_encoder": {"d_ff": 4096, "num_layers": 40}},
    "hunyuan_video": {
        "transformer": {**SIXTEEN, "num_layers": 4, "num_single_layers": 8},
        "text_encoder": {"intermediate_size": 2048, "num_hidden_layers": 32},
    },
    "hunyuan_video_15": {
        "transformer": {**SIXTEEN, "num_layers": 8},
        "text_encoder": {"intermediate_size": 2048, "num_hidden_layers": 40},
    },
    "framepack": {".": {**SIXTEEN, "num_layers": 4, "num_single_layers": 8}},
}


def build_heavy(name: str, folder: Path, *, seed: int = 0) -> Path:
    """The folder of the heavy checkpoint ``name``, built unless it is there: ``folder / heavy-name``, fp32.

    Args:
        name: a key of :data:`GREATER`. folder: where tiny checkpoints live.

    Returns:
        The folder. It appears complete, by one rename, so two processes may build it at the same time.
    """
    target = Path(folder) / f"heavy-{name}"
    marker = {"name": name, "seed": seed, "version": VERSION}

    def built() -> bool:
        return (target / MARKER).is_file() and json.loads((target / MARKER).read_text(encoding="utf-8")) == marker

    if built():
        return target
    status_light = build(name, folder)
    with tempfile.TemporaryDirectory(prefix=f".heavy-{name}-", dir=folder) as scratch, _silence():
        made = Path(scratch) / name
        shutil.copytree(status_light, made)
        for part, settings in GREATER[name].items():
            for file in (made / part).glob("*.safetensors*"):
                file.unlink()
            module = _grown(TINY[name].parts[part].make(), settings)
            randomise(module, zlib.crc32(f"{seed}/{name}/{part}".encode()))
            module.save_pretrained(made / part)  # type: ignore[operator]
        (made / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        if target.exists() and not built():
            target.replace(Path(scratch) / "outdated")
        try:
            made.replace(target)
        except OSError:  # another process was first
            if not built():
                raise
    return target


def _grown(module: Any, settings: Mapping[str, Any]) -> nn.Module:
    """A module of the same class with ``settings`` in place of its own."""
    with torch.random.fork_rng(devices=[]):
        if hasattr(module, "from_config"):
            grown: nn.Module = type(module).from_config({**module.config, **settings})
            return grown
        config = {key: value for key, value in module.config.to_dict().items() if key != "layer_types"}
        grown = type(module)(type(module.config)(**{**config, **settings}))
        return grown
