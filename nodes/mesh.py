"""The nodes around painting: load and clean meshes, cameras, maps of the views, baking, turntable."""

from __future__ import annotations

from typing import Any

from ..compat.device.execution import Checked
from ..host import memory_manager, meshes, preview, saved
from ..host.api import io
from ..host.progress import PaintProgress
from ..paint.choices import BAKES, FILLS, FLOATERS, NORMALS, ORTHO_SCALE, PLACES, VIEWS
from .inputs import Cameras, Paint, mesh_schema, textured_outputs

LIST, GREEDY = "list", "greedy"
PREVIEW_FPS = 12.0  # of the turntable under its node


class LoadMesh(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPULoadMesh",
            inputs=[
                io.Combo.Input("mesh_file", options=meshes.mesh_files(), upload=io.UploadType.model),
                io.MultiType.Input("model_3d", types=[io.File3DAny, io.File3DGLB, io.File3DGLTF, io.File3DOBJ, io.File3DPLY, io.File3DSTL], optional=True),
            ],
            outputs=[io.Mesh.Output(display_name="mesh")],
        )

    validate_inputs = classmethod(lambda cls, mesh_file: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, mesh_file, **_: meshes.file_stamp(mesh_file))

    @classmethod
    def execute(cls, mesh_file: str, model_3d: Any = None) -> io.NodeOutput:
        progress = PaintProgress(cls.hidden.unique_id)
        mesh, notes = meshes.mesh_of_file(mesh_file, model_3d, progress.check)
        progress.finish("\n".join(notes))
        return io.NodeOutput(meshes.to_core(mesh))


class CleanMesh(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUCleanMesh",
            inputs=[
                io.Mesh.Input("mesh"),
                io.Float.Input("floaters", default=FLOATERS, min=0.0, max=1.0, step=0.001),
                io.Boolean.Input("degenerate", default=True),
                io.Boolean.Input("broken", default=True),
            ],
            outputs=[io.Mesh.Output(display_name="mesh")],
        )

    @classmethod
    def execute(cls, mesh: Any, floaters: float, degenerate: bool, broken: bool) -> io.NodeOutput:
        from ..paint.geometry.cleaning import CleanSettings, cleaned

        progress = PaintProgress(cls.hidden.unique_id)
        with Checked(progress.check):
            clean, notes = cleaned(meshes.from_core(mesh), CleanSettings(floaters, degenerate, broken))
        progress.finish("\n".join((f"{len(clean.faces)} faces, {len(clean.vertices)} vertices", *notes)))
        return io.NodeOutput(meshes.with_geometry(mesh, clean))


class PaintCameras(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUPaintCameras",
            inputs=[
                io.Combo.Input("choose", options=[LIST, GREEDY], default=LIST),
                io.String.Input("azimuths", default=", ".join(f"{azimuth:g}" for azimuth, _, _ in VIEWS)),
                io.String.Input("elevations", default=", ".join(f"{elevation:g}" for _, elevation, _ in VIEWS)),
                io.String.Input("weights", default=", ".join(f"{weight:g}" for _, _, weight in VIEWS)),
                io.Float.Input("ortho_scale", default=ORTHO_SCALE, min=0.1, max=10.0, step=0.01, advanced=True),
                io.Mesh.Input("mesh", optional=True),
                io.Int.Input("max_views", default=8, min=6, max=12, optional=True),
            ],
            outputs=[Cameras.Output(display_name="cameras"), io.Int.Output(display_name="count")],
        )

    @classmethod
    def execute(
        cls, choose: str, azimuths: str, elevations: str, weights: str, ortho_scale: float = ORTHO_SCALE, mesh: Any = None,
        max_views: int = 8,
    ) -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.geometry.cameras import camera_table

        progress = PaintProgress(cls.hidden.unique_id)
        if choose == GREEDY:
            table = texturing.greedy_cameras(mesh and meshes.from_core(mesh), max_views, progress, memory_manager.compute_device())
        else:
            table = camera_table(azimuths, elevations, weights, ortho_scale)
        progress.finish("\n".join(f"{camera.azimuth:g}, {camera.elevation:g}: {camera.weight:g}" for camera in table))
        return io.NodeOutput(table, len(table))


class RenderViews(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPURenderViews",
            inputs=[
                io.Mesh.Input("mesh"),
                Cameras.Input("cameras", optional=True),
                Paint.Input("pipeline", optional=True),
                io.Int.Input("size", default=2048, min=16, max=8192, step=16, optional=True),
                io.Combo.Input("normals", options=list(NORMALS), default="auto", optional=True, advanced=True),
            ],
            outputs=[
                io.Image.Output(display_name="normals"),
                io.Image.Output(display_name="positions"),
                Cameras.Output(display_name="cameras"),
                io.Mask.Output(display_name="mask"),
            ],
        )

    @classmethod
    def execute(cls, mesh: Any, cameras: Any = None, pipeline: Any = None, size: int = 2048, normals: str = "auto") -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.step_receipts import marked

        progress = PaintProgress(cls.hidden.unique_id)
        family = None if pipeline is None else pipeline.family
        # the PBR model takes flat normals for auto
        shape, shading = meshes.from_core(mesh), "smooth" if normals == "auto" and family != "paint_pbr" else normals
        maps, table, surface = texturing.maps_of(shape, cameras, family, shading, size, progress, memory_manager.compute_device())
        for pictures in (maps.normal, maps.position):
            marked(pictures, "maps", mesh=shape, size=size, shading=shading, cameras=table)
        progress.finish("\n".join((f"{len(table)} views of {size} pixels, {len(surface.faces)} faces", *surface.notes)))
        return io.NodeOutput(maps.normal, maps.position, table, maps.mask.float(), ui=preview.sheet(maps.normal, cls))


class BakeTexture(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUBakeTexture",
            inputs=[
                io.Mesh.Input("mesh"),
                io.Image.Input("images"),
                Cameras.Input("cameras"),
                io.Int.Input("texture_size", default=2048, min=16, max=8192, step=16),
                io.Image.Input("metallic_roughness", optional=True),
                io.Combo.Input("form", options=list(BAKES), default="gather", optional=True, advanced=True),
                io.Combo.Input("fill", options=list(FILLS), default="auto", optional=True, advanced=True),
                io.Int.Input("view_size", default=2048, min=16, max=8192, step=16, optional=True, advanced=True),
                io.Boolean.Input("exact", default=False, optional=True, advanced=True),
            ],
            outputs=textured_outputs(metallic=io.Image, roughness=io.Image, painted=io.Mask),
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(
        cls, mesh: Any, images: Any, cameras: Any, texture_size: int, metallic_roughness: Any = None, form: str = "gather",
        fill: str = "auto", view_size: int = 2048, exact: bool = False,
    ) -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.step_receipts import baked_record, sign

        progress = PaintProgress(cls.hidden.unique_id)
        settings = texturing.BakeSettings(texture_size=texture_size, view_size=view_size, form=form, fill=fill, exact=exact)
        device = memory_manager.compute_device()
        memory_manager.make_room(texturing.TEXEL_BYTES * texture_size**2, device)
        shape, made_of = meshes.from_core(mesh), (images, metallic_roughness)
        texture = texturing.texture_of(shape, cameras, *made_of, settings, progress, device)
        progress.finish("\n".join(texture.notes))
        made, origin = meshes.with_texture(mesh, texture), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        inputs = {"images": 0} if metallic_roughness is None else {"images": 0, "metallic_roughness": 1}
        larger = meshes.enlarging(cls.hidden.prompt, cls.hidden.unique_id, inputs)  # by core's upscale node, if so
        record = baked_record(*made_of, shape, cameras, settings, texture, larger)
        sign(made, record, texture)
        return io.NodeOutput(made, *meshes.as_images(texture), saved.textured_mesh(made, origin, record))


class ProjectPicture(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = (("", io.Image), ("_mask", io.Mask))  # ending of an input's name -> its socket
        return mesh_schema(
            node_id="AnyGPUProjectPicture",
            inputs=[
                io.Mesh.Input("mesh"),
                *(kind.Input(place + ending, optional=True) for place in PLACES for ending, kind in kinds),
                Cameras.Input("cameras", optional=True),
            ],
            outputs=textured_outputs(projected=io.Mask),
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, mesh: Any, cameras: Any = None, **given: Any) -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.pictures import cut_out
        from ..paint.step_receipts import projected_record

        progress = PaintProgress(cls.hidden.unique_id)
        given = {name: each for name, each in given.items() if each is not None}
        pictures = {place: cut_out(given[place], given.get(f"{place}_mask")) for place in PLACES if place in given}  # by side
        colour, device = meshes.colour_of(mesh), memory_manager.compute_device()
        memory_manager.make_room(texturing.detail_bytes(len(colour)), device)
        shape = meshes.from_core(mesh)
        made = texturing.with_detail(shape, colour, pictures, cameras, progress, device)
        progress.finish("\n".join(made.notes))
        detailed, origin = meshes.with_colour(mesh, made.texture), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        file = saved.textured_mesh(detailed, origin, projected_record(mesh, detailed, shape, given, cameras))
        return io.NodeOutput(detailed, made.texture[None], made.weight[None], file)


class RenderTurntable(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPURenderTurntable",
            inputs=[
                io.Mesh.Input("mesh"),
                io.Int.Input("frames", default=24, min=1, max=720),
                io.Int.Input("size", default=512, min=16, max=4096, step=16),
                io.Float.Input("elevation", default=15.0, min=-90.0, max=90.0, step=1.0),
                io.Float.Input("background", default=1.0, min=0.0, max=1.0, step=0.01, optional=True, advanced=True),
                io.Mesh.Input("before", optional=True),
            ],
            outputs=[io.Image.Output(display_name="images")],
        )

    @classmethod
    def execute(cls, mesh: Any, frames: int, size: int, elevation: float, background: float = 1.0, before: Any = None) -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.geometry.mesh import Surface
        from ..paint.geometry.turntable import film, turntable

        progress = PaintProgress(cls.hidden.unique_id)
        shown = [mesh] if before is None else [before, mesh]
        pictures, notes = film(frames, size, len(shown)), dict[str, None]()
        count = texturing.counted(progress, frames * len(shown), "rendering")
        what, device = f"rendering frames of {size} pixels", memory_manager.compute_device()
        with Checked(progress.check), texturing.explained(what, device, "Lower size."):
            for each, into in zip(shown, pictures.split(size, dim=2), strict=True):
                surface = Surface.of(meshes.from_core(each), device)
                turntable(surface, meshes.shown_colour(each), frames, size, elevation, background, count, into)
                notes |= dict.fromkeys(surface.notes)
        progress.finish("\n".join((f"{frames} frames of {size} pixels", *notes)))
        return io.NodeOutput(pictures, ui=preview.clips([pictures], PREVIEW_FPS, cls))
