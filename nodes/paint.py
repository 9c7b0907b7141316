"""The nodes that paint: load the pipeline, delight the picture, paint the views, and all of it in one step."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..compat.device.execution import to_host
from ..compat.errors import InputError
from ..compat.transforms.attention import UNET_CHOICES
from ..compat.transforms.compile import MOST_CACHED
from ..host import folders, memory_manager, meshes, preview, saved
from ..host.api import GraphBuilder, io
from ..host.progress import PaintProgress, saved_views
from ..host.requests import CORE_INPUTS, adapter_request, paint_request
from ..paint.choices import ADAPTER_VARIANTS, CACHE_LIMIT, NEGATIVE, SCHEDULERS, SPACINGS, STORED_AS, TG2MV, VARIANTS
from .inputs import (
    SEED_LIMIT,
    Cameras,
    Paint,
    attention_input,
    mesh_schema,
    offload_input,
    precision_input,
    seed_input,
    textured_outputs,
)


def word_inputs() -> list[Any]:
    return [
        io.String.Input("prompt", default="", multiline=True, optional=True),
        io.String.Input("negative_prompt", default=NEGATIVE, optional=True, advanced=True),
    ]


class LoadPaintPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        providers = [folders.AUTO, *folders.paint_providers()]
        return mesh_schema(
            node_id="AnyGPULoadPaintPipeline",
            inputs=[
                io.Combo.Input("model", options=folders.paint_choices()),
                precision_input(),
                offload_input(" On a CPU only auto, comfyui and none work."),
                io.Combo.Input("variant", options=list(VARIANTS), default="auto", advanced=True),
                io.Combo.Input("weights", options=list(STORED_AS), default="auto", advanced=True),
                io.Combo.Input("vae", options=providers, default="auto", advanced=True),
                io.Combo.Input("image_encoder", options=providers, default="auto", advanced=True),
                attention_input(choices=UNET_CHOICES),
                io.Boolean.Input("compile", default=False, optional=True, advanced=True),
                io.Int.Input("dynamo_cache_size_limit", default=CACHE_LIMIT, min=1, max=MOST_CACHED, optional=True, advanced=True),
            ],
            outputs=[Paint.Output(display_name="pipeline")],
        )

    validate_inputs = classmethod(lambda cls, model, vae="", image_encoder="": True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, model: str, vae: str = folders.AUTO, image_encoder: str = folders.AUTO, **_: Any) -> Any:
        return folders.stamp(folders.paint_models().get(model), *map(folders.paint_providers().get, (vae, image_encoder)))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        from ..paint.loading import load_paint

        progress = PaintProgress(cls.hidden.unique_id)
        pipeline = load_paint(paint_request(inputs), progress, memory_manager.make_room, memory_manager.offloader_on)
        progress.chosen(f"{pipeline.family} {pipeline.variant}, {pipeline.facts}", pipeline.decisions)
        return io.NodeOutput(pipeline)


class LoadMVAdapter(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPULoadMVAdapter",
            inputs=[
                io.Combo.Input("model", options=[*folders.base_models(), *folders.demo_adapter()[0]] or [folders.NO_MODEL]),
                io.Combo.Input("adapter", options=[*folders.adapters(), *folders.demo_adapter()[1]] or [folders.NO_ADAPTER]),
                precision_input(),
                offload_input(" On a CPU only auto, comfyui and none work."),
                io.Combo.Input("lora", options=[folders.NONE, *folders.loras()], default=folders.NONE),
                io.Float.Input("lora_strength", default=1.0, min=-10.0, max=10.0, step=0.05),
                io.Combo.Input("variant", options=list(ADAPTER_VARIANTS), default="auto", advanced=True),
                io.Combo.Input("vae", options=[folders.AUTO, *folders.paint_providers()], default="auto", advanced=True),
                attention_input(choices=UNET_CHOICES),
                io.Model.Input("core_model", optional=True),
                io.Clip.Input("core_clip", optional=True),
                io.Vae.Input("core_vae", optional=True),
                io.Boolean.Input("compile", default=False, optional=True, advanced=True),
            ],
            outputs=[Paint.Output(display_name="pipeline")],
        )

    validate_inputs = classmethod(lambda cls, model, adapter, lora="", vae="": True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, model: str, adapter: str, lora: str = folders.NONE, vae: str = folders.AUTO, **_: Any) -> Any:
        files = (folders.base_models().get(model), folders.adapters().get(adapter), folders.loras().get(lora))
        return folders.stamp(*files, folders.paint_providers().get(vae))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        from ..host.core.checkpoint import checkpoint_of
        from ..paint.adapter_loading import load_adapter

        progress = PaintProgress(cls.hidden.unique_id)
        request = adapter_request(inputs, checkpoint_of(*map(inputs.get, CORE_INPUTS)))
        pipeline = load_adapter(request, progress, memory_manager.make_room, memory_manager.offloader_on)
        progress.chosen(f"{pipeline.family} {pipeline.variant}, {pipeline.facts}", pipeline.decisions)
        return io.NodeOutput(pipeline)


class DelightImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUDelightImage",
            inputs=[
                Paint.Input("pipeline"),
                io.Image.Input("image"),
                io.Int.Input("steps", default=50, min=1, max=1000),
                io.Int.Input("seed", default=42, min=0, max=SEED_LIMIT, control_after_generate=True),
                io.Mask.Input("mask", optional=True),
                io.Boolean.Input("recenter", default=True, optional=True),
                io.Int.Input("size", default=512, min=64, max=2048, step=64, optional=True, advanced=True),
                io.Float.Input("image_guidance", default=1.0, min=1.0, max=10.0, step=0.1, optional=True, advanced=True),
                io.Boolean.Input("correct", default=True, optional=True, advanced=True),
                io.Combo.Input("scheduler", options=list(SCHEDULERS), default="auto", optional=True, advanced=True),
                io.Float.Input("text_guidance", default=1.0, min=1.0, max=10.0, step=0.01, optional=True, advanced=True),
                io.String.Input("negative_prompt", default="", optional=True, advanced=True),
            ],
            outputs=[io.Image.Output(display_name="image")],
        )

    @classmethod
    def execute(cls, pipeline: Any, image: Any, mask: Any = None, recenter: bool = True, scheduler: str = "auto", **settings: Any) -> io.NodeOutput:
        from ..paint.pictures import cut_out
        from ..paint.sampling.delight import DelightSettings, delight_images
        from ..paint.step_receipts import marked

        progress = PaintProgress(cls.hidden.unique_id)
        chosen = DelightSettings(scheduler="euler_ancestral" if scheduler == "auto" else scheduler, **settings)
        pictures = delight_images(pipeline, cut_out(image, mask), chosen, recenter, progress)
        progress.finish(f"{len(pictures)} of {chosen.size}x{chosen.size}")
        given = {"image": image, "mask": mask, "recenter": recenter}
        return io.NodeOutput(marked(pictures, "evened", request=pipeline.request, settings=chosen, **given))


class PaintViews(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUPaintViews",
            inputs=[
                Paint.Input("pipeline"),
                io.Image.Input("image", optional=True),
                io.Image.Input("normals"),
                io.Image.Input("positions"),
                Cameras.Input("cameras"),
                io.Int.Input("view_size", default=512, min=64, max=2048, step=64),
                io.Int.Input("steps", default=0, min=0, max=1000),
                io.Float.Input("guidance", default=0.0, min=0.0, max=30.0, step=0.1),
                seed_input(),
                io.Combo.Input("scheduler", options=list(SCHEDULERS), default="auto"),
                io.Combo.Input("sigma_schedule", options=list(SPACINGS), default="auto", advanced=True),
                io.Mask.Input("mask", optional=True),
                io.Latent.Input("latent", optional=True),
                io.Float.Input("denoise", default=1.0, min=0.01, max=1.0, step=0.01, optional=True),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True),
                io.Sigmas.Input("sigmas", optional=True),
                io.Float.Input("reference_scale", default=1.0, min=0.0, max=2.0, step=0.05, optional=True, advanced=True),
                io.Float.Input("multiview_scale", default=1.0, min=0.0, max=2.0, step=0.05, optional=True, advanced=True),
                *word_inputs(),
            ],
            outputs=[
                io.Image.Output(display_name="images"),
                io.Image.Output(display_name="metallic_roughness", tooltip="Only from PBR: metallic in red, roughness in green."),
                io.Latent.Output(display_name="latent"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, normals: Any, positions: Any, cameras: Any, view_size: int, sigma_schedule: str = "auto",
        image: Any = None, mask: Any = None, latent: Any = None, clip_vision_output: Any = None, sigmas: Any = None,
        prompt: str = "", negative_prompt: str = NEGATIVE, **settings: Any,
    ) -> io.NodeOutput:
        from ..paint import texturing
        from ..paint.sampling.delight import DelightSettings
        from ..paint.sampling.painting import PaintInputs, PaintSettings, latents_of, to_latent
        from ..paint.step_receipts import marked, painted_record, remember

        progress = PaintProgress(cls.hidden.unique_id)
        pictures = pictures_for(pipeline, image, mask)
        references = texturing.references_of(pipeline, pictures, None, DelightSettings(), progress)
        dino = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        levels = None if sigmas is None else tuple(to_host(sigmas).tolist())
        start = latents_of(pipeline, latent)
        paint = PaintSettings(view_size, spacing=sigma_schedule, sigmas=levels, latents=start, **settings)
        inputs = PaintInputs(references, normals, positions, cameras, dino=dino, prompt=prompt, negative=negative_prompt)
        painted = texturing.painted_views(pipeline, inputs, paint, progress)
        progress.finish(f"{len(painted.views)} views of {painted.views.shape[1]} pixels")

        # For the receipt of AnyGPU Bake Texture, which gets these pictures, or copies that core has enlarged.
        given = {"normals": normals, "positions": positions, "image": image, "mask": mask}
        one_step = texturing.OneStep(paint, prompt=prompt, negative=negative_prompt, cameras=cameras)
        record = painted_record(pipeline, given, one_step, dino)
        facts = {"record": record, "both": painted.metallic_roughness is not None, "cameras": cameras}
        remember(meshes.history(cls.hidden.prompt, cls.hidden.unique_id), facts)
        views, material = (marked(each, "views", **facts) for each in (painted.views, painted.metallic_roughness))
        return io.NodeOutput(views, material, to_latent(pipeline, painted), ui=preview.sheet(painted.views, cls))


class TextureMesh(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return mesh_schema(
            node_id="AnyGPUTextureMesh",
            inputs=[
                io.Mesh.Input("mesh"),
                io.Image.Input("image", optional=True),
                Paint.Input("pipeline"),
                io.Int.Input("view_size", default=512, min=64, max=2048, step=64),
                io.Int.Input("texture_size", default=2048, min=16, max=8192, step=16),
                seed_input(),
                io.Int.Input("steps", default=0, min=0, max=1000),
                io.Mask.Input("mask", optional=True),
                Paint.Input("delight", optional=True),
                io.Int.Input("max_views", default=8, min=6, max=12, optional=True),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True),
                *word_inputs(),
            ],
            outputs=textured_outputs(metallic=io.Image, roughness=io.Image, views=io.Image),
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            enable_expand=True,
        )

    @classmethod
    def execute(
        cls, mesh: Any, pipeline: Any, view_size: int, texture_size: int, seed: int, steps: int,
        image: Any = None, mask: Any = None, delight: Any = None, max_views: int = 8, clip_vision_output: Any = None,
        prompt: str = "", negative_prompt: str = NEGATIVE,
    ) -> io.NodeOutput:
        from ..paint import jobs, texturing
        from ..paint.sampling.painting import PaintSettings
        from ..paint.step_receipts import sign

        pictures = pictures_for(pipeline, image, mask)
        if mesh.uvs is None:  # expand into core's UnwrapMesh and this node again
            graph, given = GraphBuilder(), cls.hidden.dynprompt.get_node(cls.hidden.unique_id)["inputs"]
            values = {"segmenter": "pec", "resolution": given["texture_size"], "padding": 2, "weld_distance": 0.0}
            unwrap = graph.node("UnwrapMesh", mesh=given["mesh"], **values)
            again = graph.node("AnyGPUTextureMesh", **{**given, "mesh": unwrap.out(0)})
            return io.NodeOutput(*(again.out(index) for index in range(6)), expand=graph.finalize())
        progress = PaintProgress(cls.hidden.unique_id)
        dino = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        paint = PaintSettings(view_size, steps, seed=seed)
        baking = texturing.BakeSettings(texture_size, texturing.raster_size(view_size, texture_size))
        settings = texturing.OneStep(paint, baking, max_views, prompt=prompt, negative=negative_prompt)
        shape = meshes.from_core(mesh)
        texture, painted, cameras = texturing.textured(
            shape, pictures, pipeline, delight, settings, progress, dino, saving=saved_views, make_room=memory_manager.make_room,
        )
        progress.finish("\n".join(texture.notes))
        made = meshes.with_texture(mesh, texture)
        job = partial(jobs.asked_job, pipeline, delight, shape, image, mask, settings)
        receipt = jobs.receipt_of(job, pipeline, shape, texture, cameras, jobs.missing_of(pipeline, delight, dino))
        sign(made, receipt, texture)
        file = saved.textured_mesh(made, saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo), receipt)
        return io.NodeOutput(made, *meshes.as_images(texture)[:3], painted.views, file)


def pictures_for(pipeline: Any, image: Any, mask: Any) -> list[Any]:
    """The pictures of an IMAGE, cut out by ``mask``; without one empty for MV-Adapter tg2mv, InputError for others."""
    from ..paint.pictures import cut_out

    if image is None and pipeline.variant != TG2MV:
        expected, fix = "a picture of the object", "Connect one; only MV-Adapter tg2mv paints after words alone."
        raise InputError(f"no image for {pipeline.family} {pipeline.variant}", expected=expected, fix=fix)
    return [] if image is None else cut_out(image, mask)
