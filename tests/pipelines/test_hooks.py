"""A family's ``pipeline.py`` has the declared hooks and no others: a misspelt one is an error, no missing feature."""

import sys
from types import ModuleType

import pytest
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines import family as hooks
from anygpu.pipelines.registry import FAMILIES


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.id)
def test_every_family_has_the_required_hooks_and_no_undeclared_one(family):
    assert all(getattr(family.code, name) is not None for name in hooks.REQUIRED)


PLANTED = {  # source of a function -> what is said
    "def encode_imgae(pipeline, request, progress): ...": r"a function encode_imgae\(\) in .*expected one of encode_",
    "from anygpu.compat.errors import remember as upscael": r"a function upscael\(\)",
    "def upscale(pipeline, latents): ...": r"upscale\(pipeline, latents\) .*expected upscale\(pipeline, latents, path",
    "del decode": r"no decode\(\) in .*Correct its name",
}


@pytest.mark.parametrize("line", PLANTED)
def test_what_is_no_hook_is_refused(line, monkeypatch):
    required = [f"def {name}({', '.join(given.split())}): ..." for name, given in hooks.REQUIRED.items()]
    module = ModuleType("planted.pipeline")
    exec("\n".join([*required, "def _own(): ...", line]), vars(module))
    monkeypatch.setitem(sys.modules, "planted", ModuleType("planted"))
    monkeypatch.setitem(sys.modules, "planted.pipeline", module)
    with pytest.raises(UnsupportedError, match=PLANTED[line]):
        hooks.code_of.__wrapped__("planted")
