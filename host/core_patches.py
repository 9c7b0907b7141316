"""Patches that core's nodes put on a MODEL: handed to our blocks where possible, named where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..compat.errors import UnsupportedError
from ..pipelines.sampling.core_sampler import BlockPatches, blocks_of

OVERRIDE, VALUES = "optimized_attention_override", "stg_self_attn_blocks"
OUTPUTS = {"attn1_output_patch": "attn1", "attn2_output_patch": "attn2"}
INPUTS = {"attn1": "attn1_patch", "attn2": "attn2_patch"}  # a node that has both undoes in one what the other did
READ = {  # of a call's options: what core's sampler says of the call, and what is read here
    *("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks", "patches", "patches_replace"),
    *("multigpu_thread_device", "prefetch_dynamic_vbars", "context_window", "easycache", OVERRIDE, VALUES),
}
NETWORK = "diffusion_model."
KINDS = {"double_block": "double", "single_block": "single"}


def block_patches(options: Mapping[str, Any]) -> BlockPatches | None:
    """Collect the patches of blocks and attention in one call's options; None without any."""
    dit = options.get("patches_replace", {}).get("dit", {})
    double, single = ({key[1]: patch for key, patch in dit.items() if key[0] == kind} for kind in KINDS)
    outputs = _outputs(options)
    override, values = options.get(OVERRIDE), frozenset(options.get(VALUES) or ())
    if not (double or single or outputs or override or values):
        return None
    attend = None if override is None else _overridden(override, options)
    return BlockPatches(double, single, attend=attend, outputs=outputs, values=values, options=options)


def unread(options: Mapping[str, Any], conds: Mapping[str, Any], title: str, transformer: Any) -> Iterator[str]:
    """One line for each thing that nodes put on a MODEL for this call and that has no effect on it.

    Args:
        conds: what else the call is given.
        title: of the family.
    """
    wrapped = {key for kind in options.get("wrappers", {}).values() for key in kind}
    for name in sorted(str(key) for key in options.keys() - READ - wrapped):
        yield f"no effect on {title}: the option {name}, which its transformer does not read"
    outputs, alone = _outputs(options), len(set(options.get("cond_or_uncond", ()))) < 2
    for name in sorted(options.get("patches", {})):
        if OUTPUTS.get(name) not in outputs:
            yield f"no effect on {title}: a node's {name}, a place that its transformer does not have"
        elif alone:
            yield (
                f"a node's {name} sees one prompt at a time on {title}: what compares the negative prompt with the "
                f"positive one there, such as NAG, has no effect"
            )
    counts = Counter(kind for kind, _, _ in blocks_of(transformer))
    for place, patches in options.get("patches_replace", {}).items():
        for key in patches:
            if place != "dit" or key[1] >= counts[KINDS.get(key[0], "")]:
                block = " ".join(str(part) for part in key)
                yield f"no effect on {title}: a replaced {place} in block {block}, which its transformer does not have"
    for index in sorted(options.get(VALUES) or ()):
        if index >= counts["double"]:
            yield f"no effect on {title}: guidance by block {index}; it has blocks 0 to {counts['double'] - 1}"
    if conds.get("control") is not None:
        yield f"no effect on {title}: a ControlNet, for which its transformer has no place"


def unread_patches(patches: Mapping[str, Any]) -> Iterator[str]:
    """One line for each of a MODEL's object patches that has no effect on ours."""
    for name in sorted(patches):
        if name == "manual_cast_dtype":
            yield "no effect of Model Compute Dtype: choose precision on the AnyGPU load node"
        elif name.startswith(NETWORK):
            yield f"no effect of a node's patch of {name}: this model's network is not core's"


def _outputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Patches of what attention gives, by the attention."""
    asked = options.get("patches", {})
    return {place: asked[name] for name, place in OUTPUTS.items() if asked.get(name) and not asked.get(INPUTS[place])}


def _overridden(override: Any, options: Mapping[str, Any]) -> Any:
    """Attention as our blocks call it, by way of core's override, which is given ours in the form of core's own."""

    def attend(
        own: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        def as_core(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **form: Any
        ) -> torch.Tensor:
            apart = [t if form.get("skip_reshape") else t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v)]
            out: torch.Tensor = own(*apart, mask)
            return out if form.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

        form = {"mask": mask, "skip_reshape": True, "skip_output_reshape": True, "transformer_options": options}
        out: torch.Tensor = override(as_core, query, key, value, query.shape[1], **form)
        if out.shape != (*query.shape[:-1], value.shape[-1]):
            raise UnsupportedError(
                f"attention of shape {tuple(out.shape)} from a node on the MODEL",
                expected=f"{(*query.shape[:-1], value.shape[-1])}",
                fix="Remove the node that replaces attention, or choose attention on the AnyGPU load node.",
            )
        return out

    return attend
