"""The routes of the side bar: what they answer, that they change nothing, and that they survive whatever is sent."""

import asyncio
import importlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp.web
import layouts
import pytest
import small_comfyui
import tiny
import torch
from aiohttp.test_utils import TestClient, TestServer
from anygpu.compat.device.facts import facts_for, free_bytes
from anygpu.compat.device.probe_store import IN_RUNS, OK, ProbeResult, ProbeStore
from anygpu.compat.device.work import Pace
from anygpu.compat.memory.statistics import MemoryStats, StageNeed
from anygpu.compat.probe_results import probe_results_of
from anygpu.compat.report import MISSED
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.paint import loading as paint_loading
from anygpu.pipelines.base import Latents
from anygpu.pipelines.family import GuidanceStep, Recipe
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.forecast import seconds
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.forecast.times import StageTime, TimeForecast, Times
from anygpu.pipelines.latents import recovery as store
from anygpu.pipelines.latents.convert import to_core
from anygpu.pipelines.latents.store import save_latent
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pictures import picture_size
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from PIL import Image
from published import loops
from safetensors.torch import load_file, save_file

from paint import mv_stored, stored

WEB = Path(__file__).resolve().parent.parent / "web"
STOOD_IN = ("server", "requests", "folders", "memory_manager", "recovery", "saved", "model_files")
SERVER = ("routes", "forecast", "panel", "paused")
TRAVERSALS = [
    "../../etc/passwd", "..\\..\\secret", "/etc/passwd", "%2e%2e%2fsecret", "a/../../b", "C:\\x", "\0", "", ".",
]  # fmt: skip


class Pack(SimpleNamespace):
    """The pack's host modules on a stand-in for ComfyUI, and the folder that everything lies in."""

    def ask(self, method: str, path: str, **sent: Any) -> tuple[int, Any, str]:
        """Status, JSON (None for anything else) and content type of one request to a real server."""
        return self.ask_all([(method, path, sent)])[0]

    def ask_all(self, requests: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[int, Any, str]]:
        """What one server answers to requests one after another."""

        async def talk() -> list[tuple[int, Any, str]]:
            table = aiohttp.web.RouteTableDef()
            assert self.routes.add_routes(table)
            app = aiohttp.web.Application()
            app.add_routes(table)
            app.router.add_static(f"/extensions/{WEB.parent.name}", WEB)  # as ComfyUI serves it, after all routes
            async with TestClient(TestServer(app)) as client:
                return [await one(client, *request) for request in requests]

        async def one(client: TestClient, method: str, path: str, sent: dict[str, Any]) -> tuple[int, Any, str]:
            async with client.request(method, path, **sent) as answer:
                text = await answer.text()
            try:
                return answer.status, json.loads(text), answer.content_type
            except ValueError:
                return answer.status, None, answer.content_type

        return asyncio.run(talk())

    def files(self) -> dict[str, bytes]:
        """Every file beside the models, with its content."""
        return {str(p): p.read_bytes() for p in self.home.rglob("*") if p.is_file() and "models" not in p.parts}


@pytest.fixture
def pack(tmp_path, monkeypatch) -> Iterator[Pack]:
    """The routes on a stand-in for ComfyUI: its folders in ``tmp_path``, its device the CPU, no run."""
    (tmp_path / "models").mkdir()
    paths = SimpleNamespace(
        folder_names_and_paths={"diffusers": ([str(tmp_path / "models")], set())},
        get_folder_paths=lambda key: [str(tmp_path / "models")],
        get_temp_directory=lambda: str(tmp_path / "temp"),
        get_user_directory=lambda: str(tmp_path / "user"),
        get_input_directory=lambda: str(tmp_path / "input"),
        get_output_directory=lambda: str(tmp_path / "output"),
        get_annotated_filepath=lambda name: str(tmp_path / "input" / name),
        get_directory_by_type=lambda kind: str(tmp_path / kind),
    )
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([], []))
    memory = SimpleNamespace(
        compute_device=lambda: torch.device("cpu"), offloader_on=None, room_on=free_bytes, cards=dict
    )
    files = SimpleNamespace(chosen_files=partial(chosen_files, tmp_path / "models"), tokenizers=dict)

    def folder() -> Path:
        assert threading.current_thread() is not threading.main_thread(), "ComfyUI's server waits for a disk"
        return tmp_path / "kept"

    kept = SimpleNamespace(  # the store is the real one; what draws its pictures needs ComfyUI's latent formats
        listing=lambda: store.listing(folder()),
        load=lambda name, *given: store.load(folder(), name, *given or (print,)),
        thumbnail=lambda name: f"picture of {store.path_of(folder(), name)}".encode(),
    )
    saved = SimpleNamespace(file_named=lambda kind, name: tmp_path / "input" / name)
    server = SimpleNamespace(prompt_queue=queue, client_id=None)
    canvas = SimpleNamespace(get_display_node_id=lambda node_id: node_id)
    stand_ins = {
        "anygpu.host.recovery": kept,
        "anygpu.host.saved": saved,
        "folder_paths": paths,
        "server": SimpleNamespace(PromptServer=SimpleNamespace(instance=server)),
        "comfy_execution": ModuleType("comfy_execution"),
        "comfy_execution.utils": SimpleNamespace(get_executing_context=lambda: None),
        "comfy_execution.graph_utils": SimpleNamespace(is_link=small_comfyui.is_link),
        "comfy_execution.progress": SimpleNamespace(get_progress_state=lambda: SimpleNamespace(dynprompt=canvas)),
        "anygpu.host.memory_manager": memory,
        "anygpu.host.model_files": files,
    }
    host = importlib.import_module("anygpu.host")
    forget(host)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(host).update(memory_manager=memory, recovery=kept, saved=saved, model_files=files)
    yield Pack(
        routes=importlib.import_module("anygpu.host.server.routes"),
        panel=importlib.import_module("anygpu.host.server.panel"),
        queue=queue,
        server=server,
        home=tmp_path,
    )
    forget(host)


def chosen_files(models: Path, task: str, **names: str) -> Files:
    """The files of these names in one folder for all, as ComfyUI has several."""
    return Files({part: models / name for part, name in names.items() if name != "auto"}, task=task)


def forget(host: ModuleType) -> None:
    """Let the next import read the modules anew; `from . import` asks the package before ``sys.modules``."""
    for name in SERVER:
        sys.modules.pop(f"anygpu.host.server.{name}", None)
    for name in STOOD_IN:
        sys.modules.pop(f"anygpu.host.{name}", None)
        vars(host).pop(name, None)


def weights_on(pack: Pack, tiny_folder, name: str, published: str) -> None:
    """Put a tiny checkpoint among the models."""
    (pack.home / "models" / published).symlink_to(tiny.build(name, tiny_folder), target_is_directory=True)


def graph_of(**inputs: Any) -> dict[str, Any]:
    chosen = {"model": "LTX-Video", "precision": "auto", "offload": "auto", **inputs}
    loader = {"class_type": "AnyGPULoadPipeline", "inputs": chosen}
    return {"prompt": {"7": loader, "8": {"class_type": "X", "inputs": {}}}}


def test_the_machine_is_told_without_asking_it_anything(pack):
    status, found, _ = pack.ask("GET", "/anygpu/machine")
    assert status == 200
    assert found["memory"]["device"]["name"] == "CPU" and found["memory"]["host"]["free"] > 0
    assert {status_light["colour"] for status_light in found["lights"]} == {"grey"} and not found["asked"]
    assert found["sections"][0]["heading"] == "Device"
    assert found["limits"]["offload"].keys() == {"model", "group", "sequential"}
    assert str(pack.home / "models") in found["first_run"]
    assert "https://huggingface.co/Lightricks" in found["first_run"]
    assert (
        "Workflows of LTX-Video, HunyuanVideo (text to video), HunyuanVideo 1.5 (text to video), FramePack, Mochi 1 run"
        in found["first_run"]
    )
    assert pack.files() == {}, "reading wrote something"


def test_the_machine_tells_what_runs_found_wrong(pack):
    state = Path(importlib.import_module("anygpu.host.folders").state_folder())
    probe_results_of(facts_for("cpu"), state).keep(IN_RUNS, {"mm fp16 of 4096": "the host"})
    told = {section["heading"]: section["lines"] for section in pack.ask("GET", "/anygpu/machine")[1]["sections"]}
    assert [line["subject"] for line in told[MISSED]] == ["mm fp16 of 4096"]


def test_asking_the_device_lights_every_lamp_and_is_kept(pack):
    (status, found, _), (_, again, _) = pack.ask_all(
        [("POST", "/anygpu/probes", {"json": {}}), ("GET", "/anygpu/machine", {})]
    )
    assert status == 200 and found["asked"]
    assert {"green"} <= {status_light["colour"] for status_light in found["lights"]} <= {"green", "amber", "red"}
    assert all(status_light["advice"] for status_light in found["lights"] if status_light["colour"] == "red")
    assert again["lights"] == found["lights"]
    assert list(pack.files()), "the answers are kept"


def test_the_parts_of_an_error_are_told_to_who_has_its_text(pack):
    from anygpu.compat.errors import InputError

    error = InputError("width 16", expected="32 or more", fix="The nearest value is 32.")
    status, found, _ = pack.ask("POST", "/anygpu/error", json={"message": f"{error}\n"})
    assert status == 200 and found == {"found": "width 16", "expected": "32 or more", "fix": "The nearest value is 32."}


def test_a_disk_that_fails_is_told_in_three_parts(pack, monkeypatch):
    def fails() -> None:
        raise OSError(5, "Input/output error", "/models")

    monkeypatch.setattr(sys.modules["anygpu.host.server.panel"], "facts", fails)
    status, told, _ = pack.ask("GET", "/anygpu/machine")
    assert status == 400 and told["error"]["found"] == "'/models' cannot be read (Input/output error)"


def test_help_that_is_in_no_other_language_is_found_in_english(pack):
    asked = ("AnyGPUSample.md", "AnyGPUSample/en.md", "AnyGPUNothing.md", "AnyGPU%2e%2e.md", "KSampler.md")
    found = pack.ask_all([("GET", f"/extensions/{WEB.parent.name}/docs/{path}", {}) for path in asked])
    assert [status for status, _, _ in found] == [200, 200, 404, 404, 404]
    assert found[0] == found[1], "the same page"


def test_the_device_is_not_asked_during_a_run(pack):
    pack.queue.get_current_queue_volatile = lambda: (["a prompt"], [])
    for status, found, _ in pack.ask_all([("POST", f"/anygpu/{path}", {"json": {}}) for path in ("probes", "share")]):
        assert status == 409 and found["error"]["found"] == "a run is in progress"
    assert pack.files() == {}


def test_the_file_to_share_is_that_of_the_command_and_is_only_shown(pack, monkeypatch):
    """A name of this user or computer, wherever it stands, is not in it."""
    machines = importlib.import_module("anygpu.pipelines.records.machines")
    precisions = importlib.import_module("anygpu.pipelines.report").precisions
    names = ("annette", str(pack.home.parent.name))
    state = Path(importlib.import_module("anygpu.host.folders").state_folder())
    with MemoryStats(state).stage("text", f"ltx of Annette in {pack.home}", "comfyui", torch.device("cpu")):
        pass
    monkeypatch.setattr(machines, "own_names", lambda: names)
    status, found, _ = pack.ask("POST", "/anygpu/share", json={})
    kept = sorted(Path(path).name.partition("-")[0] for path in pack.files())
    assert status == 200 and found["file"] == "anygpu-machine.json" and found["form"].startswith("https://github.com/")
    assert (
        found["text"] == machines.this_machine("cpu", state, precisions()).text()
        and "ltx of <name> in <path>" in found["text"]
    )
    assert not [name for name in names if name in found["text"].lower()]
    assert json.loads(found["text"])["runs"] and kept == ["memory.json", "probes"], "no file but answers"


def test_a_graph_is_decided_before_it_runs(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    status, found, _ = pack.ask("POST", "/anygpu/graph", json=graph_of())
    (card,) = found["pipelines"]
    assert status == 200 and (card["node"], card["title"], card["model"]) == ("7", "LTX-Video", "LTX-Video")
    decided = {decision["subject"]: decision for decision in card["decisions"]}
    assert {"precision", "offload", "attention", "Conv3d"} <= decided.keys()
    assert all(decision["verdict"] and decision["why"] for decision in decided.values())
    assert "fp32" in decided["precision"]["verdict"] and card["by_tables"]
    assert pack.files() == {} and not found["recipes"], "reading wrote something"
    model = {"lora_name": "minimax_h3_fl2v_turbo_8step_v1.0.safetensors", "strength_model": 1.0}
    prompt = {"1": ("LoraLoaderModelOnly", model), "2": ("AnyGPUFit", {"model": ["1", 0]})}
    prompt["3"] = ("KSampler", {"model": ["2", 0], "latent_image": ["4", 0], "steps": 20, "cfg": 1.0})
    asked = {node: {"class_type": kind, "inputs": inputs} for node, (kind, inputs) in prompt.items()}
    (told,) = pack.ask("POST", "/anygpu/graph", json={"prompt": asked})[1]["recipes"]
    assert told["node"] == "3" and told["found"] == "minimax_h3_fl2v_turbo_8step_v1.0 in a graph with 20 steps"
    assert told["expected"] == "8 steps, cfg 1, shift 12" and told["fix"].startswith(
        "Set these around KSampler. Source: "
    )


def test_what_a_run_will_need_is_forecast_through_nodes_that_pass_the_pipeline_on(pack, tiny_folder):
    """Larger videos need more, and the same pipeline asked directly says the same bytes."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    asked = []
    for frames in (9, 97):
        body = graph_of()
        body["prompt"]["9"] = {"class_type": "AnyGPULoRA", "inputs": {"pipeline": ["7", 0]}}
        sizes = {"width": 64, "height": 64, "frames": frames, "cfg": 1.0}
        sizes |= {"frames": ["11", 0]} if frames == 97 else {}
        body["prompt"]["11"] = {"class_type": "PrimitiveInt", "inputs": {"value": frames}}
        body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["9", 0], **sizes}}
        asked.append(("POST", "/anygpu/graph", {"json": body}))
    small, large = (found["forecasts"][0] for _, found, _ in pack.ask_all(asked))
    assert small["node"] == "10" and small["found"].startswith("64x64, 9 frames, offload ")
    assert large["found"].startswith("64x64, 97 frames, offload "), "a Primitive's"
    assert [stage["stage"] for stage in small["stages"]] == ["text", "sampling", "decoding"]
    own = load(LoadRequest(pack.home / "models" / "LTX-Video", device="cpu"))
    needs = forecast(own, Size(64, 64, 9))
    assert [stage["peak"] for stage in small["stages"]] == [stage.total + stage.ahead for stage in needs.stages]
    assert all(b["peak"] > a["peak"] for a, b in zip(small["stages"][1:], large["stages"][1:], strict=True))
    assert {stage["fits"] for stage in small["stages"]} == {"fits"}


def test_minutes_are_told_once_a_run_has_timed_the_device(pack, tiny_folder):
    """On a CPU too, and before every probe has run."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    body = graph_of()
    inputs = {"pipeline": ["7", 0], "width": 64, "height": 64, "frames": 9}
    body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": inputs}
    state = Path(importlib.import_module("anygpu.host.folders").state_folder())
    _, told, _ = pack.ask("POST", "/anygpu/graph", json=body)
    said = "Fits, time unknown: CPU was not timed yet, and no data sheet of it is known. "
    assert told["forecasts"][0]["headline"].startswith(said) and told["forecasts"][0]["seconds"] == {}
    pace = Pace(1e9, 1e9, 1e9, 1e9, 0.0)
    for heads in (64, 128):
        name = f"rates of float32 values, heads of {heads}"
        probe_results_of(facts_for("cpu"), state).remember(name, lambda: asdict(pace))
    _, told, _ = pack.ask("POST", "/anygpu/graph", json=body)
    assert told["pipelines"][0]["by_tables"] and told["forecasts"][0]["headline"].startswith("Fits, about ")
    assert [*told["forecasts"][0]["seconds"]] == ["text", "sampling", "decoding"]


def paced(rate: float = 1e6) -> None:
    """Let the CPU have been timed."""
    state = Path(importlib.import_module("anygpu.host.folders").state_folder())
    for heads in (64, 128):
        pace = asdict(Pace(rate, rate, rate, rate, 0.0))
        probe_results_of(facts_for("cpu"), state).remember(f"rates of float32 values, heads of {heads}", pace.copy)


@pytest.mark.full
def test_guidance_is_priced_as_its_widgets_have_it(pack, tiny_folder, monkeypatch):
    """A 0 that is a choice, such as no STG, is one; without blocks to leave out STG takes nothing."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    paced()
    rows = GuidanceStep(0.0, 3.0, 0.0, 0.0, (1,))

    def told(**inputs: float) -> float:
        body = graph_of()
        sizes = {"width": 64, "height": 64, "frames": 9, "steps": 10, "cfg": 3.0, "cfg_end": 1.0, "stg": -1.0}
        body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["7", 0], **sizes, **inputs}}
        (found,) = pack.ask("POST", "/anygpu/graph", json=body)[1]["forecasts"]
        return found["seconds"]["sampling"]

    plain, alone = told(), told(cfg=1.0)
    assert alone < told(cfg_end=0.3) < told(cfg_end=0.6) < plain == told(stg=0.0) == told(stg=1.0)
    assert told(cfg_end=0.0) == told(cfg_start=1.0) == alone
    monkeypatch.setattr(seconds, "recipe_of", lambda *_: Recipe("", "", 10, (rows,)))
    assert plain == told(stg=0.0) < told(stg=1.0)


def test_noise_levels_from_another_node_count_in_place_of_the_steps(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    paced()

    def told(kind: str = "", **inputs: Any) -> dict[str, Any]:
        body, sizes = graph_of(), {"width": 64, "height": 64, "frames": 9, "steps": 10}
        body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["7", 0], **sizes, **inputs}}
        if kind:
            body["prompt"]["10"]["inputs"] = {"pipeline": ["7", 0], **sizes, "sigmas": ["11", 0], "steps": 40}
            body["prompt"]["11"] = {"class_type": kind, "inputs": inputs}
            body["prompt"]["12"] = {"class_type": "PrimitiveInt", "inputs": {"value": 10}}
        (found,) = pack.ask("POST", "/anygpu/graph", json=body)[1]["forecasts"]
        return found

    def peaks(found: dict[str, Any]) -> list[int]:
        return [stage["peak"] for stage in found["stages"]]

    plain = told()
    assert told(sigmas=5)["seconds"] == plain["seconds"], "what is no link is left to the run"
    levels = ", ".join(f"{level / 10:g}" for level in range(10, -1, -1))
    for known in (told("BasicScheduler", steps=["12", 0]), told("ManualSigmas", sigmas=levels)):
        assert known["seconds"] == plain["seconds"] and peaks(known) == peaks(plain)
    for inputs in (
        {"sigmas": ["12", 0], "step": 4},
        {"sigmas": ["11", 0], "step": 4},
        {"sigmas": ["11", 0], "steps": 2},  # put between each two
        {"steps": 10, "denoise": 0.5},  # of which some nodes make 10 and others 5
        {"steps": "8"},
        {"sigmas": ""},
        {"steps": 10**9},
    ):
        unknown = told("SplitSigmas", **inputs)
        assert peaks(unknown) == peaks(plain) and not unknown["seconds"] and not unknown["advice"]
        assert ", time unknown: sigmas is from SplitSigmas. " in unknown["headline"]


def test_a_run_from_latents_is_told_at_their_size_and_by_the_recipe_of_its_pass(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    loops.ltx_upscaler(pack.home / "models").rename(pack.home / "models" / "up.safetensors")
    sys.modules["folder_paths"].folder_names_and_paths["latent_upscale_models"] = None
    paced()
    prompt = {"7": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "LTX-Video", "variant": "distilled"}}}
    for node, kind, more in (
        ("1", "AnyGPUSample", {"width": 96, "height": 64, "frames": 17, "steps": 20}),
        ("2", "AnyGPUSaveLatent", {"latent": ["1", 0]}),
        ("3", "AnyGPUUpscaleLatents", {"latent": ["2", 0], "upscaler": "up.safetensors"}),
        ("4", "AnyGPUSample", {"latent": ["3", 0], "width": 512}),
        ("5", "AnyGPUSample", {"latent": ["1", 0], "denoise": 0.4, "steps": 20}),
        ("6", "AnyGPUSample", {"latent": ["8", 0], "width": 64, "height": 64, "frames": 9}),
        ("8", "AnyGPUEncodeVideo", {"width": 64, "height": 64}),
    ):
        prompt[node] = {"class_type": kind, "inputs": {"pipeline": ["7", 0], **more}}
    told = {each["node"]: each for each in pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]}
    sizes = [told[node]["found"].partition(" frames")[0] for node in ("1", "4", "5")]
    assert sizes == ["96x64, 17", "192x128, 17", "96x64, 17"]
    assert told["5"]["seconds"] == told["1"]["seconds"] and not [
        *filter(None, (a["input"] for a in told["5"]["advice"]))
    ]
    del prompt["4"]["inputs"]["latent"]
    prompt["4"]["inputs"] |= {"width": 192, "height": 128, "frames": 17}
    alone = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"][1]
    peaks = [[stage["peak"] for stage in each["stages"]] for each in (told["4"], alone)]
    assert alone["found"] == told["4"]["found"] and peaks[0] == peaks[1]
    assert told["4"]["seconds"]["sampling"] == pytest.approx(3 / 7 * alone["seconds"]["sampling"], rel=0.01)
    assert told["6"]["error"]["found"] == "memory and time unknown: latent is from AnyGPUEncodeVideo"


def test_a_decode_is_told_as_its_node_does_it(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    paced()
    prompt = {
        "7": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "LTX-Video"}},
        "1": {
            "class_type": "AnyGPUSample",
            "inputs": {"pipeline": ["7", 0], "width": 128, "height": 128, "frames": 17},
        },
        "2": {"class_type": "AnyGPUSaveLatent", "inputs": {"latent": ["1", 0]}},
        "3": {"class_type": "AnyGPUDecode", "inputs": {"pipeline": ["7", 0], "latent": ["2", 0]}},
    }

    def told(**inputs: Any) -> tuple[Any, ...]:
        prompt["3"]["inputs"] |= inputs
        (found,) = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]
        if "error" in found:
            return (found["error"]["found"],)
        (stage,) = [stage for stage in found["stages"] if stage["stage"] == "decoding"]
        return stage["peak"], stage["fits"], found["seconds"]["decoding"]

    (whole, fits, seconds), tiled = told(), told(method="tiled", tile_size=64)
    assert fits == "fits" and tiled[0] < 0.5 * whole and tiled[1] == "in parts" and tiled[2] > seconds
    assert told(method="draft") == (whole, fits, seconds) == told(method="full")
    prompt["9"] = {"class_type": "PrimitiveInt", "inputs": {"value": 64}}
    assert told(method="tiled", tile_size=["9", 0])[::2] == tiled[::2], "a Primitive's"
    assert told(method="tiled", tile_size=8) == ("tile 8 pixels",), "before the run, not behind its sampling"


def test_latents_of_files_and_core_s_empty_ones_are_told_at_their_size(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    paced()
    folder = pack.home / "kept"
    (pack.home / "input").mkdir()
    made = Latents(torch.zeros(1, 128, 3, 2, 3), "ltx", "text", 17, 64, 96, 25.0, 1)
    save_latent(pack.home / "input" / "mine.safetensors", to_core(made), print)
    store.save(folder, made, print)
    store.save(folder, replace(made, family="mochi"), print)
    empty = {"width": 96, "height": 64, "length": 17, "batch_size": 1}
    starts = [
        ("AnyGPULoadLatent", {"file": "mine.safetensors"}),
        ("AnyGPURecoverLatents", {"kept": "newest", "pipeline": ["7", 0]}),
        ("EmptyLTXVLatentVideo", empty),
        ("EmptyLTXVLatentVideo", {**empty, "batch_size": 2}),
        ("AnyGPURecoverLatents", {"kept": "newest"}),
        ("AnyGPULoadLatent", {"file": "gone"}),
        ("EmptyImage", {"width": 96, "height": 64}),
    ]
    own = {"pipeline": ["7", 0], "width": 96, "height": 64, "frames": 17}
    prompt = {"7": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "LTX-Video"}}}
    prompt["8"] = {"class_type": "AnyGPUSample", "inputs": own}
    for node, (kind, inputs) in enumerate(starts):
        prompt[f"1{node}"] = {"class_type": kind, "inputs": inputs}
        prompt[f"2{node}"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["7", 0], "latent": [f"1{node}", 0]}}
    plain, *told = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]
    found, seconds = ([each.get(name) for each in told] for name in ("found", "seconds"))
    assert found[:3] == [plain["found"]] * 3 and found[3] == plain["found"].replace(" frames", " frames, 2 videos")
    assert seconds[:3] == [plain["seconds"]] * 3
    assert seconds[3]["sampling"] == pytest.approx(2 * plain["seconds"]["sampling"], abs=0.1)
    other, gone, unknown = (each["error"]["found"] for each in told[4:])
    assert (other, unknown) == ("these latents made for 'mochi'", "memory and time unknown: latent is from EmptyImage")
    assert gone.startswith("no file ")
    drawn = {**prompt, "12": {"class_type": "EmptyLTXVLatentVideo", "inputs": {**empty, "seed": 123_456_789}}}
    assert pack.ask("POST", "/anygpu/graph", json={"prompt": drawn})[1]["forecasts"][3]["seconds"] == plain["seconds"]
    for more in ({"batch_size": 2_000_000}, dict.fromkeys(empty, 900_000_000)):  # rows that would fill the memory
        huge = {**prompt, "12": {"class_type": "EmptyLTXVLatentVideo", "inputs": {**empty, **more}}}
        told = pack.ask("POST", "/anygpu/graph", json={"prompt": huge})[1]["forecasts"]
        assert told[3]["error"]["found"] == "memory and time unknown: latent is from EmptyLTXVLatentVideo"


def test_advice_names_the_widget_that_makes_it_and_follows_what_nodes_on_the_way_change(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    paced()

    def told(between: str = "X", inputs: dict[str, Any] = {}, frames: Any = 97) -> tuple[list[Any], float]:  # noqa: B006
        body = graph_of()
        sizes = {"width": 64, "height": 64, "frames": frames}
        body["prompt"]["9"] = {"class_type": between, "inputs": {"pipeline": ["7", 0], **inputs}}
        body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["9", 0], **sizes}}
        (found,) = pack.ask("POST", "/anygpu/graph", json=body)[1]["forecasts"]
        lines = [(each["node"], each["input"], each["value"]) for each in found["advice"]]
        absent = [each["text"].endswith("; no widget of this graph sets it") for each in found["advice"]]
        assert absent == [not node for node, _, _ in lines]
        return lines, found["seconds"]["sampling"]

    cache, plain = {"preset": "balanced", "kind": "auto", "threshold": 0.1, "interval": 3}, told()
    assert plain[0] == [("", "", None)], "a step cache, which this graph has not"
    lines, seconds = told("AnyGPUStepCache", cache | {"preset": "off"})
    assert lines == [("9", "preset", "balanced")] and seconds == plain[1]
    lines, seconds = told("AnyGPUStepCache", cache)
    assert lines == [("10", "frames", 49)] and seconds == pytest.approx(0.6 * plain[1], rel=0.01)
    assert told("AnyGPUStepCache", cache, ["8", 0])[0] == [("", "", None)], "a linked widget"
    named = {"lora": "ltxv-2b-0.9.8-distilled-lora.safetensors", "strength": 1.0}
    assert told("AnyGPULoRA", named)[1] < 0.25 * plain[1] == 0.25 * told("AnyGPULoRA", named | {"strength": 0.0})[1]


def test_a_pipeline_composed_of_files_is_told_like_one_of_a_folder(pack, tiny_folder):
    models = pack.home / "models"
    files = layouts.whole_set("ltx", tiny_folder, models)
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    own = {part: path.name for part, path in files.items()}
    sizes = {"width": 64, "height": 64, "frames": 9, "cfg": 1.0}
    prompt = {
        "1": {"class_type": "AnyGPUComposePipeline", "inputs": {**own, "base": "LTX-Video", "task": "x"}},
        "2": {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["1", 0], **sizes}},
        "3": {"class_type": "AnyGPUComposePipeline", "inputs": {"transformer": own["vae"]}},
    }
    status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    card, wrong = found["pipelines"]
    assert status == 200 and (card["title"], card["does"]) == ("LTX-Video", "dev, text to video")
    assert wrong["model"] == own["vae"] and "expected" not in wrong["error"]["found"]
    (told,) = found["forecasts"]
    needs = forecast(load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu")), Size(64, 64, 9))
    assert [stage["peak"] for stage in told["stages"]] == [stage.total + stage.ahead for stage in needs.stages]


def test_the_demo_model_that_paints_is_told_at_its_own_size(pack):
    prompt = {"1": {"class_type": "AnyGPULoadPaintPipeline", "inputs": {"model": "hunyuan3d-paint-v2-0"}}}
    for node, size in (("2", 128), ("3", 512)):
        prompt[node] = {"class_type": "AnyGPUPaintViews", "inputs": {"pipeline": ["1", 0], "view_size": size}}
    status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    assert status == 200 and any("in place of" in str(each) for each in found["pipelines"][0]["decisions"])
    own, asked = ([stage["peak"] for stage in each["stages"]] for each in found["forecasts"])
    assert own == asked


def test_a_forecast_has_the_size_at_which_the_picture_will_be_encoded(pack, tiny_folder):
    """As the command plans the same run; a picture of unknown shape leaves the family's default."""
    for name, published in (("framepack", "FramePackI2V_HY"), ("hunyuan_video", "HunyuanVideo"), ("siglip", "flux")):
        weights_on(pack, tiny_folder, name, published)
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    (pack.home / "input").mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    Image.new("RGB", (90, 300)).save(pack.home / "input" / "tall.png", exif=turned)
    seen = {}
    for model, kind, sizes in (
        ("FramePackI2V_HY", "AnyGPUSampleFramePack", {"clip_seconds": 1.13, "fps": 30.0}),
        ("LTX-Video", "AnyGPUSample", {"frames": 9}),
        ("demo: FramePack", "AnyGPUSampleFramePack", {"clip_seconds": 5.0, "fps": 30.0}),
    ):
        for picture in ("tall.png", "gone.png", "scaled"):
            prompt = {
                "1": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": model}},
                "2": {"class_type": "LoadImage", "inputs": {"image": picture}},
                "6": {"class_type": "LoadImage", "inputs": {"image": "tall.png"}},
                "3": {"class_type": "AnyGPUEncodeImage", "inputs": {"image": ["2", 0], "fit": "nearest bucket"}},
                "4": {"class_type": "AnyGPUEncodeImage", "inputs": {"previous": ["3", 0], "width": 64, "height": 64}},
                "5": {"class_type": kind, "inputs": {"pipeline": ["1", 0], "image": ["4", 0], **sizes}},
            }
            if picture == "scaled":
                prompt["2"] = {"class_type": "ImageScale", "inputs": {"image": ["6", 0], "width": 64, "height": 640}}
            _, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
            (told,) = found["forecasts"]
            seen[model, picture] = told["found"].split(" frames")[0]
    families = {
        model: load(LoadRequest(pack.home / "models" / model, device="cpu")) for model, _ in seen if ":" not in model
    }
    for model, count in (("FramePackI2V_HY", 37), ("LTX-Video", 9)):
        width, height = picture_size(families[model], torch.empty(1, 90, 300, 3), 0, 0, "nearest bucket")
        usual = families[model].spec.sizes.defaults
        assert width > 2 * height and seen[model, "tall.png"] == f"{width}x{height}, {count}"
        assert seen[model, "gone.png"] == seen[model, "scaled"] == f"{usual.width}x{usual.height}, {count}"
    assert seen["demo: FramePack", "tall.png"] == seen["demo: FramePack", "gone.png"] == "64x64, 9"


TIMED = "a fox [1s: a dog] [2s: a cat]"


def test_a_forecast_has_the_clip_and_each_prompt_of_a_video_in_sections(pack, tiny_folder):
    for name, published in (("framepack", "FramePackI2V_HY"), ("hunyuan_video", "HunyuanVideo"), ("siglip", "flux")):
        weights_on(pack, tiny_folder, name, published)

    def told(pictures: str, text: str | list[Any], more: str = "", taken: int = 0) -> dict[str, Any]:
        prompt = {
            "1": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "FramePackI2V_HY"}},
            "2": {"class_type": pictures, "inputs": {}},
            "3": {"class_type": "AnyGPUEncodeImage", "inputs": {"image": ["2", 0]}},
            "4": {"class_type": "AnyGPUEncodePrompt", "inputs": {"text": text, "section_prompts": more}},
            "5": {"class_type": "AnyGPUSampleFramePack", "inputs": {"pipeline": ["1", 0], "clip_seconds": 5.0}},
        }
        prompt["5"]["inputs"] |= {"prompt": ["4", 0], "image": ["3", 0], "fps": 30.0, "texts": 3, "clip": 2}
        prompt["6"] = {"class_type": "GetImageRangeFromBatch", "inputs": {"images": ["2", 0], "num_frames": taken}}
        prompt["3"]["inputs"]["image"] = ["6" if taken else "2", 0]
        prompt["7"] = {"class_type": "PrimitiveString", "inputs": {"value": TIMED}}
        (found,) = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]
        return found

    paced(1e7)
    plain, clip = told("LoadImage", "a fox"), told("GetVideoComponents", TIMED)
    assert told("GetVideoComponents", ["7", 0])["seconds"] == clip["seconds"], "a text of another node"

    def peaks_of(found: dict[str, Any]) -> dict[str, int]:
        return {stage["stage"]: stage["peak"] for stage in found["stages"]}

    peaks = map(peaks_of, (plain, clip))
    assert all(after[name] > before[name] for before, after in [tuple(peaks)] for name in ("image", "sampling"))
    assert all(clip["seconds"][name] > plain["seconds"][name] for name in ("text", "image", "sampling"))
    for taken, found in ((40, told("GetVideoComponents", "a fox")), (1, plain)):
        assert peaks_of(told("VHS_LoadVideoFFmpegPath", "a fox", taken=taken)) == peaks_of(found)
    assert told("LoadImage", "[1s: a]", "b")["error"]["found"].endswith("with and without a time")


def test_a_node_that_delights_is_told_of_delight_alone(pack, monkeypatch):
    loader = {"class_type": "AnyGPULoadPaintPipeline", "inputs": {"model": stored.FOLDERS["delight"]}}
    prompt = {"1": loader}
    for node, kind in (("2", "AnyGPUDelightImage"), ("3", "AnyGPUPaintViews")):
        prompt[node] = {"class_type": kind, "inputs": {"pipeline": ["1", 0]}}

    def told() -> tuple[str, str]:
        (only,) = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]
        assert only["found"].startswith("picture, " if only["node"] == "2" else "views, ")
        return only["node"], only["headline"].rpartition("free.")[2]

    monkeypatch.setattr(importlib.import_module("anygpu.host.memory_manager"), "room_on", lambda _: 1)
    assert told() == ("3", " Lower view_size."), "the demo model, which leaves light"
    stored.checkpoint("delight", pack.home / "models")
    assert told() == ("2", " Lower size.")
    painting, rows = importlib.import_module("anygpu.host.server.forecast").painting, []
    planned = painting.planned_run
    monkeypatch.setattr(painting, "planned_run", lambda *given: rows.append(given[-1]) or planned(*given))
    for negative, beside in (("", None), ("shadows", 2)):
        prompt["2"]["inputs"] |= {"text_guidance": 5.0, "negative_prompt": negative}
        rows.clear()
        assert told()[0] == "2" and {*rows} == {beside}


def test_a_pipeline_that_paints_is_told_too(pack):
    stored.checkpoint("paint", pack.home / "models")
    loader = {"class_type": "AnyGPULoadPaintPipeline", "inputs": {"model": stored.FOLDERS["paint"], "offload": "auto"}}
    prompt = {"1": loader}
    for node, size in (("2", 64), ("3", 512)):
        prompt[node] = {"class_type": "AnyGPUPaintViews", "inputs": {"pipeline": ["1", 0], "view_size": size}}
    status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    (card,) = found["pipelines"]
    assert status == 200 and (card["title"], card["does"]) == ("Hunyuan3D paint", "v2-0")
    assert "Conv3d" not in {decision["subject"] for decision in card["decisions"]}, "its networks have none"
    small, large = found["forecasts"]
    assert [stage["stage"] for stage in small["stages"]] == ["encoding", "reference", "painting", "decoding"]
    assert small["stages"][2]["peak"] < large["stages"][2]["peak"] and large["found"] == "views, offload none"


@pytest.mark.full
def test_mv_adapter_is_told_at_the_size_and_with_the_guidance_of_its_variant(pack):
    mv_stored.folder("sd21", pack.home / "models", "mine")
    prompt = {}
    for node, variant in (("1", "ig2mv"), ("2", "tg2mv")):
        file = mv_stored.adapter_file(variant, "sd21", pack.home / "models").name
        prompt[node] = {"class_type": "AnyGPULoadMVAdapter", "inputs": {"model": "mine", "adapter": file}}
        prompt[f"{node}0"] = {"class_type": "AnyGPUPaintViews", "inputs": {"pipeline": [node, 0], "view_size": 64}}
    prompt["3"] = {"class_type": "AnyGPULoadMVAdapter", "inputs": {"model": "mine", "adapter": "none"}}
    status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    cards = found["pipelines"]
    assert status == 200 and [card.get("title") for card in cards] == ["MV-Adapter", "MV-Adapter", None]
    assert "no MV-Adapter 'none'" in str(cards[2]["error"])
    stages = [[stage["stage"] for stage in each["stages"]] for each in found["forecasts"]]
    assert stages[0] == ["text", "encoding", "reference", "maps", "painting", "decoding"]
    assert stages[1] == ["text", "maps", "painting", "decoding"]


def test_mv_adapter_is_told_of_what_is_connected_and_never_of_its_model(pack, monkeypatch):
    """Core's files behind the links, through a LoRA; where they are not known, one line says so."""
    models = pack.home / "models"
    mv_stored.single_file("sdxl", models / "core.safetensors")
    own = {name: tensor for name, tensor in load_file(models / "core.safetensors").items() if "first_stage" in name}
    save_file({name.partition(".")[2]: tensor for name, tensor in own.items()}, models / "own-vae.safetensors")
    adapter = mv_stored.adapter_file("ig2mv", "sdxl", models).name
    listed = {"checkpoints": ["core.safetensors"], "vae": ["own-vae.safetensors"]}
    monkeypatch.setattr(sys.modules["folder_paths"], "get_filename_list", listed.get, raising=False)
    monkeypatch.setattr(sys.modules["folder_paths"], "get_full_path", lambda _, name: str(models / name), raising=False)
    inputs = {"model": "gone", "adapter": adapter, "core_model": ["6", 0], "core_clip": ["6", 1], "core_vae": ["5", 2]}
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "core.safetensors"}}
    prompt = {
        "1": {"class_type": "AnyGPULoadMVAdapter", "inputs": inputs},
        "2": {"class_type": "AnyGPUPaintViews", "inputs": {"pipeline": ["1", 0], "view_size": 64}},
        "5": loader,
        "6": {"class_type": "LoraLoader", "inputs": {"model": ["5", 0], "clip": ["5", 1], "lora_name": "x"}},
        "7": {"class_type": "VAELoader", "inputs": {"vae_name": "own-vae.safetensors"}},
        "8": {"class_type": "UNETLoader", "inputs": {"unet_name": "core.safetensors"}},
    }

    def told(**changed: Any) -> tuple[dict[str, Any], list[Any]]:
        inputs.update(changed)
        status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
        assert status == 200
        return found["pipelines"][0], found["forecasts"]

    card, (whole,) = told()
    assert card["model"] == "core.safetensors" and "core's MODEL, CLIP and VAE" in str(card["decisions"])
    assert [stage["stage"] for stage in whole["stages"]][:2] == ["text", "text_2"]
    other = told(core_vae=["7", 0])[1][0]["stages"]
    assert [each["least"] for each in other] == [each["least"] for each in whole["stages"]], "of another file"
    for given, how, fix in ((["8", 0], "from UNETLoader", "Run it"), ("x", "not connected", "Connect all three")):
        card, forecasts = told(core_model=given)
        assert card["error"]["found"] == f"memory and time unknown: core_model is {how}" and forecasts == []
        assert card["error"]["fix"].startswith(fix)
    loader["inputs"]["ckpt_name"] = "../core.safetensors"
    assert "core_model is from CheckpointLoaderSimple" in told(core_model=["5", 0])[0]["error"]["found"]


@pytest.mark.parametrize(
    ("room", "peak", "whole", "in_tiles"),
    [
        (1000, 1000, "fits", "in parts"),
        (999, 999, "streams", "in parts"),
        (100, 100, "streams", "in parts"),
        (99, 100, "too much", "too much"),
        (None, 1000, "", ""),
    ],
)
def test_what_does_not_fit_whole_is_told_by_what_comes_of_it(pack, room, peak, whole, in_tiles):
    """A stage that takes 1000 bytes where they are there, and can do with 100 while its weights wait outside."""
    forecasting = importlib.import_module("anygpu.host.server.forecast")
    for form, fits in (("", whole), ("in tiles", in_tiles)):
        most, least = (StageNeed("decoding", 0, 0, total, form) for total in (1000, 100))
        told = forecasting._stage_row(most, least, room)
        assert told == {"stage": "decoding", "peak": peak, "least": 100, "whole": 1000, "free": room, "fits": fits}


def test_weights_that_come_ahead_count_in_the_peak_and_a_headline_has_its_stages_free_memory(pack):
    """They come where there is room, and a stage can do without them."""
    forecasting = importlib.import_module("anygpu.host.server.forecast")
    need = StageNeed("sampling", 0, 60, 40, ahead=50)
    told = forecasting._stage_row(need, need, 200)
    assert (told["peak"], told["least"], told["fits"]) == (150, 100, "fits")
    text = {"stage": "text", "fits": "streams", "peak": 8 << 30, "least": 2 << 30, "free": 9 << 30}
    for fits, free, said in (
        ("", None, "free memory unknown, 1 s"),
        ("too much", 5 << 30, "Too much: decoding needs 2.0 GB, 5.0 GB free. Lower size."),
        ("in parts", 5 << 30, "Fits, streaming weights in text: slower, 1 s. 8.0 GB at its peak (text), 9.0 GB free."),
    ):  # each has a device of its own
        decoding = {**text, "stage": "decoding", "fits": fits, "free": free}
        assert forecasting._headline([text, decoding], ", 1 s", "size") == said


@pytest.mark.parametrize(
    ("mode", "device", "told"),
    [
        ("group", "cuda", "Fits, streaming weights in sampling: slower, time unknown: offload group lacks room"),
        ("sequential", "cuda", "Fits, about 7 s"),
        ("none", "cpu", "Too much: sampling needs 2.0 GB"),  # where nothing steps down
        ("comfyui", "cuda", "Fits, streaming weights in sampling: slower, about 7 s"),
    ],
)
def test_a_chosen_mode_without_room_steps_down_as_the_run_does(pack, monkeypatch, mode, device, told):
    forecasting = importlib.import_module("anygpu.host.server.forecast")
    bytes_of = {"none": 2 << 30, "group": 2 << 30, "sequential": 1 << 29, "comfyui": 1 << 29}
    sampling = StageTime("sampling", 7, 7, 7, 7)
    times = Times({each: TimeForecast(each, (sampling,)) for each in bytes_of})
    times.why, times.less = "", ()
    asked = "views", lambda mode: [StageNeed("sampling", 0, 0, bytes_of[mode])], times
    monkeypatch.setitem(forecasting.RUNS, "AnyGPUPaintViews", lambda *_: asked)
    monkeypatch.setattr(forecasting.memory_manager, "room_on", lambda _: 1 << 30)
    pipeline = SimpleNamespace(offloader=SimpleNamespace(mode=mode, device=torch.device(device)))
    prompt = {"1": {"class_type": "AnyGPUPaintViews", "inputs": {}}}
    assert forecasting._forecast(prompt, "1", {"": pipeline})["headline"].startswith(told)


@pytest.mark.parametrize(
    ("kind", "node", "given", "counted"),
    [
        ("delight", "AnyGPUDelightImage", {"image_guidance": 2.0}, (0, True)),
        ("delight", "AnyGPUDelightImage", {"image_guidance": 1.0}, (0, False)),
        ("delight", "AnyGPUDelightImage", {}, (0, None)),
        ("paint", "AnyGPUPaintViews", {"guidance": 0.5}, (0, True)),
        ("paint", "AnyGPUTextureMesh", {"max_views": 8}, (0, None)),
        ("paint_pbr", "AnyGPUTextureMesh", {"max_views": 8}, (8, None)),
    ],
)
def test_a_painting_is_counted_as_it_runs(pack, monkeypatch, kind, node, given, counted):
    """Guidance other than 1 is a second row; cameras beyond the six fixed ones are the PBR model's alone."""
    forecasting = importlib.import_module("anygpu.host.server.forecast")
    seen = []
    monkeypatch.setattr(
        forecasting.painting, "planned_run", lambda _, size, views, steps, guided: seen.append((views, guided))
    )
    monkeypatch.setattr(forecasting, "times_of", lambda *_: None)
    pipeline = SimpleNamespace(family=kind, source=Path(kind), offloader=SimpleNamespace(mode="none"))
    forecasting.RUNS[node](given, pipeline, None)
    assert set(seen) == {counted}


@pytest.mark.parametrize(
    ("cameras", "views"),
    [
        ({"choose": "greedy", "max_views": 8}, 8),
        ({"choose": "list", "azimuths": "0, 90, 180", "max_views": 8}, 3),
        ({}, 0),
    ],
)
def test_views_of_paint_cameras_are_counted_through_render_views(pack, cameras, views):
    forecasting = importlib.import_module("anygpu.host.server.forecast")
    prompt = {
        "2": {"class_type": "AnyGPUPaintCameras", "inputs": cameras},
        "3": {"class_type": "AnyGPURenderViews", "inputs": {"cameras": ["2", 0]}},
        "4": {"class_type": "AnyGPUPaintViews", "inputs": {"cameras": ["3", 2]}},
    }
    assert forecasting._views(prompt, "4") == views


def test_a_forecast_times_nothing_on_a_device_that_was_asked(pack, tiny_folder, monkeypatch):
    """A panel asks during runs too, where a clock would be wrong and its answer kept."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    stored.checkpoint("paint", pack.home / "models")

    def timed(*_: Any, **__: Any) -> Any:
        raise AssertionError("timed")

    backed = importlib.import_module("anygpu.compat.device.timed_choice")
    monkeypatch.setattr(backed, "CLOCKED", ("cpu",))
    monkeypatch.setattr(backed, "milliseconds", timed)
    quiet, real = [], loading.probe_results_of
    for module in (loading, paint_loading):
        monkeypatch.setattr(module, "probe_results_of", lambda *given: quiet.append(given[2]) or real(*given))
    monkeypatch.setattr(ProbeStore, "without_asking", lambda self: dict.fromkeys(self.probes, ProbeResult(OK)))
    body = graph_of()
    inputs = {"model": stored.FOLDERS["paint"]}
    body["prompt"]["9"] = {"class_type": "AnyGPULoadPaintPipeline", "inputs": inputs}
    status, told, _ = pack.ask("POST", "/anygpu/graph", json=body)
    assert status == 200 and quiet == [True, True] and pack.files() == {}
    assert [card.get("by_tables", card) for card in told["pipelines"]] == [False, False]


@pytest.mark.full
@pytest.mark.parametrize("link", [["10", 0], ["7"], [7, 0], "7", None, ["99", 0]])
def test_a_pipeline_that_leads_nowhere_is_not_forecast(pack, tiny_folder, link):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    body = graph_of()
    body["prompt"]["10"] = {"class_type": "AnyGPUSample", "inputs": {"pipeline": link, "width": 64}}
    status, found, _ = pack.ask("POST", "/anygpu/graph", json=body)
    assert status == 200 and found["forecasts"] == []


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ({"model": "HunyuanVideo-I2V"}, "no model 'HunyuanVideo-I2V'"),
        ({"offload": "group"}, "offload 'group' on a CPU"),
        ({"precision": "fp16-safe"}, "precision 'fp16-safe' on a CPU"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"attention": "sage"}, "attention 'sage' on CPU"),
        ({"kernels": "x"}, "kernels 'x'"),
        ({"fp16_accumulation": True}, "fp16_accumulation on cpu"),
        ({"keep_free_gb": -1.0}, "keep_free_gb -1.0"),
        ({"keep_free_gb": -2}, "keep_free_gb -2.0"),
        ({"base": "../LTX-Video"}, "no model '../LTX-Video'"),
        ({"model": ["5", 0]}, "no model in"),
    ],
)
def test_what_a_graph_cannot_do_is_told_in_three_parts(pack, tiny_folder, inputs, found):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    status, answer, _ = pack.ask("POST", "/anygpu/graph", json=graph_of(**inputs))
    (card,) = answer["pipelines"]
    if inputs.get("model") == ["5", 0]:
        assert card["error"]["found"].startswith("no model 'no model found'") or card["error"]["found"].startswith(
            found
        )
    else:
        assert status == 200 and card["error"]["found"].startswith(found), card
    assert card["error"]["expected"] and card["error"]["fix"]


def test_every_choice_of_a_load_node_reaches_the_forecast(pack, tiny_folder, monkeypatch):
    """Whatever the node asks of loading, the panel asks too; only a trace is not begun for a forecast."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    forecasting, asked = importlib.import_module("anygpu.host.server.forecast"), []
    monkeypatch.setattr(forecasting, "load_placed", lambda request, **_: asked.append(request) or load(request))
    chosen = {"compile": True, "compile_mode": "max-autotune-no-cudagraphs", "compile_dynamic": "all"}
    chosen |= {"compile_cache_size": 3, "compile_vae": True, "profile": True}
    pack.ask("POST", "/anygpu/graph", json=graph_of(**chosen))
    assert asked[0].speed.compile == CompileSettings("max-autotune-no-cudagraphs", "all", 3, vae=True)
    assert asked[0].speed.profile is None


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_name_from_a_client_becomes_a_path(pack, path):
    (pack.home / "secret").write_text(json.dumps({"_class_name": "LTXPipeline"}))
    status, answer, _ = pack.ask("POST", "/anygpu/graph", json=graph_of(model=path, base=path, image_encoder=path))
    assert status == 200 and answer["pipelines"][0]["error"]["found"].startswith("no model")


def test_a_folder_that_is_not_listed_lends_nothing(pack, tiny_folder):
    """Its whole path would lead to it."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    outside = pack.home / "outside"
    (outside / "image_encoder").mkdir(parents=True)
    (outside / "image_encoder" / "config.json").write_text("{}")
    for name in (str(outside), "../outside"):
        _, answer, _ = pack.ask("POST", "/anygpu/graph", json=graph_of(image_encoder=name))
        assert answer["pipelines"][0]["error"]["found"].startswith("no model")


@pytest.mark.parametrize(("fps", "text"), [(8.0, " MB, 8 fps"), (0.0, " MB")])
def test_kept_latents_are_listed_shown_and_recovered(pack, fps, text):
    samples = torch.arange(2 * 128 * 2 * 2, dtype=torch.float32).reshape(1, 128, 2, 2, 2)
    identity = store.save(pack.home / "kept", Latents(samples, "ltx", "text", 9, 64, 64, fps, 3), print)
    before = pack.files()
    (_, found, _), (status, _, kind), (_, recovered, _), refused = pack.ask_all(
        [
            ("GET", "/anygpu/latents", {}),
            ("GET", f"/anygpu/latents/{identity}/picture", {}),
            ("POST", "/anygpu/latents/recover", {"json": {"id": identity}}),
            ("POST", "/anygpu/latents/recover", {"json": {"id": f"{identity}x"}}),
        ]
    )
    (entry,) = found["latents"]
    assert entry["id"] == identity and "64x64, 9 frames, seed 3" in entry["title"] and entry["text"].endswith(text)
    assert (status, kind) == (200, "image/jpeg") and entry["picture"] == f"/anygpu/latents/{identity}/picture"
    assert (recovered["node"], recovered["widget"], recovered["value"]) == ("AnyGPURecoverLatents", "kept", identity)
    assert refused[0] == 400 and pack.files() == before


def test_a_damaged_latent_is_not_recovered(pack):
    latents = Latents(torch.zeros(1, 128, 2, 2, 2), "ltx", "text", 9, 64, 64, 8.0, 3)
    identity = store.save(pack.home / "kept", latents, print)
    (path,) = (pack.home / "kept").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    status, answer, _ = pack.ask("POST", "/anygpu/latents/recover", json={"id": identity})
    assert status == 400 and answer["error"]["fix"], "what cannot be read is said, not handed out"


@pytest.mark.parametrize("identity", [*TRAVERSALS, None, 3, [], "a" * 500, "secret.safetensors"])
def test_an_id_is_never_a_path(pack, identity):
    (pack.home / "secret.safetensors").write_bytes(b"secret")
    asked = [("POST", "/anygpu/latents/recover", {"json": {"id": identity}})]
    if isinstance(identity, str) and identity.strip("."):
        asked.append(("GET", f"/anygpu/latents/{quote(identity, safe='')}/picture", {}))
    for status, answer, _ in pack.ask_all(asked):
        assert status in (400, 404) and (answer is None or "error" in answer)


@pytest.mark.parametrize(("method", "path"), [("POST", "/graph"), ("POST", "/probes"), ("POST", "/latents/recover")])
def test_bodies_that_are_no_small_json_object_are_refused(pack, method, path):
    headers = {"Content-Type": "application/json"}
    bodies = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{" * 100_000, b"[" * 100_000, b"NaN", b'{"a":1}{']
    asked = [(method, f"/anygpu{path}", {"data": body, "headers": headers}) for body in bodies]
    for status, answer, kind in pack.ask_all(asked):
        assert (status, kind) == (400, "application/json") and answer["error"].keys() == {"found", "expected", "fix"}
    huge = b'{"prompt": "' + b"a" * (pack.routes.MOST_BYTES + 1) + b'"}'
    plain = {"data": b"{}", "headers": {"Content-Type": "text/plain"}}
    too_long, wrong_kind = pack.ask_all(
        [(method, f"/anygpu{path}", {"data": huge, "headers": headers}), (method, f"/anygpu{path}", plain)]
    )
    assert too_long[0] == 413 and too_long[1]["error"]["found"] == "a body that is too long"
    assert wrong_kind[0] == 415, "what a form of another page can send is not taken"


@pytest.mark.parametrize(
    "prompt",
    [None, [], "x", 3, {"1": None}, {"1": {}}, {"1": {"class_type": 1, "inputs": {}}}, {"1": {"class_type": "A"}},
     {"1": {"class_type": "A", "inputs": []}}, {str(n): {"class_type": "A", "inputs": {}} for n in range(5001)}],
)  # fmt: skip
def test_prompts_of_another_form_are_refused(pack, prompt):
    status, answer, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    expected = "at most 5000" if isinstance(prompt, dict) and len(prompt) > 1 else "node ids with class_type and inputs"
    assert status == 400 and answer["error"]["expected"] == expected


def test_other_methods_are_refused(pack):
    asked = [
        (method, f"/anygpu{path.replace('{id}', 'x')}", {})
        for allowed, path, _ in pack.routes.ROUTES
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH")
        if method != allowed
    ]
    assert {status for status, _, _ in pack.ask_all(asked)} == {405}


def test_random_prompts_never_break_the_server(pack, tiny_folder):
    """150 prompts out of values that a client could send: each is answered, none by a failure."""
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    draw = random.Random(8)
    texts = ["LTX-Video", "auto", "none", "bf16", "", "\0", "../x", "a" * 5000, "gpu:0", "gpu:x", "fp8"]
    values = [*texts, -1, 2**70, 1e308, True, None, [], {}, ["1", 0], [[]]]
    inputs = ["model", "precision", "offload", "variant", "base", "image_encoder", "attention"]
    inputs += ["kernels", "compile", "compile_mode", "compile_dynamic", "compile_cache_size", "weights", "text_weights"]
    inputs += ["transformer_device", "text_device", "vae_device", "keep_free_gb"]
    inputs += ["transformer", "vae", "text_encoder", "task", "dynamo_cache_size_limit"]
    names = [*inputs, "device", "devices", "files", "speed", "search", "state", "x"]
    sizing = ["width", "height", "frames", "cfg", "clip_seconds", "fps", "window", "view_size", "guidance"]
    sizing += ["max_views", "image_guidance"]
    asked = []
    for _ in range(150):
        inputs = {draw.choice(names): draw.choice(values) for _ in range(draw.randrange(8))}
        loader = str(draw.choice(values))
        opener = draw.choice(("AnyGPULoadPipeline", "AnyGPUComposePipeline", "AnyGPULoadPaintPipeline"))
        prompt = {loader: {"class_type": opener, "inputs": inputs}}
        if draw.random() < 0.5:  # so that sizes are forecast
            inputs.clear()
            inputs["model"] = "LTX-Video"
        sizes = {name: draw.choice([*values, 10**400, float("inf"), 1e300, 0.5, 64]) for name in sizing}
        kind = draw.choice(("AnyGPUSample", "AnyGPUSampleFramePack", "AnyGPUPaintViews"))
        prompt["sample"] = {"class_type": kind, "inputs": {**sizes, "pipeline": [loader, 0]}}
        asked.append(("POST", "/anygpu/graph", {"json": {"prompt": prompt}}))
    answers = pack.ask_all(asked)
    assert {status for status, _, _ in answers} == {200}
    assert pack.files() == {}


@pytest.mark.full
def test_what_the_stages_of_the_last_run_cost_is_told_and_no_earlier_ones(pack, monkeypatch):
    state = Path(importlib.import_module("anygpu.host.folders").state_folder())
    device = torch.device("cpu")
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)  # stages that took equally long are still told apart

    def spent(*names: str) -> None:
        for name in names:
            with MemoryStats(state).stage(name, "ltx dev", "comfyui", device):
                pass

    def told() -> list[str]:
        _, found, _ = pack.ask("GET", "/anygpu/run")
        return [cost["stage"] for cost in found["costs"]]

    spent("text", "sampling")
    monkeypatch.setattr(pack.panel, "get_executing_context", lambda: SimpleNamespace(prompt_id="the next"))
    pack.panel.NodeRun("5")
    assert told() == []
    spent("decoding")
    assert told() == ["decoding"]
    spent(*["sampling"] * 80)
    assert set(told()) == {"sampling"}, "more than are kept"


def test_the_last_run_is_told_stage_by_stage(pack):
    first = pack.panel.NodeRun("5")
    first.step("sampling")
    first.entry["said"].append("rounded")
    first.finish("done")
    pack.panel.NodeRun("6").step("decoding")
    status, found, _ = pack.ask("GET", "/anygpu/run")
    assert status == 200 and found["nodes"].keys() == {"5", "6"}
    assert found["nodes"]["5"]["status"] == "done" and found["nodes"]["5"]["said"] == ["rounded"]
    assert found["nodes"]["5"]["stages"].keys() == {"sampling"} and found["nodes"]["5"]["done"]
    assert found["nodes"]["6"]["stages"].keys() == {"decoding"} and not found["nodes"]["6"]["done"]


def test_the_last_run_of_another_window_is_not_told(pack, monkeypatch):
    """Its nodes have the numbers of other nodes here; who names no window is told all the same."""
    monkeypatch.setattr(pack.panel, "get_executing_context", lambda: SimpleNamespace(prompt_id="prompt"))
    pack.server.client_id = "window"
    pack.panel.NodeRun("5").finish("done")
    for query, nodes in (("", {"5"}), ("?client_id=window", {"5"}), ("?client_id=another", set())):
        _, found, _ = pack.ask("GET", f"/anygpu/run{query}")
        assert found["nodes"].keys() == nodes, query


def test_what_changed_since_the_sampling_before_is_told(pack):
    folder = importlib.import_module("anygpu.host.folders").saved_folder()
    for torch_version in ("1.0", "2.0"):
        assert pack.ask("GET", "/anygpu/run")[1]["changed"] is None
        record = {"anygpu_receipt": 1, "latents": "00", "made_with": {"torch": torch_version}}
        latents = Latents(torch.zeros(1, 4, 2, 8, 8), "ltx", "text", 9, 64, 64, 8.0, 3, extra={"receipt": record})
        assert store.save(folder, latents, print)
    told = pack.ask("GET", "/anygpu/run")[1]["changed"]
    assert told["changes"] == [{"subject": "torch", "before": "1.0", "now": "2.0"}] and told["same"]
    assert told["headline"] == "The same latents, bit for bit, although this changed:"


def test_an_older_paused_run_that_cannot_be_removed_undoes_no_pause(pack, monkeypatch):
    """Windows removes no open file: the run ends all the same, since it is saved."""
    paused, flags = pack.routes.paused, {}
    folder, item = paused._folder(), (0, "newest", {"7": {}}, {}, ["7"])
    folder.mkdir(parents=True)
    for number in range(paused.MOST):
        (folder / f"a{number}.json").write_text('{"prompt": {}, "time": 1.5}', encoding="utf-8")
    pack.queue.get_current_queue_volatile, pack.queue.set_flag = lambda: ([item], []), flags.__setitem__
    paused.request()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("open")))
    assert paused.save(paused.wanted_run(), "sampling 3/20", None)
    assert flags == {"unload_models": True, "free_memory": True}
    assert paused.listing()[0]["id"] == "newest"
    assert paused.resumable("newest")["outputs"] == ["7"], "no output that was not asked for"


def test_lists_of_widgets_come_back_from_a_pause_as_they_were_queued(pack):
    """Core has unwrapped them by then, and would take them for links."""
    inputs = {"image": ["2", 0], "boxes": {"__value__": [{"x": 1}, {"x": 2}]}, "none": {"__value__": []}}
    running = {name: each["__value__"] if isinstance(each, dict) else each for name, each in inputs.items()}
    folder = pack.routes.paused._folder()
    folder.mkdir(parents=True)
    record = {"where": "", "time": 1.5, "picture": "", "workflow": None}
    prompt = {"1": {"class_type": "X", "inputs": running, "is_changed": [float("nan")]}}
    (folder / "a1.json").write_text(json.dumps({**record, "prompt": prompt}))
    assert pack.ask("GET", "/anygpu/paused/a1")[1]["prompt"] == {"1": {"class_type": "X", "inputs": inputs}}
    pack.queue.get_current_queue_volatile = lambda: ([(0, "a1", prompt, {}, ["1"])], [])
    pack.routes.paused.forget_resumed()
    assert not list(folder.iterdir())


def test_paused_runs_are_listed_and_forgotten_and_a_damaged_file_is_neither(pack):
    folder = pack.routes.paused._folder()
    folder.mkdir(parents=True)
    record = {"where": "sampling 3/20", "time": 1.5, "picture": "", "prompt": {"1": {}}, "workflow": None}
    (folder / "a1.json").write_text(json.dumps(record))
    for name, text in {"b": "{", "c": "[]", "d": '{"prompt": 3, "time": 1.0}', "e": "[" * 9000}.items():
        (folder / f"{name}.json").write_text(text)
    listed = pack.ask("GET", "/anygpu/paused")[1]
    assert listed == {"paused": [{"id": "a1", "where": "sampling 3/20", "time": 1.5, "picture": ""}]}
    assert pack.ask("GET", "/anygpu/paused/a1")[1] == record
    for identity in ("b", "x", "..%2Fa1"):
        assert pack.ask("GET", f"/anygpu/paused/{identity}")[0] in (400, 404)
    assert pack.ask("POST", "/anygpu/pause", json={})[1]["error"]["found"] == "no run to pause"
    assert (
        pack.ask("POST", "/anygpu/forget", json={"id": "a1"})[1] == {"paused": []} and not (folder / "a1.json").exists()
    )


def test_one_memory_of_device_and_host_is_shown_once(pack, monkeypatch):
    here = replace(pack.panel.facts(), device=torch.device("mps"), unified=True)
    monkeypatch.setattr(pack.panel, "facts", lambda: here)
    monkeypatch.setattr(pack.panel, "free_bytes", lambda device: 5)
    assert pack.panel.memory_now()["shared"]


def test_an_upscaler_that_a_link_gives_costs_its_own_row_alone(pack, tiny_folder):
    weights_on(pack, tiny_folder, "ltx", "LTX-Video")
    prompt = {
        "7": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "LTX-Video"}},
        "9": {"class_type": "CustomCombo", "inputs": {"choice": "up.safetensors"}},
        "1": {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["7", 0], "width": 96, "height": 64, "frames": 17}},
        "3": {
            "class_type": "AnyGPUUpscaleLatents",
            "inputs": {"pipeline": ["7", 0], "latent": ["1", 0], "upscaler": ["9", 0]},
        },
        "4": {"class_type": "AnyGPUSample", "inputs": {"pipeline": ["7", 0], "latent": ["3", 0]}},
    }
    status, found, _ = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})
    assert status == 200 and ["error" in each for each in found["forecasts"]] == [False, True]


def test_a_clip_of_no_seconds_is_not_forecast_as_the_default(pack, tiny_folder):
    for name, published in (("framepack", "FramePackI2V_HY"), ("hunyuan_video", "HunyuanVideo"), ("siglip", "flux")):
        weights_on(pack, tiny_folder, name, published)
    clip = {"pipeline": ["1", 0], "clip_seconds": 0.0}
    prompt = {
        "1": {"class_type": "AnyGPULoadPipeline", "inputs": {"model": "FramePackI2V_HY"}},
        "5": {"class_type": "AnyGPUSampleFramePack", "inputs": clip},
        "6": {"class_type": "AnyGPUSampleFramePack", "inputs": {**clip, "single_frame": True}},
    }
    refused, single = pack.ask("POST", "/anygpu/graph", json={"prompt": prompt})[1]["forecasts"]
    assert refused["error"]["found"] == "a clip of 0.0 s at 30 fps" and "1 frame" in single["found"]


def test_routes_are_added_once(pack):
    table = aiohttp.web.RouteTableDef()
    assert pack.routes.add_routes(table) and not pack.routes.add_routes(table)
    assert len(table) == len(pack.routes.ROUTES) + 1, "and the way to the help"


def test_a_run_that_is_cut_short_is_not_running_for_ever(pack):
    sampling = pack.panel.NodeRun("5")
    sampling.at("sampling 61/200")
    entry = pack.panel.stop("5", "cancelled")
    assert entry["status"] == "cancelled at sampling 61/200" and entry["done"]
    _, told, _ = pack.ask("GET", "/anygpu/run")
    assert told["nodes"]["5"]["done"] and told["nodes"]["5"]["status"] == entry["status"]
    assert pack.panel.stop("5", "cancelled") is None, "it has ended already"
    assert pack.panel.stop("6", "cancelled") is None, "it has not run"
