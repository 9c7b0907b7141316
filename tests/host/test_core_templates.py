"""Every template that comes with ComfyUI, against the catalogue of distillations for core's samplers."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anygpu.host.recipes import differences, settings

pytestmark = pytest.mark.host

Prompt = dict[str, dict[str, Any]]
MUTED, BYPASSED, INSIDE = 2, 4, -10  # modes of a node; the node of a subgraph's inputs
WIDGETS = {  # core's nodes -> the order of their values in a saved workflow
    "KSampler": "seed control steps cfg sampler_name scheduler denoise",
    "KSamplerAdvanced": "add_noise seed control steps cfg sampler_name scheduler start_at_step end_at_step",
    "SamplerCustom": "add_noise seed control cfg", "BasicScheduler": "scheduler steps denoise", "CFGGuider": "cfg",
    "LTXVScheduler": "steps", "ManualSigmas": "sigmas", "LTXVDualCFGGuider": "video_cfg", "ModelSamplingSD3": "shift",
    "LoraLoaderModelOnly": "lora_name strength_model", "LoraLoader": "lora_name strength_model",
    "UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name", "ComfySwitchNode": "switch",
    "MiniMaxH3SigmaShift": "shift_video",
    **dict.fromkeys(("PrimitiveInt", "PrimitiveFloat", "PrimitiveBoolean"), "value"),
}  # fmt: skip

Source = Callable[[int, int], Any]  # of a node and its output: where it begins, or a value in a list of one


def flat(graph: dict[str, Any], subgraphs: dict[str, Any], prompt: Prompt, place: str, outer: Source) -> Source:
    """Add the nodes of a saved graph that run to ``prompt``, as ComfyUI's frontend flattens them."""
    rows = (link.values() if isinstance(link, dict) else link for link in graph.get("links") or [])
    links = {number: (origin, slot) for number, origin, slot, *_ in rows}
    nodes, inner = {node["id"]: node for node in graph["nodes"]}, dict[int, tuple[Source, dict[int, int]]]()

    def source(origin: int, slot: int) -> Any:
        if origin == INSIDE:
            return outer(origin, slot)
        node = nodes.get(origin, {"mode": MUTED})
        if origin in inner:
            within, ends = inner[origin]
            return within(*ends[slot])
        if node["mode"] == BYPASSED or node["type"] == "Reroute":
            kind = node["outputs"][slot]["type"]
            passed = [each for each in node["inputs"] if node["type"] == "Reroute" or each["type"] == kind]
            return next((source(*links[each["link"]]) for each in passed if each.get("link") in links), None)
        return None if node["mode"] == MUTED else [f"{place}{origin}", slot]

    for node in nodes.values():
        if (sub := subgraphs.get(node["type"])) and node["mode"] not in (MUTED, BYPASSED):
            named = {each["name"]: each.get("link") for each in node["inputs"]}

            def of_input(_: int, slot: int, node: Any = node, sub: Any = sub, named: Any = named) -> Any:
                name = sub["inputs"][slot]["name"]
                if named.get(name) in links:
                    return source(*links[named[name]])
                values = node.get("widgets_values_named") or {}
                return [values[name]] if name in values else None

            within = flat(sub, subgraphs, prompt, f"{place}{node['id']}:", of_input)
            ends = {
                row["target_slot"]: (row["origin_id"], row["origin_slot"])
                for row in sub["links"]
                if row["target_id"] == -20
            }
            inner[node["id"]] = (within, ends)
    for node in nodes.values():
        if node["mode"] in (MUTED, BYPASSED) or node["id"] in inner:
            continue
        values = node.get("widgets_values")
        inputs = dict(
            zip(WIDGETS.get(node["type"], "").split(), values if isinstance(values, list) else [], strict=False)
        )
        for each in node.get("inputs") or []:
            begins = source(*links[each["link"]]) if each.get("link") in links else None
            inputs |= {each["name"]: begins if len(begins) > 1 else begins[0]} if begins else {}
        prompt[f"{place}{node['id']}"] = {"class_type": node["type"], "inputs": inputs}
    return source


def templates() -> Iterator[tuple[str, Prompt]]:
    """Each template of core's, as it is saved, with its switches on, and with them off."""
    root = Path(os.environ.get("COMFYUI_PATH") or "~/comfy/ComfyUI").expanduser()
    paths = [*root.glob("*venv/lib/python*/site-packages/comfyui_workflow_templates_json/templates/*.json")]
    if not paths:
        pytest.skip(f"no ComfyUI in {root} with its templates")
    for path in paths:
        saved, prompt = json.loads(path.read_text(encoding="utf-8")), Prompt()
        if isinstance(saved, dict) and "nodes" in saved:
            subgraphs = {each["id"]: each for each in saved.get("definitions", {}).get("subgraphs", [])}
            flat(saved, subgraphs, prompt, "", lambda *_: None)
            yield path.stem, prompt
            for switch in (True, False):
                for entry in prompt.values():
                    entry["inputs"] |= {"switch": switch} if entry["class_type"] == "ComfySwitchNode" else {}
                yield f"{path.stem}, switches {switch}", prompt


def test_no_template_of_cores_is_told_anything() -> None:
    """As if Fit stood behind each loader; samplers of files in the catalogue are counted: none would prove nothing."""
    judged = []
    for name, prompt in templates():
        for node, entry in prompt.items():
            if "latent_image" in entry["inputs"]:
                found = settings(prompt, node)
                judged += [name] * bool(found["files"])
                told = [differences(row, found) for row in found["files"].values()]
                assert not told or not all(told), (name, node, [*found["files"]], told)
    assert len(judged) >= 120 and len(set(judged)) >= 80, (len(judged), len(set(judged)))
