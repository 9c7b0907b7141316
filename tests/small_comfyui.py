"""ComfyUI as far as ``host/`` and ``nodes/`` use it, in a few classes: the pack is imported and its nodes run on it.

It computes on the CPU and has every model in memory. A class of core's that nothing here gives a meaning is an empty
one. The tests in ``tests/host`` run the same nodes in a real ComfyUI.
"""

import copy
import importlib
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

CPU = torch.device("cpu")
MODELS = (
    "diffusers", "diffusion_models", "checkpoints", "vae", "text_encoders", "clip_vision", "style_models", "loras",
)  # fmt: skip

EMPTY = """
comfy.conds comfy.latent_formats comfy.ldm comfy.ldm.lightricks comfy.ldm.lightricks.symmetric_patchifier
comfy.ldm.modules comfy.nested_tensor comfy.quant_ops comfy.samplers comfy.weight_adapter comfy_api
comfy.model_sampling comfy_execution
"""


class Module(ModuleType):
    """A module of core's, in which every class can be found; those that were not given are empty."""

    __path__ = ()  # so that it may have modules below it

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(f"tests/small_comfyui.py gives {self.__name__} no {name}")
        vars(self)[name] = type(
            name, (), {"__init__": lambda self, *given, **named: vars(self).update(given=given, **named)}
        )
        return vars(self)[name]


def is_link(given: Any) -> bool:
    """True for a node's id and the number of one of its outputs."""
    return isinstance(given, list) and [*map(type, given)] == [str, int]


class NodeInput(SimpleNamespace):
    """An input, with what it was given."""

    def __getattr__(self, name: str) -> Any:
        assert name in ("advanced", "optional", "tooltip")
        return self.given.get(name)

    def get_io_type(self) -> str:
        return str(self.kind)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("optional", "tooltip")
        self.given[name] = value


class Socket:
    """A kind of values: what makes its inputs and outputs, which hold what they are given."""

    def __init__(self, name: str) -> None:
        self.name = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=3D)(?=[A-Z])", "_", name).upper().removesuffix("_ANY")

    def Input(self, id: str, **given: Any) -> SimpleNamespace:
        kinds = ",".join(kind.name for kind in given.pop("types", (self,)))
        return NodeInput(id=id, kind=kinds, given=given)

    def Output(self, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(kind=self.name, given=given)


class ComfyNode:
    """The base of every node; ``hidden`` is what a run of it would be told."""

    hidden = SimpleNamespace(unique_id="7", prompt={}, extra_pnginfo={}, dynprompt=None)

    @classmethod
    def GET_SCHEMA(cls) -> Any:
        return cls.define_schema()  # type: ignore[attr-defined]


class NodeOutput(SimpleNamespace):
    """What a node returns: ``result``, what is shown, and what is run in its place."""

    def __init__(self, *result: Any, ui: Any = None, expand: Any = None, block_execution: Any = None) -> None:
        super().__init__(result=result, ui=ui, expand=expand, block_execution=block_execution)


class NodeTypes:
    """``io`` of core's node API: any other name of it is a kind of values."""

    ComfyNode, NodeOutput, Custom = ComfyNode, NodeOutput, Socket
    Schema = SimpleNamespace
    Hidden = SimpleNamespace(**{name: name for name in ("unique_id", "prompt", "extra_pnginfo", "dynprompt")})
    UploadType, FolderType = SimpleNamespace(model="file_upload"), SimpleNamespace(temp="temp")

    def __getattr__(self, name: str) -> Socket:
        return Socket(name)


class Interrupted(BaseException):
    """A cancel."""


class Messages:
    """ComfyUI's server as far as a message knows it: who queued the prompt that runs, and what was sent to whom."""

    def __init__(self) -> None:
        self.client_id: str | None = "window"
        self.last_prompt_id = "prompt"
        self.texts: list[tuple[str, str | None]] = []
        self.events: list[tuple[dict[str, Any], str | None]] = []

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        self.texts.append((text, sid))

    def send_sync(self, event: str, data: dict[str, Any], sid: str | None = None) -> None:
        self.events.append((data, sid))


class BaseModel(nn.Module):
    """Core's model around a network."""

    def __init__(self, config: Any = None, device: Any = None) -> None:
        super().__init__()
        self.config, self.device, self.model_loaded_weight_memory = config, device, 0
        self.latent_format = SimpleNamespace(scale_factor=1.0)
        self.manual_cast_dtype: torch.dtype | None = None

    def get_dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def get_dtype_inference(self) -> torch.dtype:
        return self.manual_cast_dtype or self.get_dtype()


class ModelPatcher:
    """Core's patcher of one model, which has all of it on the device or nothing."""

    def __init__(self, model: Any, load_device: Any = CPU, offload_device: Any = CPU, size: int = 0) -> None:
        self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size
        self.patches: dict[str, list[Any]] = {}
        self.hook_patches: dict[Any, dict[str, list[Any]]] = {}
        self.object_patches: dict[str, Any] = {}
        self.attachments: dict[str, Any] = {}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.callbacks: dict[str, dict[str, Any]] = {}
        self.backup: dict[str, Any] = {}
        self.backup_buffers: dict[str, Any] = {}
        self.weight_wrapper_patches: dict[str, list[Any]] = {}
        self.patches_uuid, self.cached_patcher_init, self.force_cast_weights = uuid.uuid4(), None, False
        model.model_loaded_weight_memory = getattr(model, "model_loaded_weight_memory", 0)

    def clone(self, *_args: Any, **_given: Any) -> Any:
        other = copy.copy(self)
        for name in ("patches", "object_patches", "attachments"):
            setattr(other, name, dict(vars(self)[name]))
        other.wrappers = {kind: dict(by_key) for kind, by_key in self.wrappers.items()}
        return other

    def is_dynamic(self) -> bool:
        return False

    def get_combined_hook_patches(self, hooks: None) -> dict[str, list[Any]]:
        return {}

    def is_clone(self, other: Any) -> bool:
        return self.model is other.model

    def model_size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.model.parameters())

    def model_dtype(self) -> torch.dtype:
        return self.model.get_dtype()

    def loaded_size(self) -> int:
        return self.model.model_loaded_weight_memory

    def get_model_object(self, name: str) -> Any:
        return self.object_patches.get(name, getattr(self.model, name, None))

    def set_attachments(self, key: str, value: Any) -> None:
        self.attachments[key] = value

    def remove_attachments(self, key: str) -> None:
        self.attachments.pop(key, None)

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def set_model_compute_dtype(self, dtype: torch.dtype) -> None:
        self.add_object_patch("manual_cast_dtype", dtype)
        self.force_cast_weights = True

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def get_wrappers(self, kind: str, key: str) -> list[Any]:
        return self.wrappers.get(kind, {}).get(key, [])

    def add_callback_with_key(self, kind: str, key: str, callback: Any) -> None:
        self.callbacks.setdefault(kind, {})[key] = callback

    def remove_callbacks_with_key(self, kind: str, key: str) -> None:
        self.callbacks.get(kind, {}).pop(key, None)

    def partially_load(self, device: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> None:
        if not self.loaded_size():
            self.load(device, extra_memory, force_patch_weights, full_load=True)

    def load(self, device_to: Any = None, *_args: Any, **_given: Any) -> None:
        self.model.model_loaded_weight_memory = self.model_size()

    def partially_unload(self, device: Any, memory: float = 0) -> None:
        self.unpatch_model(device)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        self.model.model_loaded_weight_memory = 0

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self.unpatch_model(self.offload_device)
        return self.model


class Management(Module):
    """``comfy.model_management``: one device, with every model on it that was asked for."""

    InterruptProcessingException = Interrupted
    in_training = False

    def __init__(self) -> None:
        super().__init__("comfy.model_management")
        self.current_loaded_models: list[Any] = []
        self.interrupted = False
        self.get_torch_device = self.intermediate_device = lambda: CPU
        self.get_free_memory, self.intermediate_dtype = (lambda device=None: 2**34), (lambda: torch.float32)
        self.minimum_inference_memory = self.extra_reserved_memory = lambda: 0

    def load_models_gpu(self, patchers: list[Any], memory_required: float = 0) -> None:
        for patcher in patchers:
            patcher.partially_load(patcher.load_device, 1e30)
            if not any(item.model is patcher for item in self.current_loaded_models):
                self.current_loaded_models.append(SimpleNamespace(model=patcher, device=patcher.load_device))

    def free_memory(self, needed: float, device: Any, keep: Any = ()) -> None:
        for item in [item for item in self.current_loaded_models if item not in keep]:
            item.model.detach()
            self.current_loaded_models.remove(item)

    def throw_exception_if_processing_interrupted(self) -> None:
        if self.interrupted:
            raise Interrupted


class CastWeightBiasOp:
    """The mark of core's own layers."""

    comfy_cast_weights = False
    weight_function: Any = ()
    bias_function: Any = ()


def cast_weights(leaf: Any, dtype: Any, bias_dtype: Any, device: Any, offloadable: bool) -> tuple[Any, Any, None]:
    """Weight and bias of a layer, with their patches, and the stream that they came by."""
    weight, bias = leaf.weight.to(device, dtype), None if leaf.bias is None else leaf.bias.to(device, bias_dtype)
    for change in leaf.weight_function:
        weight = change(weight)
    for change in leaf.bias_function:
        bias = change(bias)
    return weight, bias, None


def of_core(function: Any) -> Any:
    """A function as if ``comfy.ops`` had it: the pack looks where what computes a layer was defined."""
    return FunctionType(function.__code__, {**globals(), "__name__": "comfy.ops"})


class Linear(CastWeightBiasOp, nn.Linear):
    """Core's Linear, whose weights are where they compute."""

    @of_core
    def forward_comfy_cast_weights(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x), self.bias.to(x))

    @of_core
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_comfy_cast_weights(x)


class WrapperExecutor:
    """Calls a function within its wrappers, the outermost first."""

    def __init__(self, original: Any, class_obj: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    new_class_executor = classmethod(lambda cls, *given: cls(*given))

    def execute(self, *args: Any, **given: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **given)
        return self.wrappers[0](WrapperExecutor(self.original, self.class_obj, self.wrappers[1:]), *args, **given)

    __call__ = execute


def previewer_for(device: Any, latent_format: Any) -> Any:
    """A previewer that gives the estimate itself."""
    return SimpleNamespace(decode_latent_to_preview_image=lambda form, estimate: (form, estimate))


def modules(base: Path) -> dict[str, ModuleType]:
    """Every module of core's that the pack imports, on the folders below ``base``."""
    folders = {name: base / name for name in ("input", "output", "temp", "user")}
    searched = {kind: ([str(base / "models" / kind)], {".safetensors"}) for kind in MODELS}
    for folder in (*folders.values(), *(Path(paths[0]) for paths, _ in searched.values())):
        folder.mkdir(parents=True, exist_ok=True)
    directories = {f"get_{name}_directory": (lambda path=path: str(path)) for name, path in folders.items()}
    context = SimpleNamespace(prompt_id="prompt", node_id=ComfyNode.hidden.unique_id)
    graph = SimpleNamespace(has_node=lambda _id: True, get_node=lambda _id: {"class_type": "AnyGPUDoctor"})
    graph.get_display_node_id = lambda node_id: node_id
    ui = SimpleNamespace(
        PreviewImage=lambda pictures, cls=None: pictures,
        SavedImages=lambda saved, is_animated: (saved[0], is_animated),
        ImageSaveHelper=SimpleNamespace(save_animated_webp=lambda *given: given),
    )
    attention = dict.fromkeys(("attention_pytorch", "attention_basic", "optimized_attention"), attention_pytorch)
    kinds = {
        name: name.lower() for name in ("OUTER_SAMPLE", "APPLY_MODEL", "DIFFUSION_MODEL", "ON_PRE_RUN", "ON_CLEANUP")
    }
    model_base = {name: BaseModel for name in ("HunyuanVideo", "HunyuanVideo15", "LTXV", "GenmoMochi")}
    given: dict[str, dict[str, Any]] = {
        **{name: {} for name in EMPTY.split()},
        "comfy": {"__path__": [str(base)]},
        "comfy.cli_args": {"args": SimpleNamespace(disable_metadata=False, fast=(), cpu=True)},
        "comfy.ldm.modules.attention": attention,
        "comfy.model_base": model_base,
        "comfy.model_patcher": {"ModelPatcher": ModelPatcher},
        "comfy.ops": {
            "CastWeightBiasOp": CastWeightBiasOp,
            "cast_bias_weight": cast_weights,
            "uncast_bias_weight": lambda *_: None,
            "Linear": Linear,
            "run_every_op": lambda: None,
        },
        "comfy.patcher_extension": {
            "WrappersMP": SimpleNamespace(**kinds),
            "CallbacksMP": SimpleNamespace(**kinds),
            "WrapperExecutor": WrapperExecutor,
            "get_all_wrappers": lambda kind, options: list(options.get("wrappers", {}).get(kind, ())),
        },
        "comfy.sd": {"VAE": type("VAE", (), {"vae_encode_crop_pixels": lambda self, pixels: pixels})},
        "comfy.supported_models": {
            name: lambda config: SimpleNamespace(sampling_settings={}, unet_config=config) for name in model_base
        },
        "comfy.utils": {
            "ProgressBar": lambda total, node_id=None: SimpleNamespace(update_absolute=lambda *given: None),
            "get_attr": lambda model, key: model.get_parameter(key),
        },
        "comfy_api.latest": {"io": NodeTypes(), "ui": ui, "InputImpl": Module("InputImpl"), "Types": Module("Types")},
        "comfy_execution.graph_utils": {"is_link": is_link},
        "comfy_execution.progress": {"get_progress_state": lambda: SimpleNamespace(dynprompt=graph)},
        "comfy_execution.utils": {"get_executing_context": lambda: context},
        "folder_paths": {
            "folder_names_and_paths": searched,
            "get_folder_paths": lambda kind: searched[kind][0],
            "get_filename_list": lambda kind: sorted(path.name for path in Path(searched[kind][0][0]).iterdir()),
            "get_full_path": lambda kind, name: str(Path(searched[kind][0][0]) / name),
            "get_annotated_filepath": lambda name: str(folders["input"] / name),
            "get_directory_by_type": lambda kind: str(folders[kind]),
            **directories,
        },
        "latent_preview": {"get_previewer": previewer_for},
        "server": {"PromptServer": SimpleNamespace(instance=Messages())},
    }  # fmt: skip
    made: dict[str, ModuleType] = {"comfy.model_management": Management()}
    for name, attributes in given.items():
        made[name] = Module(name)
        vars(made[name]).update(attributes)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            vars(made[parent])[own] = module
    return made


def attention_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: Any = None, scale: Any = None, **given: Any
) -> torch.Tensor:
    """Core's attention of operands (B, N, heads * D), or (B, heads, N, D)."""
    if not given.get("skip_reshape"):
        q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    result = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return result if given.get("skip_output_reshape") else result.transpose(1, 2).flatten(2)


@contextmanager
def comfyui(base: Path, package: str = "anygpu") -> Iterator[Callable[[str], Any]]:
    """Gives modules of ``package`` by name, imported anew on this ComfyUI, whose folders are below ``base``."""
    own = tuple(f"{package}.{room}" for room in ("host", "nodes"))

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(own)]:
            del sys.modules[name]
        for room in ("host", "nodes"):  # `from . import` asks the package before sys.modules
            vars(sys.modules.get(package, sys)).pop(room, None)

    forget()
    core = modules(base)
    sys.modules.update(core)
    try:
        yield lambda name: importlib.import_module(f"{package}.{name}")
    finally:
        forget()
        for name in core:
            del sys.modules[name]


def run(nodes: Any, name: str, **inputs: Any) -> NodeOutput:
    """What the node ``AnyGPU<name>`` returns; required inputs have their defaults, optional ones none."""
    kind = next(kind for kind in nodes.NODES if kind.GET_SCHEMA().node_id == f"AnyGPU{name}")
    required = [item for item in kind.GET_SCHEMA().inputs if not item.given.get("optional")]
    defaults = {item.id: item.given["default"] for item in required if "default" in item.given}
    return kind.execute(**{**defaults, **inputs})
