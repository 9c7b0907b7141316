"""A ComfyUI pack for tests: beside `simulated_gpu`, the GPU counts as an RTX 2060, and core's large classes are small.

What core and this pack ask of the card gets the answers of one with compute capability 7.5; its arithmetic is that of
the simulated accelerator.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management as management
from server import PromptServer

TESTS = str(Path(__file__).resolve().parents[2])
CARD = {"backend": "cuda", "arch": "sm75", "arch_class": "cuda-old", "name": "NVIDIA GeForce RTX 2060"}

sys.path.append(TESTS)
try:
    from host.small_core import small
finally:
    sys.path.remove(TESTS)  # its folders have the names of packages that others look for

_small = small()
_small.__enter__()  # for as long as this ComfyUI lives
management.should_use_bf16 = lambda *args, **kwargs: False
management.should_use_fp16 = lambda *args, **kwargs: True
_told: set[str] = set()
NODE_CLASS_MAPPINGS: dict[str, Any] = {}


def name_the_card(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt as it came; from the first on, the pack is told that the GPU is this card."""
    for name, module in list(sys.modules.items()):
        if name.endswith(".host.core.machine") and name not in _told:
            module.facts_for = functools.partial(_named, module.facts_for)
            _told.add(name)
    return prompt


def _named(facts_for: Any, device: Any) -> Any:
    facts = facts_for(device)
    return facts if facts.backend == "cpu" else replace(facts, **CARD)


PromptServer.instance.add_on_prompt_handler(name_the_card)
