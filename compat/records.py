"""Frozen dataclasses of plain values as JSON and back, checked field by field, with one-line errors."""

from __future__ import annotations

import math
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from .errors import InputError, PackError, json_within

T = TypeVar("T")
WITHOUT = "without"  # metadata of a field: names of the fields of its dataclass that a record does not have
FIX = "Correct it, or let AnyGPU write the file again."
KINDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def plain(value: Any, without: tuple[str, ...] = (), subject: str = "") -> Any:
    """``value`` in JSON's types; a dataclass as a dict of the fields that differ from their defaults.
    Fields named in ``without`` are left out: InputError, with the path below ``subject``, where one of them is set."""
    if is_dataclass(value) and not isinstance(value, type):
        record = {}
        for item in fields(value):
            given, where = getattr(value, item.name), f"{subject}.{item.name}".lstrip(".")
            if item.name in without:
                if given is not _default(item) and given != _default(item):
                    found = f"{where} is set"
                    raise InputError(found, expected="values that a file can have", fix="Leave this input alone.")
            elif _default(item) is MISSING or given != _default(item):
                record[item.name] = plain(given, item.metadata.get(WITHOUT, ()), where)
        return record
    if isinstance(value, Mapping):
        return {str(name): plain(given, (), f"{subject}.{name}") for name, given in value.items()}
    return [plain(given, (), subject) for given in value] if isinstance(value, (tuple, list)) else value


def parse(cls: type[T], record: Any, subject: str, without: tuple[str, ...] = ()) -> T:
    """The ``cls`` that ``record``, a dict from JSON, describes; the inverse of :func:`plain`.
    Raises InputError, with its path below ``subject``, for a field that is missing, wrong, unknown, or ``without``."""
    if not isinstance(record, dict):
        raise wrong(subject, record, "an object {...}")
    known = {item.name: item for item in fields(cls) if item.name not in without}  # type: ignore[arg-type]
    for name in record:
        if name not in known:
            found = f"unknown field {shown(name)} in {subject}"
            raise InputError(found, expected=f"one of {', '.join(sorted(known))}", fix=FIX)
    missing = [name for name, item in known.items() if name not in record and _default(item) is MISSING]
    if missing:
        raise InputError(f"no {missing[0]!r} in {subject}", expected=f"the field {missing[0]!r}", fix=FIX)
    hints = typing.get_type_hints(cls)
    left_out = {name: item.metadata.get(WITHOUT, ()) for name, item in known.items()}
    return cls(**{key: _value(hints[key], item, f"{subject}.{key}", left_out[key]) for key, item in record.items()})


def json_in(text: str | bytes, subject: str) -> Any:
    """The value of a JSON text; InputError for invalid JSON, a number like NaN, or an object with a field twice."""
    try:
        return json_within(text, subject, parse_constant=_refuse, object_pairs_hook=partial(_object, subject))
    except PackError:
        raise
    except ValueError as error:
        raise InputError(f"{subject} is not JSON", expected="a JSON file that AnyGPU wrote", fix=FIX) from error


def versioned(record: Any, head: str, newest: int, subject: str) -> dict[str, Any]:
    """A copy of ``record``, an object with its version under ``head``; InputError for anything else, or a newer one."""
    version = record.get(head) if isinstance(record, dict) else None
    if type(version) is not int or version < 1:
        found, expected = f"{shown(record)} instead of {subject}", f'an object with "{head}": {newest}'
        raise InputError(found, expected=expected, fix=FIX)
    if version > newest:
        raise InputError(f"{subject} of version {version}", expected=f"version {newest} or older", fix="Update AnyGPU.")
    return dict(record)


def wrong(subject: str, given: Any, expected: str) -> InputError:
    return InputError(f"{subject} {shown(given)}", expected=expected, fix=FIX)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(name: str) -> None:
    raise ValueError(name)


def _object(subject: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its fields; InputError where a field comes twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InputError(f"{shown(name)} twice in {subject}", expected="each field once", fix=FIX)
    return record


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _value(hint: Any, given: Any, subject: str, without: tuple[str, ...]) -> Any:
    """``given``, from JSON, as a value of type ``hint``; raises InputError that names ``subject`` for any other."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if given is None and type(None) in arguments:
            return None
        kinds = [kind for kind in arguments if kind is not type(None)]
        if len(kinds) == 1:
            return _value(kinds[0], given, subject, without)
        if type(given) not in kinds:
            raise wrong(subject, given, " or ".join(KINDS[kind] for kind in kinds))
        return _bounded(given, subject)
    if origin is tuple:
        if not isinstance(given, list):
            raise wrong(subject, given, "a list [...]")
        hints = arguments[:1] * len(given) if arguments[-1] is ... else arguments
        if len(given) != len(hints):
            raise wrong(subject, given, f"a list of {len(hints)}")
        return tuple(_value(hints[n], item, f"{subject}[{n}]", without) for n, item in enumerate(given))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(given, dict):
            raise wrong(subject, given, "an object {...}")
        names = [_bounded(name, f"a name in {subject}") for name in given]
        return {name: _value(arguments[1], given[name], f"{subject}.{name}", without) for name in names}
    if is_dataclass(hint):
        return parse(hint, given, subject, without)  # type: ignore[arg-type]
    if hint is float and type(given) is int:
        if abs(given) >= 2**53:  # not every one is a float
            raise wrong(subject, given, "a number below 2**53")
        return float(given)
    if type(given) is not hint:
        raise wrong(subject, given, KINDS[hint])
    return _bounded(given, subject)


def _bounded(given: Any, subject: str) -> Any:
    """``given``, a plain value; InputError for a number or a text that not every reader of JSON can take."""
    if isinstance(given, float) and not math.isfinite(given):
        raise wrong(subject, given, "a finite number")
    if isinstance(given, int) and not -(2**63) <= given < 2**64:
        raise wrong(subject, given, "a whole number of at most 64 bits")
    if isinstance(given, str) and not given.isascii():
        try:
            given.encode()
        except UnicodeEncodeError:
            raise wrong(subject, given, "a text without half characters (lone surrogates)") from None
    return given
