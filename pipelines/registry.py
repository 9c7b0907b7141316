"""The families: one for each folder of ``families/`` and each :func:`register` call, in the order that users see."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..compat.errors import require_choice
from . import families
from .family import FamilySpec

FAMILIES: dict[str, FamilySpec] = {}


def register(spec: FamilySpec) -> None:
    """Put one family into FAMILIES at its ``order``, in place of one of its id. Raises ValueError where another family
    has its pipeline class or transformer class: files would be taken for either."""
    own = {*spec.files.pipelines, *spec.files.transformer_classes}
    for other in (family for family in FAMILIES.values() if family.id != spec.id):
        shared = own & {*other.files.pipelines, *other.files.transformer_classes}
        if shared:
            raise ValueError(f"family {spec.id!r} and {other.id!r} both name {', '.join(sorted(shared))}")
    known = sorted([*FAMILIES.values(), spec], key=lambda family: family.order)
    FAMILIES.clear()
    FAMILIES.update({family.id: family for family in known})


def family_named(name: str) -> FamilySpec:
    """The family of an id read from a file; raises InputError where there is none."""
    require_choice("family", name, FAMILIES, "Load a supported model.")
    return FAMILIES[name]


for _folder in iter_modules(families.__path__):
    register(import_module(f".{_folder.name}.spec", families.__name__).SPEC)
