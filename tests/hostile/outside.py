"""Every question that the pack and its farm put to the outside, found by reading them, and who attacks it.

The outside is torch's device modules, flags and versions, psutil, vendors' libraries, the operating system and its
files, huggingface_hub, Ray, and ComfyUI's memory manager, folders and flags. A question that is not in :data:`TABLE`
fails ``test_outside.py``.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from test_layers import SOURCES, nodes_of

DEVICE = "torch.<device>"  # the module of whatever device computes: torch.cuda, torch.xpu, a plug-in's
ASKED = (  # what begins so is a question; of Triton, the operations of a kernel are left out: it is asked as a whole
    DEVICE,
    "torch.Event",
    "torch.Stream",
    "torch._C",
    "torch.accelerator",
    "torch.backends",
    "torch.cuda",
    "torch.get_float32",
    "torch.mps",
    "torch.version",
    "torch.xpu",
    "torch_xla",
    "psutil",
    "ctypes",
    "platform",
    "importlib.metadata",
    "huggingface_hub",
    "comfy_kitchen",
    "comfy.cli_args",
    "comfy.model_management",
    "folder_paths",
    "mmap.mmap",
    "os.",
    "ray.",
    "shutil",
    "socket",
    "tempfile",
)
PATHS = (
    {name for name in dir(Path) if not name.startswith("_")}
    - set(dir(str))
    - {
        # parts of a name, which ask nobody
        *(
            "anchor", "drive", "name", "parent", "parents", "parts", "root", "stem", "suffix", "suffixes", "as_posix",
            "as_uri",
        ),
        *("joinpath", "is_relative_to", "relative_to", "match", "with_name", "with_stem", "with_suffix", "is_absolute"),
        *("is_reserved", "with_segments", "full_match", "parser", "info"),
    }
)  # fmt: skip


def each(attack: str, *groups: str) -> dict[str, str]:
    """Questions and who attacks them, from groups such as "os. close open": a prefix, and what stands behind it."""
    return {prefix + name: attack for prefix, *names in map(str.split, groups) for name in names}


# Who attacks a question: each value is a test of test_outside.py, or the file that has one.
JOB = "one job"  # import, load, report, panel, forecast, one clip on the simulated device
FACTS = "facts"  # a machine of the vendor, in a report
STREAMS = "streams"  # of a device that copies beside its computation
FLAGS = "flags"  # of torch, asked by each probe store
FILES = "files"  # a job whose files cannot be read or written
HOST = "host/test_hostile.py"
DOWNLOAD = "a download"
FARM = "farm/test_chaos.py"  # a cluster whose workers, drivers and nodes are killed
CLUSTER = "farm/test_comfyui.py"  # one that does not answer, wants another token, or ends
KITCHEN = "compat/device/test_packed_paths.py"  # a kernel library that is absent, refuses, or is wrong
NAMES = "pipelines/test_job_folder.py"  # a disk on which a file has one name
CONSTANT = "a class, number or name, which answers or Python itself is broken"
TABLE: dict[str, str] = {
    **each(
        FARM,
        "ray. get get_actor get_runtime_context init kill remote shutdown wait cluster_resources",
        "ray.util. placement_group",
        "ray.exceptions. OutOfMemoryError RayActorError RayError",
        "ray.util.scheduling_strategies. NodeAffinitySchedulingStrategy PlacementGroupSchedulingStrategy",
        "ray._private.authentication.authentication_utils. is_token_auth_enabled",
        "ray.experimental.internal_kv. _internal_kv_get",
        "ray._private.state. state",
        "ray._private.state.state. get_cluster_config",
        "psutil. net_if_addrs",
    ),
    "ray.__version__": CONSTANT,
    "Path.hardlink_to": NAMES,
    **each(
        CLUSTER,
        "ray._private.authentication.authentication_token_setup. ensure_token_if_auth_enabled",
        "ray._private.services. canonicalize_bootstrap_address_or_die",
        "ray._raylet. GcsClient",
        "ray. cloudpickle is_initialized",
        "ray.cloudpickle. register_pickle_by_value",
        "ray.exceptions. RayTaskError",
    ),
    **dict.fromkeys(("torch.Event", "torch.Stream"), STREAMS),
    **each(
        JOB,
        "torch.<device>. empty_cache get_device_properties max_memory_allocated mem_get_info memory_reserved",
        "torch.<device>. reset_peak_memory_stats set_per_process_memory_fraction synchronize",
        "torch.accelerator. current_accelerator current_device_index current_stream device_count device_index",
        "torch.accelerator. empty_host_cache synchronize",
        "torch._C. _host_emptyCache",
        "psutil. Process virtual_memory swap_memory",
        "importlib.metadata. version",
        "platform. node python_version release system",
        "Path. home",
    ),
    **each(
        FACTS,
        "torch.cuda. get_arch_list get_device_properties",
        "torch.backends.cudnn. version",
        "torch.backends.mps. get_name",
        "torch.version. cuda git_version hip",
        "torch._C. _accelerator_getAllocatorSettings _cuda_getDriverVersion",
        "torch.xpu. get_arch_list get_device_properties",
        "torch_xla.core.xla_model. get_memory_info",
        "torch_xla.runtime. device_type",
        "platform. mac_ver machine",
        "ctypes. CDLL",
    ),
    **each(
        FLAGS,
        "torch. get_float32_matmul_precision",
        "torch.backends.cuda.matmul. allow_bf16_reduced_precision_reduction allow_fp16_accumulation",
        "torch.backends.cuda.matmul. fp32_precision",
        "torch.backends.cudnn. allow_tf32 benchmark conv deterministic enabled",
    ),
    **dict.fromkeys(
        (
            *(f"Path.{name}" for name in ("chmod", "exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "open")),
            *(f"Path.{name}" for name in ("read_text", "resolve", "rglob", "stat", "touch", "unlink", "write_text")),
            *(f"os.{name}" for name in ("close", "fstat", "fsync", "open", "posix_fadvise")),
            *("mmap.mmap", "shutil.disk_usage", "tempfile.TemporaryFile"),
        ),
        FILES,
    ),
    **each(
        HOST,
        "comfy.model_management. extra_reserved_memory get_free_memory minimum_inference_memory get_torch_device",
        "comfy.model_management. load_models_gpu free_memory throw_exception_if_processing_interrupted",
    ),
    **each(
        KITCHEN,
        "comfy_kitchen. int8_attention quantize_w4a8_int8_weight",
        "comfy_kitchen.registry. registry",
        "comfy_kitchen.registry.registry. get_capable_backend list_backends validate_backend_for_call",
        "comfy_kitchen.tensor. QuantizedTensor",
        "comfy_kitchen.tensor.QuantizedTensor. from_float",
    ),
    **dict.fromkeys(
        (
            *("huggingface_hub.HfApi", "huggingface_hub.HfApi.verify_repo_checksums", "huggingface_hub.__version__"),
            *(f"huggingface_hub.errors.{kind}NotFoundError" for kind in ("Repository", "Revision")),
            *("huggingface_hub.errors.GatedRepoError", "huggingface_hub.file_download.http_get"),
            *("huggingface_hub.hf_hub_url", "huggingface_hub.utils.build_hf_headers", "os.replace"),
            "shutil.move",
        ),
        DOWNLOAD,
    ),
    # What ComfyUI has made or set before it loads a pack: its folders (what lies in them is attacked under FILES), its
    # flags, the place and dtype of what goes between nodes.
    **each(
        CONSTANT,
        "folder_paths. get_annotated_filepath get_directory_by_type get_filename_list get_folder_paths",
        "folder_paths. get_full_path get_input_directory get_output_directory get_user_directory",
        "folder_paths. folder_names_and_paths",
        "comfy.cli_args.args. disable_metadata fast",
        "comfy.model_management. cast_to_device current_loaded_models in_training intermediate_device",
        "comfy.model_management. intermediate_dtype lora_compute_dtype soft_empty_cache",
    ),
    # Only in nodes of ComfyUI, whose executor shows what they raise; and in the tiny checkpoints of tests and demo.
    **dict.fromkeys(("os.path.realpath", "os.walk", "os.utime", "shutil.rmtree", "tempfile.TemporaryDirectory"), FILES),
    **dict.fromkeys(("Path.is_symlink", "Path.expanduser", "Path.absolute", "Path.write_bytes"), FILES),
    "Path.read_bytes": FILES,
    **dict.fromkeys(
        (
            *("comfy.cli_args.args", "comfy.model_management", "comfy.model_management.InterruptProcessingException"),
            *(
                "ctypes.create_string_buffer", "importlib.metadata.PackageNotFoundError", "torch._C",
                "torch._C.DisableTorchFunction", "torch._C.DisableTorchFunctionSubclass", "torch.accelerator",
            ),
            *("torch.backends.cuda.matmul", "torch.backends.cudnn"),
            *("os._exit", "os.fsencode", "os.getpid", "os.path.normpath", "os.stat_result", "os.strerror"),
            *("os.environ.get", "os.environ.update", "socket.gethostname"),
            *("os.O_DIRECTORY", "os.O_RDONLY", "os.POSIX_FADV_SEQUENTIAL", "Path.group", "Path.owner"),
        ),
        CONSTANT,  # Path.group, Path.owner: attributes of ours have these names
    ),
}  # fmt: skip

COMPUTED = {"psutil": ("virtual_memory", "swap_memory")}  # names that are handed in: ``_system_bytes`` of facts.py


def chain(node: ast.AST) -> list[str]:
    """``a.b.c`` as its names; empty for anything that does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def names_in(nodes: list[ast.AST]) -> dict[str, str]:
    """What each name of a file stands for: imports, and names for parts of what was imported."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        targets, value = _assigned(node)
        for target, given in zip(targets, value, strict=False):
            if isinstance(target, ast.Name) and (meant := _meaning(given, names)):
                names.setdefault(target.id, meant)
    return names


def _assigned(node: ast.AST) -> tuple[list[ast.expr], list[ast.expr]]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [node.target], [node.value]
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return [], []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return target.elts, value.elts
    return [target], [value]


def _meaning(value: ast.expr, names: dict[str, str]) -> str:
    """What an expression stands for; empty where it is not part of an import."""
    if isinstance(value, ast.Attribute):
        first, *rest = chain(value) or [""]
        return ".".join([names[first], *rest]) if first in names else ""
    if not isinstance(value, ast.Call):
        return ""
    called = _meaning(value.func, names) or ".".join(chain(value.func))
    literal = [item.value for item in value.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if called == "getattr" and chain(value.args[0]) == ["torch"] and not literal:
        return DEVICE  # getattr(torch, device.type)
    if called.endswith("imported") and literal:
        return literal[0]
    if called in ("cast", "typing.cast") and len(value.args) == 2:
        return _meaning(value.args[1], names)
    return literal[0] if called == "sys.modules.get" and literal else ""


def _questions(every: Iterable[ast.AST]) -> Iterator[str]:
    """The questions of a file, all of whose nodes are given."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.Assign, ast.AnnAssign)
    nodes = [node for node in every if isinstance(node, kinds)]
    names, inner = names_in(nodes), set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Attribute):
                inner.add(id(node.value))
            if id(node) not in inner:
                first, *rest = chain(node) or [""]
                if first in names:
                    yield ".".join([names[first], *rest])
                elif isinstance(node.value, ast.Call) and (whole := _meaning(node.value, names)):
                    yield f"{whole}.{node.attr}"
                if node.attr in PATHS:
                    yield f"Path.{node.attr}"
        elif isinstance(node, ast.Call) and chain(node.func) in (["getattr"], ["hasattr"]):
            owner, name = _meaning(node.args[0], names) or names.get(".".join(chain(node.args[0])), ""), node.args[1]
            if owner and isinstance(name, ast.Constant):
                yield f"{owner}.{name.value}"
            elif owner in COMPUTED:
                yield from (f"{owner}.{each}" for each in COMPUTED[owner])
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def questions() -> dict[str, set[str]]:
    """Each question, and the files that ask it."""
    asked: dict[str, set[str]] = {}
    for source in SOURCES:
        for name in _questions(nodes_of(source)):
            if name.startswith("Path.") or any(name.startswith(start) for start in ASKED):
                asked.setdefault(name, set()).add(source)
    return asked


if __name__ == "__main__":
    for name, files in sorted(questions().items()):
        print(name, "" if name in TABLE else "NEW", *sorted(files))
