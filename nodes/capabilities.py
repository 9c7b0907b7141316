"""The files and hosts that each node may touch: the machine's owner lists them all, a workflow names only those.
``tests/host/test_untrusted.py`` holds a real ComfyUI to it; ``docs/reliability.md`` shows it (``make words``)."""

from __future__ import annotations

from typing import NamedTuple

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
