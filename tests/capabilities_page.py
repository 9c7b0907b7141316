"""The files and hosts that each node may touch: the machine's owner lists them all, a workflow names only those.
``host/test_untrusted.py`` holds a real ComfyUI to it; ``python tests/capabilities_page.py`` writes it into
``docs/reliability.md``.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- capabilities -->", "<!-- end -->"
PLACES = {
    "models": "ComfyUI's model folders, those of `extra_model_paths.yaml` included, and the demo models of the pack",
    "input": "ComfyUI's input folder",
    "output": "ComfyUI's output folder",
    "temp": "ComfyUI's temporary folder, for previews",
    "state": "`anygpu` in ComfyUI's user folder: test results, hashes, repairs, kept latents; every node may read it",
    "jobs": "`farm` in the output folder, and the folders `anygpu_farm` of `extra_model_paths.yaml`",
    "hub": "huggingface.co, or the mirror that huggingface_hub is set to; only if `download` is chosen",
    "farm": "`auto` and the addresses in `farm_addresses.txt` of the state folder",
}
TABLE = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
MODELS, INPUT, OUTPUT, TEMP, STATE = "models", "input", "output", "temp", "state"
JOBS, HUB, FARM = "jobs", "hub", "farm"


class Capability(NamedTuple):
    """The places that a node may read, write and connect to."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    connects: tuple[str, ...] = ()


NOTHING = Capability()
RUNS = Capability((MODELS, STATE), (STATE, OUTPUT, TEMP))  # parts are read on first use; a profile is an output
SAVES, LOADS = Capability((OUTPUT,), (OUTPUT,)), Capability((INPUT, OUTPUT))
SHOWS = Capability((), (TEMP,))  # a preview
CAPABILITIES = {
    **dict.fromkeys(("AnyGPULoadPipeline", "AnyGPUComposePipeline", "AnyGPULoRA", "AnyGPULoadPaintPipeline"), RUNS),
    "AnyGPULoadMVAdapter": RUNS,
    **dict.fromkeys(("AnyGPUEncodePrompt", "AnyGPUEncodeImage", "AnyGPUEncodeVideo", "AnyGPUDecode"), RUNS),
    **dict.fromkeys(("AnyGPUSample", "AnyGPUSampleFramePack", "AnyGPUUpscaleLatents", "AnyGPUMemoryPlan"), RUNS),
    **dict.fromkeys(("AnyGPUDelightImage", "AnyGPUPaintViews", "AnyGPUTextureMesh", "AnyGPUHardwareReport"), RUNS),
    **dict.fromkeys(("AnyGPUFit", "AnyGPUFitModel", "AnyGPUFitVAE", "AnyGPUFitCLIP", "AnyGPUDoctor"), RUNS),
    **dict.fromkeys(("AnyGPUSaveLatent", "AnyGPUSavePrompt", "AnyGPUSaveMusubiCache"), SAVES),
    **dict.fromkeys(("AnyGPULoadLatent", "AnyGPULoadPrompt", "AnyGPULoadMesh"), LOADS),
    **dict.fromkeys(("AnyGPUCleanMesh", "AnyGPUPaintCameras", "AnyGPUBakeTexture", "AnyGPUProjectPicture"), NOTHING),
    **dict.fromkeys(("AnyGPUImageConditioning", "AnyGPUStepCache"), NOTHING),
    **dict.fromkeys(("AnyGPURenderViews", "AnyGPURenderTurntable"), SHOWS),
    "AnyGPURecoverLatents": Capability((STATE,), (STATE,)),
    "AnyGPUReplay": Capability((INPUT, OUTPUT, MODELS, STATE), (STATE, OUTPUT, TEMP)),
    "AnyGPUQueueJobs": Capability((MODELS, INPUT, OUTPUT, STATE, JOBS), (JOBS, STATE)),
    "AnyGPUCollect": Capability((JOBS,), (JOBS,)),
    "AnyGPUFarm": Capability((JOBS, STATE), (JOBS,), (FARM,)),
    "AnyGPUDownloadModel": Capability((MODELS,), (MODELS,), (HUB,)),
}


def page() -> str:
    """The document with the tables as the code has them."""
    rows: dict[Any, list[str]] = {}
    for node, row in CAPABILITIES.items():
        rows.setdefault(row, []).append(node.removeprefix("AnyGPU"))
    lines = ["| Nodes | read | write | connect to |", "| --- | --- | --- | --- |"]
    for row, nodes in rows.items():
        lines.append(f"| {', '.join(nodes)} | {' | '.join(', '.join(places) or 'nothing' for places in row)} |")
    lines += ["", "| Place | is |", "| --- | --- |"]
    lines += [f"| {name} | {meaning} |" for name, meaning in PLACES.items()]
    return TABLE.sub(lambda _: "\n".join([BEGIN, *lines, END]), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
