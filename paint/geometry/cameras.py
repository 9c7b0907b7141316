"""The views: orthographic cameras around the mesh, and the ids by which the model knows them.

In the frame, glTF axes, the farthest vertex of the centred mesh is at 0.575. Azimuth 0 looks at the +Z face, 90 at the
+X face; elevation 90 looks down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...compat.errors import InputError, require_range
from ..choices import ORTHO_SCALE, VIEWS

RADIUS = 0.575  # of the farthest vertex
AZIMUTH_STEP = 30  # degrees between the azimuths that the model was taught
VIEWS_LIMIT = 44  # every camera that the model has a name for
KNOWS_CAMERAS = "paint"  # the family whose network is given them
FIRST_ID = {-20: 0, 0: 12, 20: 24, -90: 36, 90: 40}  # row of its embedding table where an elevation starts
Axis = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Camera:
    """One view: degrees, and how much it counts where views overlap."""

    azimuth: float
    elevation: float
    weight: float = 1.0

    def axes(self) -> tuple[Axis, Axis, Axis]:
        """Unit vectors of the picture in the frame: right, up, and towards the camera."""
        a, e = math.radians(self.azimuth), math.radians(self.elevation)
        towards = (math.sin(a) * math.cos(e), math.sin(e), math.cos(a) * math.cos(e))
        right = (math.cos(a), 0.0, -math.sin(a))
        up = (
            towards[1] * right[2] - towards[2] * right[1],
            towards[2] * right[0] - towards[0] * right[2],
            towards[0] * right[1] - towards[1] * right[0],
        )
        return right, up, towards


@dataclass(frozen=True, slots=True)
class Frame:
    """A family's way to frame the mesh, draw its maps and weigh the painted views; by default Hunyuan3D's."""

    centred: bool = True  # by the middle of its box; else the mesh stays where it is
    reach: float = RADIUS  # of the farthest vertex; of the largest coordinate where the mesh is not centred
    pixel_centres: bool = False  # at (column + 0.5) / W; else the first and the last lie on the picture's edges
    gain: float = 1 / (2 * RADIUS)  # of positions in their map
    background: float = 1.0  # of both maps
    eight_bits: bool = True  # map values are cut to 8 bits, and normals keep the length that interpolation leaves
    by_angle: bool = False  # a vertex normal is the mean of its faces weighted by their angles
    exponent: int = 4  # of the cosine by which a view counts
    skips: bool = True  # a view that shows next to nothing new is left out


HUNYUAN = Frame()
ADAPTER = Frame(
    centred=False,
    reach=0.5,
    pixel_centres=True,
    gain=1.0,
    background=0.5,
    eight_bits=False,
    by_angle=True,
    exponent=3,
    skips=False,
)


@dataclass(frozen=True, slots=True)
class CameraTable:
    """Cameras in the order they are painted and merged, the width they see in units of the frame, and the frame."""

    cameras: tuple[Camera, ...]
    ortho_scale: float = ORTHO_SCALE
    frame: Frame = HUNYUAN

    def __len__(self) -> int:
        return len(self.cameras)

    def __iter__(self) -> Iterator[Camera]:
        return iter(self.cameras)


DEFAULT_VIEWS = CameraTable(tuple(Camera(*view) for view in VIEWS))
ADAPTER_VIEWS = CameraTable(  # from above the front is the upper edge: MV-Adapter's rows and columns rely on it
    (*(Camera(azimuth, 0) for azimuth in (0, 90, 180, 270)), Camera(180, 90), Camera(180, -90)), 1.1, ADAPTER
)
RING_VIEWS = tuple(
    Camera(azimuth, elevation, 0.01) for azimuth in range(0, 360, AZIMUTH_STEP) for elevation in (20, -20)
)


def camera_table(
    azimuths: Sequence[float] | str,
    elevations: Sequence[float] | str,
    weights: Sequence[float] | str,
    ortho_scale: float = ORTHO_SCALE,
) -> CameraTable:
    """The cameras that three lists, or texts such as "0, 90, 180", describe; a list of one value holds for every view.
    Raises InputError where a value is not a number or out of range, or the lists differ in length.

    Args:
        elevations: degrees, -90..90.
        weights: 0..1000, not all 0.
        ortho_scale: width of the picture in units of the frame, 0.1..10; the mesh is up to 1.15 wide."""
    given = {"azimuths": azimuths, "elevations": elevations, "weights": weights}
    lists = {name: _numbers(values, name) for name, values in given.items()}
    count = max(len(values) for values in lists.values())
    if any(len(values) not in (1, count) for values in lists.values()) or count > VIEWS_LIMIT:
        found = f"cameras with {', '.join(f'{len(values)} {name}' for name, values in lists.items())}"
        fix = "Give each view one azimuth, one elevation and one weight."
        raise InputError(found, expected=f"lists of one length, at most {VIEWS_LIMIT}", fix=fix)
    lists = {name: values * count if len(values) == 1 else values for name, values in lists.items()}
    for name, low, high in (("elevations", -90, 90), ("weights", 0, 1000)):
        for value in lists[name]:
            require_range(f"{name} of cameras", value, low, high)
    if not any(lists["weights"]):
        raise InputError("weights of cameras that are all 0", expected="one above 0", fix="Correct the camera list.")
    require_range("ortho_scale", ortho_scale, 0.1, 10, advice=f"; {ORTHO_SCALE} shows the whole mesh")
    rows = zip(lists["azimuths"], lists["elevations"], lists["weights"], strict=True)
    return CameraTable(
        tuple(Camera(azimuth % 360, elevation, weight) for azimuth, elevation, weight in rows), ortho_scale
    )


def _numbers(values: Sequence[float] | str, name: str) -> list[float]:  # finite and at least one, or InputError
    text = values.replace(";", ",").replace("\n", ",").split(",") if isinstance(values, str) else None
    parts: list[Any] = list(values) if text is None else [part for part in text if part.strip()]
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or not all(math.isfinite(number) for number in numbers):
        found = f"{name} of cameras {values!r}"
        raise InputError(found, expected="numbers separated by commas", fix='For example "0, 90, 180, 270".')
    return numbers


def views_for(family: str | None, cameras: CameraTable | None) -> CameraTable:
    """``cameras``, or if None those of the family, by default Hunyuan3D's. Raises InputError for cameras that a given
    ``family`` does not know: MV-Adapter takes its own six only, every other one any in Hunyuan3D's frame."""
    adapter = family == "mv_adapter"
    table = cameras or (ADAPTER_VIEWS if adapter else DEFAULT_VIEWS)
    if family is not None and not (table == ADAPTER_VIEWS if adapter else table.frame == HUNYUAN):
        six = "front, right, back, left, top, bottom, which are all that MV-Adapter knows"
        fix = "Connect the pipeline that paints to Render Views, without other cameras."
        expected = six if adapter else "cameras in the frame of Hunyuan3D"
        raise InputError(f"{len(table)} cameras of another family for {family}", expected=expected, fix=fix)
    return table


def camera_ids(table: CameraTable, family: str = "paint") -> list[int]:
    """Camera ids of the multiview UNet, 0..43; all 0 for a family that is not given cameras. Raises InputError for an
    elevation that the model was not taught. An azimuth between two steps takes the lower, as the reference does."""
    if family != KNOWS_CAMERAS:
        return [0] * len(table)
    unknown = sorted({camera.elevation for camera in table if camera.elevation not in FIRST_ID})
    if unknown:
        found = f"elevations {unknown} that this model does not know"
        fix = "Change the camera list, or use the PBR model, which takes any elevation."
        raise InputError(found, expected=f"each one of {', '.join(map(str, sorted(FIRST_ID)))} degrees", fix=fix)
    ids = []
    for camera in table:
        # the table's first row of an elevation is azimuth 90; from above and below it has every third step only
        step, elevation = (int(camera.azimuth % 360) // AZIMUTH_STEP + 9) % 12, int(camera.elevation)
        ids.append(FIRST_ID[elevation] + (step // 3 if abs(elevation) == 90 else step))
    return ids


def camera_notes(table: CameraTable, family: str = "paint") -> list[str]:
    """Lines for the user about cameras that work but are not what the model was taught."""
    notes = []
    steps = ((camera.azimuth, 90 if abs(camera.elevation) == 90 else AZIMUTH_STEP) for camera in table)
    between = [f"{azimuth:g} (steps of {step})" for azimuth, step in dict.fromkeys(steps) if azimuth % step]
    if between and family == KNOWS_CAMERAS:
        notes.append(f"azimuths between the model's steps, the lower of which is used: {', '.join(between)}")
    if table.ortho_scale < 2 * RADIUS:
        notes.append(f"ortho_scale {table.ortho_scale:g} may cut off the mesh, which is up to {2 * RADIUS:g} wide")
    return notes
