"""The kind of jobs that texture a mesh, the receipts of their textures, and the jobs of either kind in a job file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compat.checkpoints.identity import picture_content, values_hash
from ..compat.decision import AUTO
from ..compat.device.execution import to_host
from ..compat.durable import write_file
from ..compat.errors import CheckpointError, InputError
from ..compat.memory.parts import Silent
from ..compat.records import WITHOUT, json_in, plain
from ..pipelines.records import receipts
from ..pipelines.records.job import USUAL_STEPS, Content, Job, Result, VideoJob, by_content, job_on
from ..pipelines.records.job_lists import files_in, prompts_in, require_few
from ..pipelines.records.places import PICTURES, Machine, Places
from .adapter_loading import AdapterRequest, load_adapter
from .baking.bake import BakeSettings
from .choices import ADAPTER_VARIANTS, NEGATIVE, ORTHO_SCALE, PBR, TAUGHT_SIZES, TG2MV, VARIANTS
from .geometry.cameras import Camera, CameraTable, camera_table
from .geometry.mesh import FORMATS, Mesh, glb_of, load_mesh
from .geometry.mesh_cost import Check, extras_of
from .loading import PaintPipeline, PaintRequest, load_paint
from .networks.mv_adapter import variant_of
from .networks.stable_diffusion import base_in
from .networks.weights import Weights, weights_in
from .pictures import cut_out
from .sampling.delight import DelightSettings
from .sampling.painting import PaintSettings, completed
from .texturing import OneStep, Texture, raster_size, textured, with_detail

ALPHA = "alpha"  # as the mask of pictures
SHARED = ("texture", "max_views", "prompt", "negative", "maps", "shading")  # fields of a job and of OneStep


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of an IMAGE, each a file of its own, and the MASK that cuts them out."""

    files: tuple[Content, ...]
    mask: str = ""  # hash of their transparency; ALPHA: the file's own, whatever it is; empty: ignored

    @classmethod
    def of(cls, image: Tensor, mask: Tensor | None) -> Pictures:
        files = (Content("", picture_content(each[None]), size=(each.shape[1], each.shape[0])) for each in image)
        masked = mask is not None and bool((mask > 0).any())
        return cls(tuple(files), picture_content(mask) if masked else "")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Detail:
    """Pictures that are put onto a finished texture."""

    pictures: Mapping[str, Pictures]  # by their places, as ``with_detail`` takes them
    cameras: tuple[Camera, ...] = ()  # empty: found near the places


@dataclass(frozen=True, slots=True)
class PaintJob(Job):
    kind: ClassVar[str] = "paint"

    model: Content  # folder or file of a paint model; of MV-Adapter the checkpoint under it
    mesh: Content  # with UVs
    picture: Content | None  # of the object, from the front; None where words alone describe it
    paint: PaintSettings = field(default_factory=PaintSettings, metadata={WITHOUT: ("latents",)})
    texture: BakeSettings = field(default_factory=BakeSettings)
    precision: str = AUTO  # of the models
    max_views: int = 8  # as of OneStep
    delight: Content | None = None  # model that takes shading out of the picture first; None leaves it in
    image_encoder: Content | None = None  # folder of DINOv2-giant, which PBR models need
    delighting: DelightSettings = field(default_factory=DelightSettings)
    variant: str = AUTO  # as of the requests, like the next
    weights: str = AUTO
    vae: Content | None = None  # folder of another VAE
    adapter: Content | None = None  # file of MV-Adapter, for whose checkpoint ``lora`` is
    lora: Content | None = None
    lora_strength: float = 1.0
    prompt: str = ""  # as of OneStep, like the next
    negative: str = NEGATIVE
    mask: str = ""  # as of Pictures, whose first is ``picture``
    normals: bool = True  # whether the mesh's own count
    views: tuple[Camera, ...] = ()  # empty: the family's own
    ortho_scale: float = ORTHO_SCALE  # of the views
    maps: int = 0  # as of OneStep, like the next
    shading: str = AUTO
    more_pictures: tuple[Content, ...] = ()  # of the object from elsewhere
    upscaler: Content | None = None  # file of an upscale model, by which the host enlarges views before they are baked
    details: tuple[Detail, ...] = ()  # one after another

    @property
    def key(self) -> str:
        return _hash(by_content(plain(self)))

    @property
    def model_key(self) -> str:  # equal for jobs that the same loaded models paint
        given = {name: getattr(self, name) for name in ("delight", "image_encoder", "vae", "adapter", "lora")}
        others = {name: item.whole or item.content for name, item in given.items() if item is not None}
        chosen = (("variant", AUTO), ("weights", AUTO), ("lora_strength", 1.0))
        others |= {name: getattr(self, name) for name, usual in chosen if getattr(self, name) != usual}
        return _hash(self.model.whole or self.model.content, self.precision, *([others] if others else []))

    @property
    def size(self) -> float:
        return float(self.paint.size**2 * (self.paint.steps or USUAL_STEPS))

    @property
    def inputs(self) -> tuple[Content, ...]:
        return (self.mesh, *([] if self.picture is None else [self.picture]), *self.more_pictures)

    @property
    def title(self) -> str:
        return f"{Path(self.mesh.name).stem[:40]} {self.paint.seed}"


def job_of(line: str) -> Job:
    """The job of one line of a job file, a video or a mesh to texture; raises InputError for none, and says why."""
    return job_on(line, VideoJob, PaintJob)


def load(job: PaintJob, machine: Machine, progress: Any) -> tuple[PaintPipeline, ...]:
    """The pipeline that paints, then that of ``job.delight``, if any; MV-Adapter comes alone, since it paints the light
    that its pictures have. Raises CheckpointError where a model is not on this machine."""

    def find(item: Content | None) -> Any:
        return None if item is None else machine.places.model(item, progress.check)

    shared = {"vae": find(job.vae), "precision": job.precision, "device": machine.device, "state": machine.state}
    if job.adapter is not None:
        tokenizer = None if machine.single is None else machine.single.tokenizers.get("clip_l")
        shared |= {"tokenizer": tokenizer, "lora": find(job.lora), "lora_strength": job.lora_strength}
        adapted = AdapterRequest(find(job.model), find(job.adapter), job.variant, **shared)
        return (load_adapter(adapted, progress, **machine.host),)
    request = PaintRequest(find(job.model), job.variant, job.weights, image_encoder=find(job.image_encoder), **shared)
    painter = load_paint(request, progress, **machine.host)
    if job.delight is None:
        return (painter,)
    request = replace(request, model=find(job.delight), variant=AUTO, weights=AUTO, vae=None, image_encoder=None)
    return painter, load_paint(request, progress, **machine.host)


@dataclass(frozen=True, eq=False)
class Textured:
    """A mesh with the texture that a job painted, and its receipt."""

    mesh: Mesh
    texture: Texture
    receipt: Mapping[str, Any]

    def glb(self) -> bytes:
        made = self.texture
        both = None if made.metallic is None else torch.stack((made.metallic, made.roughness), dim=-1)
        return glb_of(self.mesh, made.colour, both, **receipts.tags_for(self.receipt))

    def write(self, path: Path) -> Path:
        return write_file(path, self.glb())


def run(
    job: PaintJob, machine: Machine, progress: Any, loaded: Sequence[PaintPipeline], mesh: Mesh | None = None
) -> Textured:
    """Paint a job with the pipelines of :func:`load`, then put its details on the texture. ``mesh`` is taken where the
    job names no mesh file, or one that cannot be read. Raises InputError for enlarged views outside ComfyUI."""
    files = Places(machine.places.files, machine.places.files, state=machine.state)
    if job.mesh.name or mesh is None:
        try:
            mesh, _ = load_mesh(files.model(job.mesh, progress.check), progress.check)
        except CheckpointError:
            if mesh is None:
                raise
    files.differences = machine.places.differences
    if not job.normals:
        mesh = replace(mesh, normals=None)
    painter, delight = loaded[0], loaded[1] if len(loaded) > 1 else None
    given: dict[str, Any] = {name: getattr(job, name) for name in SHARED}
    if job.views:
        columns = {f"{one.name}s": [getattr(view, one.name) for view in job.views] for one in fields(Camera)}
        given["cameras"] = camera_table(**columns, ortho_scale=job.ortho_scale)
    settings = OneStep(job.paint, delight=job.delighting, **given)
    shown = _read_pictures(Pictures(job.inputs[1:], job.mask), files, progress)
    hooks = {name: hook for name, hook in machine.host.items() if name == "make_room"}
    if job.upscaler is not None:
        if machine.enlarged is None:
            found, fix = f"views enlarged by {job.upscaler.name!r}", "Use AnyGPU Replay."
            raise InputError(found, expected="ComfyUI, whose node enlarges them", fix=fix)
        hooks["enlarge"] = partial(machine.enlarged, machine.places.model(job.upscaler, progress.check))
    texture, _, cameras = textured(mesh, shown, painter, delight, settings, progress, **hooks)
    for each in job.details:
        pictures = {place: _read_pictures(shown, files, progress) for place, shown in each.pictures.items()}
        table = CameraTable(each.cameras) if each.cameras else None
        made = with_detail(mesh, texture.colour, pictures, table, progress, painter.offloader.device)
        texture = replace(texture, colour=made.texture)
    job = replace(job, normals=mesh.normals is not None, paint=completed(painter, job.paint, Silent()))
    return Textured(mesh, texture, receipt_of(lambda: job, painter, mesh, texture, cameras))


def render(job: PaintJob, machine: Machine, progress: Any, loaded: Sequence[PaintPipeline]) -> Result:
    """The mesh of a job as a GLB with its texture and its receipt."""
    made = run(job, machine, progress, loaded)
    return Result(made.texture.colour, ".glb", made.write)


def _read_pictures(pictures: Pictures, files: Places, progress: Any) -> list[Tensor]:
    """The pictures, cut out by the transparency of their files, or of the first for all, unless ``pictures.mask`` is
    empty; an empty list if there are none or their sizes differ. Raises InputError where neither is the mask with which
    the job was painted."""
    shown, masks = [], []
    for file in pictures.files:
        if not file.size:  # known by its file, not by its pixels
            files.model(file, progress.check)
        shown.append(files.frames(file, progress.check, 1)[0])
        mask = files.mask(file, shown[-1].shape[1:3]) if pictures.mask else None
        masks += [] if mask is None else [mask]
    if len({each.shape for each in shown}) != 1:  # none, or an edited receipt
        return []
    tried = [*([torch.cat(masks)] if len(masks) == len(shown) else []), *masks[:1]]  # all together; the first for all
    mask = next((each for each in tried if pictures.mask in (ALPHA, picture_content(each))), None)
    if pictures.mask not in ("", ALPHA) and mask is None:
        file = pictures.files[0]
        found = f"{file.name or files.known[file].name!r} without the mask with which it was painted"
        fix = "Open the workflow in the file instead: drop it onto ComfyUI."
        raise InputError(found, expected="a mask that is the picture's own transparency", fix=fix)
    return cut_out(torch.cat(shown), mask)


def asked_job(
    pipeline: PaintPipeline, delight: PaintPipeline | None, mesh: Mesh, image: Any, mask: Any, settings: OneStep
) -> PaintJob:
    """The job of a texture that a node painted; its mesh has a hash and no name. ``image`` and ``mask`` are core's
    IMAGE and MASK, each possibly None; models are known by their content."""
    request = pipeline.request
    source = request.model.file if isinstance(request.model, Weights) else pipeline.source
    content, values = partial(receipts.named, state=request.state), {one.name: one.default for one in fields(PaintJob)}
    values |= {one.name: getattr(request, one.name) for one in fields(request) if one.name in values}
    own = {name: values[name] and content(values[name]) for name in ("vae", "image_encoder", "adapter", "lora")}
    own |= {name: values[name] for name in ("precision", "weights", "lora_strength")}
    own |= {name: getattr(settings, name) for name in SHARED}
    table = None if pipeline.family == "mv_adapter" else settings.cameras  # it has its own alone
    pictures = Pictures(()) if image is None else Pictures.of(image, mask)
    return PaintJob(
        content(source or pipeline.source), Content("", geometry_hash(mesh)), next(iter(pictures.files), None),
        completed(pipeline, settings.paint, Silent()),
        delight=content(delight.source) if delight is not None and pipeline.family == "paint" else None,
        variant=pipeline.variant if pipeline.variant in (*VARIANTS, *ADAPTER_VARIANTS) else AUTO,
        more_pictures=pictures.files[1:], mask=pictures.mask, normals=mesh.normals is not None,
        delighting=settings.delight, views=() if table is None else table.cameras,
        ortho_scale=ORTHO_SCALE if table is None else table.ortho_scale, **own,
    )  # fmt: skip


def missing_of(pipeline: PaintPipeline, delight: PaintPipeline | None, dino: Any) -> list[str]:
    """Inputs of a texture, in words for its receipt, that no file holds and a replay would lack."""
    model, light = pipeline.request.model, None if delight is None else delight.request
    absent = {
        "core's MODEL, CLIP and VAE as one file has them": isinstance(model, Weights) and model.file is None,
        "what a demo model leaves out of PBR": Path(pipeline.stands_in_for).name == PBR,
        "states of another image encoder": dino is not None and pipeline.family == "paint_pbr",
        "a delight model of another precision or VAE": light is not None
        and pipeline.family == "paint"
        and (light.precision, light.weights, light.vae) != (pipeline.request.precision, AUTO, None),
    }
    return [name for name, is_absent in absent.items() if is_absent]


def receipt_of(
    job: Callable[[], PaintJob], pipeline: PaintPipeline, mesh: Mesh, texture: Texture, cameras: CameraTable,
    missing: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The receipt of a texture, with hashes of it and its mesh. It names what is ``missing``, also a
    ``job`` that cannot be written down and so raises."""
    made = {"texture": texture_hash(texture), "mesh": geometry_hash(mesh)}
    return receipts.record_of(job, pipeline, missing, **made, cameras=[list(astuple(camera)) for camera in cameras])


def geometry_hash(mesh: Mesh) -> str:
    """The hash of every bit of the vertices, faces and UVs."""
    parts = (mesh.vertices.double(), mesh.faces.long(), *([] if mesh.uvs is None else [mesh.uvs.float()]))
    return values_hash(*map(to_host, parts))


def texture_hash(texture: Texture) -> str:
    return values_hash(*filter(torch.is_tensor, (texture.colour, texture.metallic, texture.roughness)))


def read_receipt(path: Path) -> dict[str, Any]:
    """The receipt in a GLB; raises CheckpointError where there is none, InputError where it is damaged or newer."""
    text = extras_of(path).get(receipts.TAG)
    return receipts.checked(json_in(text, f"the receipt of {path.name!r}") if isinstance(text, str) else None, path)


def replay(path: Path, machine: Machine, progress: Any) -> receipts.Replayed:
    """Paint the texture of a GLB again, on the job's mesh file or, without one, on the mesh in the GLB; ``progress``
    gets a line for all that differs from the receipt. Raises as the replay of a video."""
    record = read_receipt(path)
    job = receipts.job_of(record, PaintJob)
    mesh: Mesh | None = load_mesh(path, progress.check)[0]
    machine.places.differences = differences = []
    if geometry_hash(mesh) != record.get("mesh"):
        differences += [] if job.mesh.name else ["the mesh in the file, which was changed"]
        mesh = None if job.mesh.name else mesh
    with torch.no_grad():
        loaded = load(job, machine, progress)
        differences += receipts.differences_from(record, loaded[0])
        for line in differences:
            progress.notify(f"differs: {line}")
        made = run(job, machine, progress, loaded, mesh)
    expected = record.get("texture")
    same = made.receipt["texture"] == expected if isinstance(expected, str) else None
    return receipts.Replayed(made, same, tuple(dict.fromkeys(differences)), "texture")


def paint_jobs(
    model: Content, meshes: Path, pictures: Path, seeds: Sequence[int], painting: PaintSettings,
    add: Callable[[Path], str], texture_size: int = 2048, prompts: Sequence[str] = (), size: int = 0,
    check: Check = lambda: None, **others: Any,
) -> list[PaintJob]:  # fmt: skip
    """A job for each mesh of a folder, prompt and seed, from the picture of its name, cut out by its transparency; the
    variant tg2mv takes no pictures. Raises InputError where there are no meshes, one has no picture, there are too many
    jobs, or a delight model is given beside MV-Adapter, which would ignore it.

    Args:
        painting: settings of each job, but for its seed, and for its view size where ``size`` is given.
        add: takes a file to where the machines find it, and returns its name there.
        check: is called while files are hashed, and may raise to cancel.
        others: further fields of each job."""
    if others.get("adapter") and others.get("delight"):
        fix = "Choose no delight: this model paints the light that its pictures have."
        raise InputError("delight beside MV-Adapter", expected="none", fix=fix)
    from_words, painting = others.get("variant") == TG2MV, replace(painting, size=size or painting.size)
    shapes = files_in(meshes, "meshes", FORMATS)
    by_name = {path.stem: path for path in sorted(pictures.glob("*.*")) if path.suffix.lower() in PICTURES}
    lonely = next((path for path in shapes if path.stem not in by_name), None)
    if lonely is not None and not from_words:
        found, fix = f"no picture for the mesh {lonely.name!r}", "Give each mesh a picture of its name."
        raise InputError(found, expected=f"a picture named {lonely.stem} in {str(pictures)!r}", fix=fix)
    require_few(len(shapes) * len(prompts or [""]) * len(seeds))
    baking, jobs = BakeSettings(texture_size, raster_size(painting.size, texture_size)), []
    for path in shapes:
        mesh, shown = Places().content(path, add(path), check), by_name.get(path.stem)
        picture = None if from_words or shown is None else Places().content(shown, add(shown), check)
        for prompt, seed in product(prompts or [""], seeds):
            settings, mask = replace(painting, seed=seed), "" if from_words else ALPHA
            jobs.append(PaintJob(model, mesh, picture, settings, texture=baking, prompt=prompt, mask=mask, **others))
    return jobs


def adapter_fields(model: Path, adapter: Path, item: Content, prompts: str, negative: str) -> dict[str, Any]:
    """The arguments of :func:`paint_jobs` for MV-Adapter on a checkpoint, of which only headers are read; ``item`` is
    the ``adapter`` as jobs name it, ``prompts`` one a line. Raises CheckpointError where the two do not fit, InputError
    where tg2mv has no prompt."""
    kind = base_in(model).kind
    variant = variant_of(weights_in(adapter, "adapter").shapes, kind, adapter.name, "")
    words = prompts_in(prompts) if prompts.strip() or variant == TG2MV else ()
    own = {"adapter": item, "variant": variant, "size": TAUGHT_SIZES[kind]}
    return {**own, "negative": negative or NEGATIVE, "prompts": words}


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps([PaintJob.kind, *values], sort_keys=True).encode()).hexdigest()
