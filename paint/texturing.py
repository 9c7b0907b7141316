"""Stages around painting, as nodes call them: rendering, baking and filling a mesh, or all in one step."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compat.device.execution import HOST, Checked, picture_of, to_host
from ..compat.device.facts import GIBIBYTE, free_bytes, host_free_bytes, swap_free_bytes
from ..compat.errors import InputError, PackError, UnsupportedError, require_choice
from ..compat.memory.parts import ProgressStage, Silent
from .baking.bake import Baked, BakeSettings, bake
from .baking.fill import filled, from_the_other_half
from .baking.projection import Projected, Reference, projected
from .choices import NEGATIVE, NORMALS, PBR, PLACES
from .geometry.cameras import Camera, CameraTable, views_for
from .geometry.mesh import Mesh, Surface
from .geometry.views import VIEW_SIZE, Maps, chosen_views, rendered_maps
from .loading import PaintPipeline
from .pictures import recentred
from .sampling.adapter_painting import paint_six_views
from .sampling.delight import DelightSettings, delight_image
from .sampling.painting import Painted, PaintInputs, PaintSettings, completed, explained, paint_views

MAP_BYTES = 35  # of rendering maps, for each pixel of a view: 25 stay; measured with six views of 4096
TEXEL_BYTES = 200  # of baking, at its peak; counted in benchmarks/results/paint_stages.csv
PICTURE_BYTES, PROJECTED_BYTES = 170 * 10**6, 210  # of projecting a picture, and for each texel: counted likewise
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Texture:
    colour: Tensor  # (T, T, 3) in 0..1, fp32, on the CPU
    metallic: Tensor | None  # (T, T), or None where nothing painted them
    roughness: Tensor | None
    painted: Tensor  # (T, T) bool, texels that a view painted; the rest is filled
    share: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OneStep:
    paint: PaintSettings = field(default_factory=PaintSettings)
    texture: BakeSettings = field(default_factory=BakeSettings)
    max_views: int = 8  # 6..12, PBR only: the six fixed views and those that show most of what is not seen
    delight: DelightSettings = field(default_factory=DelightSettings)
    prompt: str = ""  # as of PaintInputs
    negative: str = NEGATIVE
    cameras: CameraTable | None = None  # None: the family's own
    maps: int = 0  # pixels of the maps, 0: those of the bake, or of a view for MV-Adapter
    shading: str = "auto"  # of the maps, of choices.NORMALS


def raster_size(view_size: int, texture_size: int) -> int:
    """Pixels at which the mesh is rasterised: as published, or less where neither views nor texture could show it."""
    return min(VIEW_SIZE, max(4 * view_size, texture_size))


def maps_of(
    mesh: Mesh, cameras: CameraTable | None, family: str | None = None, normals: str = "auto", size: int = VIEW_SIZE,
    progress: Any = None, device: torch.device | None = None,
) -> tuple[Maps, CameraTable, Surface]:  # fmt: skip
    """Maps of the mesh on the CPU, ``size`` pixels a side, the cameras they are of, and the checked surface.

    ``cameras`` None means the six fixed views of ``family``, the painting pipeline's; ``auto`` normals are flat for
    ``paint_pbr``, which was taught so. Raises InputError for an unusable mesh, an unknown choice, a size out of range,
    or cameras that the family does not know, and UnsupportedError where memory is too small."""
    require_choice("normals", normals, NORMALS, "Choose auto.")
    table = views_for(family, cameras)
    flat = family == "paint_pbr" if normals == "auto" else normals == "flat"
    what, fix = f"rendering maps of {size} pixels", "Lower size, view_size or texture_size."
    roomy(HOST, MAP_BYTES * len(table) * size**2, (progress or Silent()).notify)
    with Checked((progress or Silent()).check), explained(what, device or HOST, fix):
        surface = Surface.of(mesh, device, table.frame)
        return rendered_maps(surface, table, size, flat, collected=HOST), table, surface


def texture_of(
    mesh: Mesh, cameras: CameraTable, pictures: Tensor, metallic_roughness: Tensor | None = None,
    settings: BakeSettings | None = None, progress: Any = None, device: torch.device | None = None,
) -> Texture:  # fmt: skip
    """The texture that ``pictures`` of ``cameras`` make on ``mesh``, every texel coloured.

    ``pictures`` and ``metallic_roughness`` are (V, S, S, 3), of any size S. Where the device has no room the CPU makes
    it; raises UnsupportedError where that has none either."""
    progress, settings = progress or Silent(), settings or BakeSettings()
    target = roomy(device, settings.texture_size**2 * TEXEL_BYTES, progress.notify)
    total = len(cameras) * (1 if metallic_roughness is None else 2)
    count = counted(progress, total, "baking")
    what = f"baking a texture of {settings.texture_size} pixels"
    with Checked(progress.check), explained(what, target or HOST, "Lower texture_size or view_size."):
        surface = Surface.of(mesh, target, cameras.frame)

        def coloured(painted: Tensor) -> tuple[Tensor, Baked, float]:  # filled; not filled; the share mirrored
            baked = bake(surface, cameras, painted, settings, count)
            both_halves = from_the_other_half(baked, surface, cameras, painted, settings, progress.check)
            colour = filled(both_halves, surface, settings.fill, settings.exact, progress.check)
            return to_host(colour), baked, both_halves.share - baked.share

        colour, baked, mirrored = coloured(pictures)
        metallic = roughness = None
        if metallic_roughness is not None:
            metallic, roughness, _ = coloured(metallic_roughness)[0].unbind(-1)
    progress.step(total, total, ProgressStage("baking"))
    other = f", {mirrored:.1%} mirrored from its other half" if mirrored else ""
    share = f"{baked.share:.1%} of the surface painted{other}, the rest filled from neighbouring areas"
    return Texture(colour, metallic, roughness, to_host(baked.painted), share=baked.share, notes=(share, *baked.notes))


def detail_bytes(size: int) -> int:  # of with_detail at its peak, for a texture of so many texels a side
    return PICTURE_BYTES + PROJECTED_BYTES * size**2


def with_detail(
    mesh: Mesh,
    texture: Tensor,
    pictures: dict[str, list[Tensor]],
    cameras: CameraTable | None = None,
    progress: Any = None,
    device: torch.device | None = None,
) -> Projected:
    """A finished texture (T, T, 3) in 0..1 with the detail of reference pictures, on the CPU.

    ``pictures`` of each place of :data:`choices.PLACES` are (H, W, 3 or 4), cut out or before a plain background;
    ``cameras`` are the directions they were taken from, in that order; None finds them near each place. Raises
    InputError without a picture, and for another number of cameras."""
    progress = progress or Silent()
    shown = [(place, picture) for place in PLACES for picture in pictures.get(place, [])]
    if not shown or (cameras is not None and len(cameras) != len(shown)):
        found = f"{len(shown)} pictures to project" + (f" for {len(cameras)} cameras" if cameras is not None else "")
        fix = "Connect front, back, left or right."
        raise InputError(found, expected="at least one, and one camera for each if cameras are given", fix=fix)
    directions = cameras or [Camera(PLACES[place], 0.0) for place, _ in shown]
    references = [
        Reference(picture, place, camera.azimuth, camera.elevation, given=cameras is not None)
        for (place, picture), camera in zip(shown, directions, strict=True)
    ]
    target = roomy(device, detail_bytes(len(texture)), progress.notify)
    what = f"projecting pictures onto a texture of {len(texture)} pixels"
    with Checked(progress.check), explained(what, target or HOST, "Use a smaller texture."), torch.no_grad():
        surface = Surface.of(mesh, target)
        made = projected(surface, texture.to(surface.vertices.device, torch.float32), references, progress.check)
    return Projected(to_host(made.texture), to_host(made.weight), made.notes)


def counted(progress: Any, total: int, stage: str) -> Callable[[], None]:
    """A function to call before each of ``total`` items; it reports how many are done."""
    done = -1  # nothing is done before the first item

    def count() -> None:
        nonlocal done
        done += 1
        if done:
            progress.step(done, total, ProgressStage(stage))

    return count


def roomy(device: torch.device | None, needed_bytes: int, notify: Callable[[str], None]) -> torch.device | None:
    """``device`` if it has ``needed_bytes`` free or does not report it; otherwise the CPU, with a note to the user.

    Raises UnsupportedError where the host has no such room either."""
    where = device or HOST
    on_host = where.type == HOST.type
    free = host_free_bytes() + swap_free_bytes() if on_host else free_bytes(where)
    if free is None or free > needed_bytes:
        return device
    found, needed = f"{free / GIBIBYTE:.1f} GB free", f"{needed_bytes / GIBIBYTE:.1f} GB"
    if on_host:
        raise UnsupportedError(f"{found} in memory", expected=needed, fix="Use a smaller texture, or fewer pixels.")
    notify(f"computed on the CPU: {found} on the device, {needed} needed")
    return roomy(HOST, needed_bytes, notify)


def greedy_cameras(mesh: Mesh | None, max_views: int, progress: Any, device: torch.device | None = None) -> CameraTable:
    """The six fixed views and, up to ``max_views``, those that show most of what is unseen; raises without a mesh."""
    if mesh is None:
        raise InputError("no mesh for greedy cameras", expected="the mesh to paint", fix="Connect it, or choose list.")
    with Checked(progress.check):
        table, share = chosen_views(Surface.of(mesh, device), max_views)
    progress.notify(f"{len(table)} views see {share:.1%} of the surface")
    return table


def painted_views(pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any) -> Painted:
    """The views that the pipeline's family paints; a demo in place of PBR gets metal 0 and roughness 1 everywhere."""
    paint = paint_six_views if pipeline.family == "mv_adapter" else paint_views
    painted = paint(pipeline, inputs, settings, progress)
    if Path(pipeline.stands_in_for).name != PBR:
        return painted
    progress.notify("the demo model paints neither metal nor roughness: 0 and 1 everywhere")
    return replace(painted, metallic_roughness=torch.tensor((0.0, 1.0, 0.0)).expand_as(painted.views).clone())


def references_of(
    pipeline: PaintPipeline,
    pictures: list[Tensor],
    delight: PaintPipeline | None,
    settings: DelightSettings,
    progress: Any,
) -> list[Tensor]:
    """The reference pictures as the pipeline wants them: in the middle of a square, and in even light.

    The PBR model takes them as they are: it was taught with shading, and finds the light itself. MV-Adapter paints the
    light that they have, and has a square of its own."""
    if pipeline.family in ("paint_pbr", "mv_adapter"):
        if delight is not None:
            progress.notify("delight has no effect on this model")
        return pictures
    centred = [recentred(picture) for picture in pictures]
    return centred if delight is None else [delight_image(delight, each, settings, progress) for each in centred]


@contextmanager
def saved_views(painted: Painted, folder: Path, place: str) -> Iterator[None]:
    """Save painted views as pictures in ``folder``, until the block, which bakes them, has succeeded.

    A PackError or shortage of the block says where they are: in ``place``, as the user knows the folder. Where they
    cannot be saved the block runs without, and a warning is logged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, pictures in (("view", painted.views), ("metallic_roughness", painted.metallic_roughness)):
            for index, picture in enumerate([] if pictures is None else pictures):
                picture_of(picture).save(folder / f"{name}_{index:02}.png")
    except OSError as error:
        log.warning("AnyGPU: painted views could not be saved in %s: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)  # whatever fitted on a full disk
        yield
        return
    log.info("AnyGPU: painted views are saved in %s until they are baked", folder)
    try:
        yield
    except (PackError, torch.OutOfMemoryError) as error:
        where = f"The painted views are saved in {place}."
        if not isinstance(error, PackError):
            raise torch.OutOfMemoryError(f"{error}\n{where}") from error
        raise type(error)(error.found, expected=error.expected, fix=f"{error.fix} {where}") from error
    shutil.rmtree(folder, ignore_errors=True)


def textured(
    mesh: Mesh, pictures: list[Tensor], pipeline: PaintPipeline, delight: PaintPipeline | None = None,
    settings: OneStep = OneStep(), progress: Any = None, dino: Tensor | None = None,
    saving: Callable[[Painted], AbstractContextManager[None]] = nullcontext,
    enlarge: Callable[[Tensor], Tensor] = lambda pictures: pictures,
    make_room: Callable[[int, torch.device], None] = lambda *_: None,
) -> tuple[Texture, Painted, CameraTable]:  # fmt: skip
    """The texture of a mesh, painted after pictures (H, W, 3 or 4), the front first, then baked and filled; also the
    painted views, not enlarged, and their cameras.

    An unusable mesh is refused before anything is painted. ``saving`` is around the bake, such as :func:`saved_views`,
    whose pictures stay if that fails; ``enlarge`` makes pictures (V, S, S, 3) larger before it; ``make_room`` frees
    bytes on a device for it."""
    progress = progress or Silent()
    device, adapter = pipeline.offloader.device, pipeline.family == "mv_adapter"
    with Checked(progress.check):
        surface = Surface.of(mesh, device, views_for(pipeline.family, None).frame)
        surface.with_uvs()
    for note in surface.notes:
        progress.notify(note)
    with torch.no_grad():
        greedy = settings.cameras is None and pipeline.family == "paint_pbr"
        cameras = greedy_cameras(mesh, settings.max_views, progress, device) if greedy else settings.cameras
        view_size = completed(pipeline, settings.paint, Silent()).size if adapter else settings.texture.view_size
        size = settings.maps or view_size
        maps, cameras, _ = maps_of(mesh, cameras, pipeline.family, settings.shading, size, progress, device)
        references = references_of(pipeline, pictures, delight, settings.delight, progress)
        words = {"prompt": settings.prompt, "negative": settings.negative}
        inputs = PaintInputs(references, maps.normal, maps.position, cameras, dino=dino, **words)
        painted = painted_views(pipeline, inputs, settings.paint, progress)
        del maps, inputs
        views, both = (each if each is None else enlarge(each) for each in (painted.views, painted.metallic_roughness))
        with saving(painted):
            make_room(TEXEL_BYTES * settings.texture.texture_size**2, device)
            texture = texture_of(mesh, cameras, views, both, settings.texture, progress, device)
    return texture, painted, cameras
