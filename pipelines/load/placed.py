"""Loads a pipeline with its parts on the cards where a run is quickest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...compat.memory.offloader import Offloader
from ..base import Progress
from ..forecast.placement import share_out
from ..pipeline import Pipeline
from ..requests import LoadRequest
from ..sizes import TRANSFORMER
from .folder import load


def load_placed(
    request: LoadRequest,
    progress: Progress | None = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> Pipeline:
    """The pipeline of ``request``, its parts on those of ``request.cards`` where a run is quickest.

    Args:
        progress, make_room, hosted: as :func:`load` takes them.

    Raises:
        PackError: what :func:`load` refuses.
    """
    first = load(request, progress, make_room, hosted)
    if len(request.cards) < 2 or TRANSFORMER in request.devices or first.facts.device not in request.cards:
        return first

    def load_on(device: torch.device, devices: Mapping[str, torch.device]) -> Pipeline:
        return load(replace(request, device=device, devices={**devices, **request.devices}), None, make_room, hosted)

    return share_out(first, request.cards, request.devices, load_on)
