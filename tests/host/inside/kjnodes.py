"""Scenes about KJNodes, another pack, beside ours: its nodes patch core's networks before and after our fit."""

import importlib
import sys
import types
from typing import Any
from unittest import mock

import comfy.model_management as management
import server
import torch

from host.inside.core_fit import EULER, PEAK
from host.inside.core_tiny import HOST, conditioning, error, louder, made, noise_of, output
from host.inside.fit_beside import doctored, fit

PACK = "kjnodes"
OPTIMIZATIONS, LTX, MINIMAX = "model_optimization_nodes", "ltxv_nodes", "minimax_nodes"  # files of nodes
TEXT, LATENT = "text", "latent"  # in place of these inputs
NAG = {"conditioning": TEXT, "nag_scale": 11.0, "nag_alpha": 0.25, "nag_tau": 2.5}
TUNED = {"blocks": "", "video_scale": 0.5, "audio_scale": 1.0, "audio_to_video_scale": 1.0, "video_to_audio_scale": 1.0}
NODES: dict[str, tuple[str, str, dict[str, Any]]] = {  # file, case of core_tiny, inputs
    "WanVideoNAG": (OPTIMIZATIONS, "Wan 2.1", NAG),
    "WanVideoEnhanceAVideoKJ": (OPTIMIZATIONS, "Wan 2.1", {"weight": 2.0, "latent": LATENT}),
    "WanChunkFeedForward": (OPTIMIZATIONS, "Wan 2.1", {"chunks": 2, "dim_threshold": 1}),
    "CFGZeroStarAndInit": (OPTIMIZATIONS, "Wan 2.1", {"use_zero_init": True, "zero_init_steps": 0}),
    "LTXVEnhanceAVideoKJ": (OPTIMIZATIONS, "LTXV", {"weight": 2.0, "latent": LATENT}),
    "LTXVChunkFeedForward": (LTX, "LTX-2", {"chunks": 2, "dim_threshold": 1}),
    "LTX2AttentionTunerPatch": (LTX, "LTX-2", {**TUNED, "triton_kernels": False}),
    "MiniMaxChunkFeedForward": (MINIMAX, "MiniMax H3", {"chunks": 2, "seq_threshold": 1}),
    "MiniMaxLowVRAMAttention": (MINIMAX, "MiniMax H3", {"head_chunks": 2}),
}


def node_of(checkout: str, name: str) -> Any:
    """The class of a node, from the file in ``checkout`` that has it: its package needs what it does not."""
    for package, folder in ((PACK, checkout), (f"{PACK}.nodes", f"{checkout}/nodes")):
        sys.modules.setdefault(package, types.ModuleType(package)).__path__ = [folder]
    if not hasattr(server.PromptServer, "instance"):
        server.PromptServer.instance = mock.MagicMock()
    return getattr(importlib.import_module(f"{PACK}.nodes.{NODES[name][0]}"), name)


def beside(checkout: str, name: str) -> dict[str, Any]:
    """Errors against core's fp32 with the node's patch: of plain fp16, of our fit and Doctor on either side of the
    patch, each twice; how much the patch changes; and what the Doctor said."""
    node, (_, case, inputs), said = node_of(checkout, name), NODES[name], list[str]()
    given = {TEXT: conditioning(case, 8), LATENT: {"samples": noise_of(case)}}
    whole = made(case, torch.float32, None)
    louder(whole, case, PEAK)

    def patched(model: Any) -> Any:
        own = {key: given.get(value, value) if isinstance(value, str) else value for key, value in inputs.items()}
        dtype = model.model.get_dtype()
        with mock.patch.multiple(management, get_torch_device=lambda: HOST, unet_dtype=lambda *_, **__: dtype):
            if hasattr(node, "execute"):
                return node.execute(model=model, **own).args[0]
            return getattr(node(), node.FUNCTION)(model=model, **own)[0]

    def run(dtype: torch.dtype, make: Any) -> list[float]:
        model = made(case, dtype, None)
        model.model.load_state_dict(whole.model.state_dict())
        ready = make(model)
        return [error(output(ready, case, *EULER), expected) for _ in range(2)]

    expected = output(patched(whole.clone()), case, *EULER)
    return {
        "changes": error(output(whole, case, *EULER), expected),
        "plain": run(torch.float16, patched),
        "fit": [*run(torch.float16, lambda model: fit(patched(model))), *run(torch.float16, lambda m: patched(fit(m)))],
        "doctor": [
            *run(torch.float32, lambda model: doctored(patched(model), said)),
            *run(torch.float32, lambda model: patched(doctored(model, said))),
        ],
        "said": said,
    }
