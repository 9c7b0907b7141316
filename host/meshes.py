"""ComfyUI's MESH and 3D files, and the meshes of ``paint``: from one to the other, and which files there are."""

from __future__ import annotations

import copy
import glob
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
import torch
from comfy_execution.graph_utils import is_link

from ..compat.device.execution import to_host
from ..compat.device.facts import value_or
from ..compat.errors import CheckpointError, InputError
from ..paint.choices import GAMMA, MESH_FILES
from .api import Types

if TYPE_CHECKING:  # painting is read when it is used, not at ComfyUI's start
    from ..paint.geometry.mesh import Mesh
    from ..paint.texturing import Texture

DEMO = "demo: ring"  # made here, so that the painting workflows run without a file
MAPS = {  # attribute of core's MESH -> the map of a glTF material
    "texture": "baseColor", "metallic_roughness": "metallicRoughness", "normal_map": "normal", "emissive": "emissive",
}  # fmt: skip
FACTORS = {  # the same for its factors
    "base_color_factor": "baseColorFactor", "metallic_factor": "metallicFactor",
    "roughness_factor": "roughnessFactor", "emissive_factor": "emissiveFactor", "double_sided": "doubleSided",
    "normal_scale": "normalTexture.scale", "occlusion_strength": "occlusionTexture.strength",
    "emissive_strength": "KHR_materials_emissive_strength.emissiveStrength",
}  # fmt: skip
UPSCALING = ("ImageUpscaleWithModel", "UpscaleModelLoader", "AnyGPUPaintViews")
SAVED = " [output]"  # ComfyUI's own mark of a file in its output folder


def mesh_files() -> list[str]:
    """Mesh files of ComfyUI's inputs and, marked, outputs, also anywhere in their folder 3d; then the demo's mesh."""
    return [*_meshes_in("input", ""), *_meshes_in("output", SAVED), DEMO]


def _meshes_in(kind: str, mark: str) -> list[str]:
    root = Path(folder_paths.get_directory_by_type(kind))
    files = [*root.glob("*.*"), *root.glob("3d/**/*.*")]
    return sorted(path.relative_to(root).as_posix() + mark for path in files if path.suffix.lower() in MESH_FILES)


def _path_and_root(name: str) -> tuple[Path, Path]:
    """The path that a name of :func:`mesh_files` means, and the input or output folder in which it has to be."""
    root = Path(folder_paths.get_directory_by_type("output" if name.endswith(SAVED) else "input")).resolve()
    return value_or((root / name.removesuffix(SAVED)).resolve, root), root  # a zero byte raises


def mesh_path(name: str) -> Path:
    """The path of a name that :func:`mesh_files` lists; CheckpointError for any other."""
    path, root = _path_and_root(name)
    if not path.is_relative_to(root) or not value_or(path.is_file, False):
        expected = f"a file of {', '.join(MESH_FILES)}"
        fix = f"Upload one on the node, or put the file, not a link, into input/3d and press R. {DEMO!r} needs none."
        raise CheckpointError(f"no mesh {name!r} in {str(root)!r}", expected=expected, fix=fix)
    return path


def file_stamp(name: str) -> Any:
    """Names, times and sizes of the file ``name`` and, beside an OBJ or glTF, of files whose names begin with its own,
    such as its materials and buffers; None where there is no such file."""
    path, _ = _path_and_root(name or "")  # None: it is linked
    alone = path.suffix.lower() not in (".obj", ".gltf")
    files = [path] if alone else value_or(lambda: sorted(path.parent.glob(f"{glob.escape(path.stem)}*")), [path])
    if not value_or(path.is_file, False):
        return None
    return value_or(lambda: [(file.name, file.stat().st_mtime, file.stat().st_size) for file in files], None)


def mesh_of_file(name: str, file: Any, check: Callable[[], None]) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh in core's FILE_3D ``file``, else in the file ``name``, and notes on it; ``check`` raises on a cancel."""
    from ..paint.demo import ring
    from ..paint.geometry.mesh import load_mesh

    if file is None and name == DEMO:
        return ring(), ("the ring of the demo",)
    if file is None:
        return load_mesh(mesh_path(name), check)
    source = file.get_source()
    if isinstance(source, str):
        return load_mesh(Path(source), check)
    # After a cancel the file may still be open, and Windows removes no such file.
    with tempfile.TemporaryDirectory(prefix="anygpu-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"mesh.{file.format or 'glb'}"
        file.save_to(str(path))
        return load_mesh(path, check)


def from_core(mesh: Any) -> Mesh:
    """The one mesh of a core MESH: no padding, normals and colours if one a vertex; InputError for none or several."""
    from ..paint.geometry.mesh import Mesh

    vertices, faces = getattr(mesh, "vertices", None), getattr(mesh, "faces", None)
    if vertices is None or faces is None:
        raise InputError(f"a MESH of {type(mesh).__name__}", expected="vertices and faces", fix="Connect a mesh.")
    if len(vertices) != 1 and getattr(vertices, "ndim", 3) == 3:
        fix = "Texture them one after the other, or merge them."
        raise InputError(f"a MESH of {len(vertices)} meshes", expected="one", fix=fix)
    single = getattr(vertices, "ndim", 3) == 2
    batched = (vertices, faces, mesh.uvs, getattr(mesh, "normals", None), getattr(mesh, "vertex_colors", None))
    tensors = [*batched] if single else [None if each is None else each[0] for each in batched]
    if mesh.vertex_counts is not None and not single:
        count, face_count = int(mesh.vertex_counts[0]), int(mesh.face_counts[0])
        counts = (count, face_count, count, count, count)
        tensors = [None if each is None else each[:most] for each, most in zip(tensors, counts, strict=True)]
    points, faces, uvs, *others = tensors
    normals, colours = (None if each is None or len(each) != len(points) else each for each in others)
    if uvs is not None:  # rounded as in a GLB, where v is flipped on the way out and back in
        uvs = torch.stack((uvs[:, 0], 1 - (1 - uvs[:, 1])), dim=1)
    return Mesh(points, faces, uvs, normals=normals, colours=colours)


def to_core(mesh: Mesh) -> Any:
    """``mesh`` as a core MESH of one, on the host, with its maps and factors."""
    uvs = None if mesh.uvs is None else to_host(mesh.uvs).float()[None]
    made = Types.MESH(to_host(mesh.vertices).float()[None], to_host(mesh.faces).long()[None], uvs=uvs)
    for name, values in {"normals": mesh.normals, "vertex_colors": mesh.colours}.items():
        setattr(made, name, None if values is None else to_host(values).float()[None])
    for attribute, name in MAPS.items():
        setattr(made, attribute, mesh.maps[name][None] if name in mesh.maps else None)
    factors = {name: mesh.factors[given] for name, given in FACTORS.items() if given in mesh.factors}
    if factors:
        made.material = factors
    if "occlusion" in mesh.maps:
        _add_occlusion(made, mesh.maps["occlusion"][None])
    return made


def _add_occlusion(mesh: Any, occlusion: torch.Tensor) -> None:
    """Put red of ``occlusion`` (1, H, W, 3) into red of the metallic-roughness map, at the size of the larger."""
    if mesh.metallic_roughness is None:
        mesh.metallic_roughness = torch.ones_like(occlusion)  # the factors multiply it
        mesh.metallic_roughness[..., 2] = float("metallic_factor" in (getattr(mesh, "material", None) or {}))
    maps = [each.movedim(-1, 1) for each in (occlusion[..., :1], mesh.metallic_roughness[..., 1:])]
    size = [max(sides) for sides in zip(*(each.shape[2:] for each in maps), strict=True)]
    maps = [torch.nn.functional.interpolate(each, size, mode="bilinear") for each in maps]
    mesh.metallic_roughness, mesh.occlusion_in_mr = torch.cat(maps, dim=1).movedim(1, -1).contiguous(), True


def with_texture(mesh: Any, texture: Texture) -> Any:
    """A copy of a core MESH with the maps of ``texture``; its other maps stay, the factors of the painted ones go."""
    textured = copy.copy(mesh)
    textured.texture, textured.vertex_colors = texture.colour[None], None
    dropped = ["base_color_factor"]
    if texture.metallic is not None and texture.roughness is not None:
        packed = (torch.ones_like(texture.metallic), texture.roughness, texture.metallic)
        textured.metallic_roughness = torch.stack(packed, dim=-1)[None]
        textured.occlusion_in_mr, dropped = False, [*dropped, "metallic_factor", "roughness_factor"]
        if getattr(mesh, "occlusion_in_mr", False) and mesh.metallic_roughness is not None:
            _add_occlusion(textured, to_host(mesh.metallic_roughness).float())
    if isinstance(getattr(mesh, "material", None), dict):
        textured.material = {name: value for name, value in mesh.material.items() if name not in dropped} or None
    return textured


def with_geometry(mesh: Any, changed: Mesh) -> Any:
    """``changed`` as a core MESH with the maps and the material of ``mesh``."""
    made = to_core(changed)
    for name in (*MAPS, "material", "occlusion_in_mr", "unlit"):
        setattr(made, name, getattr(mesh, name, None))
    return made


def with_colour(mesh: Any, colour: torch.Tensor) -> Any:
    """A copy of a core MESH with a texture (T, T, 3) that is tinted already: its colour factor becomes 1."""
    coloured, material = copy.copy(mesh), getattr(mesh, "material", None) or {}
    coloured.texture = colour[None]
    if factor := material.get("base_color_factor"):
        coloured.material = {**material, "base_color_factor": [1.0, 1.0, 1.0, *factor[3:]]}
    return coloured


def _tint(mesh: Any) -> torch.Tensor:
    """(3,): the base colour factor, which is linear, as a factor of the texture's sRGB colours; ones without it."""
    factor = (getattr(mesh, "material", None) or {}).get("base_color_factor") or (1.0, 1.0, 1.0)
    return torch.tensor(factor[:3]) ** (1 / GAMMA)


def colour_of(mesh: Any) -> torch.Tensor:
    """The tinted texture (T, T, 3) of a core MESH on the host; InputError for a mesh without one."""
    if mesh.texture is None:
        raise InputError("a mesh without a texture", expected="a painted one", fix="Use AnyGPU Bake Texture before it.")
    return to_host(mesh.texture)[0, ..., :3] * _tint(mesh)


def shown_colour(mesh: Any) -> torch.Tensor | None:
    """The tinted texture (T, T, 3) of a core MESH, else colours (N, 3) of its vertices or its tint; None for none."""
    if mesh.texture is not None:
        return colour_of(mesh)
    tint, colours = _tint(mesh), getattr(mesh, "vertex_colors", None)
    if colours is None:
        return None if bool(tint.eq(1).all()) else tint.expand_as(mesh.vertices).reshape(-1, 3)
    return to_host(colours)[..., :3].reshape(-1, 3).clamp(0, 1) ** (1 / GAMMA) * tint


def history(prompt: Any, node: str) -> str:
    """A node of a prompt and all nodes before it as JSON: equal for equal results, as in ComfyUI's cache."""
    nodes, left = dict[str, Any](), [node]
    while left:
        name = left.pop()
        if name in (prompt or {}) and name not in nodes:
            nodes[name] = prompt[name]
            left += [each[0] for each in prompt[name]["inputs"].values() if is_link(each)]
    return json.dumps(nodes, sort_keys=True, default=str)


def enlarging(prompt: Any, node: str, inputs: dict[str, int]) -> tuple[str, Path] | None:
    """The history of the AnyGPU Paint Views from which all ``inputs`` of ``node`` come, and the file of the model by
    which core's Upscale Image (using Model) enlarges each; None for other graphs. ``inputs``: name -> its output."""
    found = set()
    with suppress(KeyError, TypeError, ValueError, OSError):  # of other graphs
        for name, output in inputs.items():
            upscale = prompt[prompt[node]["inputs"][name][0]]
            model, (views, slot) = prompt[upscale["inputs"]["upscale_model"][0]], upscale["inputs"]["image"]
            kinds = upscale["class_type"], model["class_type"], prompt[views]["class_type"]
            file = folder_paths.get_full_path("upscale_models", model["inputs"]["model_name"])
            found.add((history(prompt, views), Path(file)) if (*kinds, slot) == (*UPSCALING, output) else None)
        return found.pop() if len(found) == 1 else None
    return None


def enlarged(file: Path, views: torch.Tensor) -> torch.Tensor:
    """``views`` (V, S, S, 3) as core's Upscale Image (using Model) enlarges them by the model in ``file``."""
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel, UpscaleModelLoader

    names = folder_paths.get_filename_list("upscale_models")
    found = (name for name in names if folder_paths.get_full_path("upscale_models", name) == str(file))
    (model,) = UpscaleModelLoader.execute(next(found, file.name)).result
    (larger,) = ImageUpscaleWithModel.execute(model, views).result
    return larger


def as_images(texture: Texture) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Base colour, metallic, roughness as IMAGE (1, T, T, 3), T 64 if unpainted, and the painted texels (1, T, T)."""
    metallic = torch.zeros(64, 64) if texture.metallic is None else texture.metallic
    roughness = torch.ones(64, 64) if texture.roughness is None else texture.roughness
    grey = [one[None, ..., None].expand(-1, -1, -1, 3).contiguous() for one in (metallic, roughness)]
    return texture.colour[None], grey[0], grey[1], texture.painted.float()[None]
