"""Shipped workflows are whole and their replays are fresh; no ComfyUI needed."""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from host.prompts import (
    PREFIX,
    REPLAYS,
    ROOT,
    WORKFLOWS,
    apps,
    fitted,
    from_files,
    painted,
    replay,
    replay_path,
    shipped,
    two_passes,
)

SNAPSHOT = ROOT / "tests/fixtures/schemas.json"
CORE = {"MarkdownNote", "LoadImage", "LoadVideo", "GetVideoComponents", "SaveVideo"}
CORE |= {
    "UnwrapMesh",
    "DecimateMesh",
    "MeshSmoothNormals",
    "MeshToFile3D",
    "SaveGLB",
    "Preview3D",
    "PreviewImage",
    "LatentUpscaleBy",
    "UpscaleModelLoader",
    "ImageUpscaleWithModel",
}
CORE |= {"ImageOnlyCheckpointLoader", "ModelSamplingAuraFlow", "CLIPVisionEncode", "Hunyuan3Dv2Conditioning"}
CORE |= {"CreateVideo", "EmptyHunyuanLatentVideo", "EmptyHunyuanVideo15Latent", "EmptyLTXVLatentVideo", "VAEDecode"}
CORE |= {"EmptyMochiLatentVideo", "FluxGuidance", "LTXVConditioning"}
CORE |= {"EmptyLatentHunyuan3Dv2", "KSampler", "VAEDecodeHunyuan3D", "VoxelToMesh"}
CORE |= {"UNETLoader", "CLIPLoader", "VAELoader", "CheckpointLoaderSimple", "CLIPTextEncode", "ModelSamplingSD3"}
CORE |= {"LTXAVTextEncoderLoader", "LTXVAudioVAELoader", "LTXVEmptyLatentAudio", "LTXVConcatAVLatent", "LTXVScheduler"}
CORE |= {"LTXVSeparateAVLatent", "LTXVAudioVAEDecode", "RandomNoise", "KSamplerSelect", "CFGGuider", "BasicGuider"}
CORE |= {"SamplerCustomAdvanced", "BasicScheduler", "VAEDecodeAudio", "Wan22ImageToVideoLatent"}
CORE |= {"MiniMaxH3ImageToVideo", "DualCLIPLoader", "Kandinsky5ImageToVideo", "CosmosPredict2ImageToVideoLatent"}
CORE |= {"LoraLoaderModelOnly", "CLIPVisionLoader", "WanAnimate2ToVideo", "WanAnimate2Cache", "TrimVideoLatent"}
CORE |= {"ImageFromBatch", "InvertMask"}
FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
NOTES = ("Note", "MarkdownNote")
OPTIONAL_SWITCHES = ("compile", "triton", "sage", "flash", "quant", "gguf")

each = pytest.mark.parametrize("workflow", shipped(), ids=lambda path: path.stem)


def graph_of(workflow: Path) -> dict[str, Any]:
    """The frontend's graph in a file."""
    graph: dict[str, Any] = json.loads(workflow.read_text(encoding="utf-8"))
    return graph


@cache
def node_trees() -> list[ast.Module]:
    """The files of ``nodes/``, parsed."""
    return [ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "nodes").glob("*.py"))]


@cache
def node_ids() -> set[str]:
    """Every ``node_id`` in ``nodes/``, read without importing it: it needs ComfyUI."""
    return {
        keyword.value.value
        for tree in node_trees()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "node_id" and isinstance(keyword.value, ast.Constant)
    }


@cache
def execute_arguments() -> dict[str, set[str]]:
    """Node id to the names that ``execute`` takes; ``**`` among them where it takes any."""
    found: dict[str, set[str]] = {}
    for cls in (item for tree in node_trees() for item in tree.body if isinstance(item, ast.ClassDef)):
        run = next((item for item in cls.body if isinstance(item, ast.FunctionDef) and item.name == "execute"), None)
        if run is not None:
            names = {argument.arg for argument in (*run.args.args, *run.args.kwonlyargs)} - {"cls"}
            found[f"AnyGPU{cls.name}"] = names | ({"**"} if run.args.kwarg else set())
    return found


def test_every_name_bears_our_prefix_and_is_there_once() -> None:
    """A name that another pack or core has ends ComfyUI's own template search: its index takes each name once."""
    for folder in (WORKFLOWS, REPLAYS):
        names = [path.name for path in folder.iterdir()]
        assert names and all(name.startswith(PREFIX) for name in names), folder
        assert len({name.casefold() for name in names}) == len(names), "one file on Windows and macOS"
    beside = [name for name in ("example_workflows", "example", "examples", "workflow") if (ROOT / name).exists()]
    assert not beside, "core takes templates from each of these folders too: the same names twice"


def test_every_family_has_a_workflow_and_one_redraws_a_video() -> None:
    names = {path.stem for path in shipped()}
    assert all(any(name.startswith(f"{PREFIX}{family}") for name in names) for family in FAMILIES)
    assert "anygpu_ltx_video_to_video" in names


def test_every_replay_belongs_to_a_workflow() -> None:
    assert {path.name for path in REPLAYS.glob("*.api.json")} == {replay_path(workflow).name for workflow in shipped()}


@each
def test_replay_is_fresh_and_says_what_the_workflow_says(workflow: Path) -> None:
    prompt, nodes = replay(workflow), {str(node["id"]): node for node in graph_of(workflow)["nodes"]}
    assert set(prompt) == {key for key, node in nodes.items() if node["type"] not in NOTES}
    for key, posted in prompt.items():
        assert posted["class_type"] == nodes[key]["type"]
        saved, ours = nodes[key].get("widgets_values_named", {}), posted["class_type"].startswith("AnyGPU")
        for name, value in posted["inputs"].items():
            if not isinstance(value, list) and (ours or name in saved):
                assert saved[name] == value, f"{nodes[key]['type']}.{name}"


@each
def test_only_known_nodes_and_inputs(workflow: Path) -> None:
    known, takes = node_ids() | CORE, execute_arguments()
    assert {node["type"] for node in graph_of(workflow)["nodes"]} <= known
    for node in replay(workflow).values():
        accepted = takes.get(node["class_type"], {"**"})
        assert "**" in accepted or set(node["inputs"]) <= accepted, node["class_type"]


@each
def test_our_nodes_have_the_inputs_of_today(workflow: Path) -> None:
    graph, schemas = graph_of(workflow), json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    inner = [node for each in graph.get("definitions", {}).get("subgraphs", ()) for node in each["nodes"]]
    for node in (node for node in (*graph["nodes"], *inner) if node["type"] in schemas):
        wanted, given = ([each["name"] for each in some["inputs"]] for some in (schemas[node["type"]], node))
        grown = [name for name in wanted if any(each.startswith(f"{name}.") for each in given)]  # a list of inputs
        assert set(wanted) - set(grown) <= set(given), f"{node['type']}: run make workflows"


@each
def test_links_lead_from_an_output_to_an_input_of_the_same_type(workflow: Path) -> None:
    graph = graph_of(workflow)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert graph["links"], "nothing is connected"
    for link, source, output, target, entry, kind in graph["links"]:
        assert link in nodes[source]["outputs"][output]["links"]
        assert nodes[target]["inputs"][entry]["link"] == link
        assert kind == nodes[source]["outputs"][output]["type"]
        assert kind in str(nodes[target]["inputs"][entry]["type"]).split(",")


@each
def test_nodes_do_not_overlap(workflow: Path) -> None:
    boxes = [(node["id"], *node["pos"], *node["size"]) for node in graph_of(workflow)["nodes"]]
    title = 30  # pixels above a node's position
    for index, (first, x, y, width, height) in enumerate(boxes):
        for second, x2, y2, width2, height2 in boxes[index + 1 :]:
            apart = x + width <= x2 or x2 + width2 <= x or y + height <= y2 - title or y2 + height2 <= y - title
            assert apart, f"nodes {first} and {second}"


@each
def test_it_is_narrow_enough_to_be_read_on_a_small_screen(workflow: Path) -> None:
    graph = graph_of(workflow)
    boxes = [group["bounding"] for group in graph["groups"]]
    boxes += [[*node["pos"], *node["size"]] for node in graph["nodes"]]
    width = max(box[0] + box[2] for box in boxes) - min(box[0] for box in boxes)
    height = max(box[1] + box[3] for box in boxes) - min(box[1] for box in boxes)
    assert width <= (1500 if "text_to_video" in workflow.stem else 2200)
    long = workflow in painted() or "animate" in workflow.stem  # they go on below what a small screen shows
    assert height <= (1900 if long else 1117), "1366 x 768 without side bar and menu, in letters of 8 pixels"
    assert graph["extra"]["anygpu_first_view"] is True, "web/templates.js shows the whole of it"


@each
def test_a_note_can_be_read_in_nodes_2_0(workflow: Path) -> None:
    """It writes on the note's colour in grey 160, and inline code in blue."""
    notes = [node for node in graph_of(workflow)["nodes"] if node["type"] in NOTES]
    assert notes and not any("`" in str(note["widgets_values"]) for note in notes)

    def luminance(digits: str) -> float:  # of WCAG 2.2
        shares = [int(digit * 2, 16) / 255 for digit in digits]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for note in notes:
        assert (0.3515 + 0.05) / (luminance(note["bgcolor"][1:]) + 0.05) >= 4.5, "grey 160 has a luminance of 0.3515"


def test_an_app_is_a_graph_that_opens_in_app_mode() -> None:
    """The template browser's filter counts a file as an app by the end of its name, the frontend by its switch."""
    assert len(apps()) == 2
    for path in apps():
        app, graph = graph_of(path), graph_of(path.with_name(path.name.replace(".app.", ".")))
        assert app["extra"].pop("linearMode") is True and "linearMode" not in graph["extra"]
        assert app.pop("id") != graph.pop("id") and app == graph


@each
def test_app_mode_has_its_inputs_and_its_result(workflow: Path) -> None:
    graph = graph_of(workflow)
    nodes, shown = {str(node["id"]): node for node in graph["nodes"]}, graph["extra"]["linearData"]
    asked = {(nodes[node]["type"], name) for node, name in shown["inputs"]}
    for node, name in shown["inputs"]:
        assert name in nodes[node]["widgets_values_named"]
    assert all(nodes[node]["type"] in ("SaveVideo", "SaveGLB", "Preview3D") for node in shown["outputs"])
    assert shown["outputs"] and asked
    if "text_to_video" in workflow.stem:
        assert {
            ("AnyGPUEncodePrompt", "text"),
            *(("AnyGPUSample", name) for name in ("width", "height", "frames", "seed")),
        } <= asked
    if "image_to_video" in workflow.stem:
        assert {("LoadImage", "image"), ("AnyGPUEncodePrompt", "text")} <= asked


@each
def test_note_says_what_to_download_where_to_put_it_and_what_it_takes(workflow: Path) -> None:
    (note,) = [node for node in graph_of(workflow)["nodes"] if node["type"] in NOTES]
    text = note["widgets_values"][0]
    loaders = [node["inputs"] for node in replay(workflow).values() if node["class_type"].startswith("AnyGPULoad")]
    models = [inputs["model"] for inputs in loaders if "model" in inputs]
    by_file = workflow in (*fitted(), *from_files(), *two_passes()) or any(map(_is_file, models))
    assert models or by_file
    assert all(f"ComfyUI/models/diffusers/{model}*" in text for model in models if not _is_file(model))
    files = [value for node in replay(workflow).values() for value in node["inputs"].values() if _is_file(value)]
    assert not by_file or (files and all(file in text for file in files))
    assert "huggingface.co/" in text and "GiB" in text and "not measured" in text and "*offload*" in text


def _is_file(value: Any) -> bool:
    return str(value).endswith(".safetensors")


def test_core_s_own_templates_have_one_node_between_loaders_and_all_else() -> None:
    assert len(fitted()) == 8
    for workflow in fitted():
        nodes = replay(workflow)
        takers = (("VAEDecode", "vae"), ("CLIPTextEncode", "clip"), ("MiniMaxH3ImageToVideo", "clip"))
        takers += tuple((kind, "model") for kind in ("KSampler", "CFGGuider", "BasicGuider", "BasicScheduler"))
        taken = {
            (name, nodes[inputs[name][0]]["class_type"])
            for kind, name in takers
            for inputs in (node["inputs"] for node in nodes.values() if node["class_type"] == kind)
        }
        if "rescue" in workflow.stem:
            assert taken == {("vae", "AnyGPUFitVAE")}
            continue
        model = "WanAnimate2Cache" if "animate" in workflow.stem else "AnyGPUFit"
        assert taken == {("vae", "AnyGPUFit"), ("clip", "AnyGPUFit"), ("model", model)}, workflow.stem


@each
def test_what_a_recipe_says_is_left_to_the_model(workflow: Path) -> None:
    """So that a distilled file, chosen in its place, runs as it was made for."""
    samples = [entry["inputs"] for entry in replay(workflow).values() if entry["class_type"] == "AnyGPUSample"]
    for name in ("steps", "cfg", "guidance", "shift", "scheduler", "fps"):
        assert all(inputs[name] in (0, "auto") or isinstance(inputs[name], list) for inputs in samples), name


@each
def test_nothing_optional_is_switched_on(workflow: Path) -> None:
    for node in replay(workflow).values():
        for name, value in node["inputs"].items():
            named = f"{name}={value}".lower()
            idle = value is False or name.startswith("compile_")  # how to compile, where compile itself is off
            assert idle or "text" in name or not any(switch in named for switch in OPTIONAL_SWITCHES)
        if "offload" in node["inputs"]:
            assert (node["inputs"]["offload"], node["inputs"]["precision"]) == ("auto", "auto")
