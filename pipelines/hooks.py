"""The functions that ``families/<id>/pipeline.py`` may define, and the check that it defines no others but those
that begin with an underscore."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import isfunction, signature
from types import ModuleType

from ..compat.errors import UnsupportedError

REQUIRED = {  # name -> arguments
    "encode_prompt": "pipeline request progress",
    "prompt_from_core": "embeds extra",
    "sample": "pipeline prompt image settings progress",  # with sections: framepack and keeper too
    "decode": "pipeline latents progress form",
    "call_transformer": "pipeline transformer call",
}
OPTIONAL = {  # None where a family has none
    "encode_image": "pipeline request progress",
    "encode_video": "pipeline frames seed progress",
    "nearest_size": "pipeline width height",
    "upscale": "pipeline latents path progress",
    "defaults_for": "pipeline",
    "recipe_for": "pipeline",
    "guess_variant": "evidence",
    "settings_in": "evidence",
    "vae_settings_in": "evidence place",
    "task_of": "config",
    "encoder_task": "config",
    "text_forwards": "pipeline request",
    "batches": "pipeline settings",
    "frames_for": "framepack fps",
    "sections_for": "framepack frames",
    "training_plan": "frames window order",
    "training_sections": "film image plan",
}
HOOKS = REQUIRED | OPTIONAL


@cache
def code_of(package: str) -> ModuleType:
    """``pipeline.py`` of a family's package, with None for each optional hook that it lacks. Raises UnsupportedError
    for a function that is no hook, a hook with other arguments, or none where one is required."""
    module = import_module(".pipeline", package)
    for name, value in list(vars(module).items()):
        known = name in HOOKS
        if not known and isfunction(value) and not name.startswith("_"):
            known = value.__module__ != module.__name__ and value.__name__ == name  # imported to be called here
        if not known and isfunction(value) and not name.startswith("_"):
            _refuse(f"a function {name}() in {module.__name__}", f"one of {', '.join(HOOKS)}")
    for name, arguments in HOOKS.items():
        hook = vars(module).setdefault(name, None)
        if hook is None and name in REQUIRED:
            _refuse(f"no {name}() in {module.__name__}", f"{name}({', '.join(arguments.split())})")
        given = [] if hook is None else list(signature(hook).parameters)
        if hook is not None and not set(arguments.split()) <= set(given):
            _refuse(f"{name}({', '.join(given)}) in {module.__name__}", f"{name}({', '.join(arguments.split())})")
    return module


def _refuse(found: str, expected: str) -> None:
    fix = "Correct its name; begin it with an underscore if it is no hook, or declare it in pipelines/hooks.py."
    raise UnsupportedError(found, expected=expected, fix=fix)
