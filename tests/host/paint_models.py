"""Tiny stand-ins for the published paint checkpoints, under their names, and a mesh to texture."""

from pathlib import Path

import torch
from anygpu.paint.demo import PAIRS, ring
from anygpu.paint.geometry.mesh import Mesh, Surface, write_glb
from paint.shapes import sphere
from paint.synthetic import in_two_colours, torus
from PIL import Image
from safetensors.torch import save_file

from host.client import Client, Run
from host.prompts import Graph
from host.server import PICTURE, Server
from paint import mv_stored, stored

NAMES = {
    "hunyuan3d-paint-v2-0": "paint",
    "hunyuan3d-paint-v2-0-turbo": "paint",
    "hunyuan3d-paintpbr-v2-1": "paint_pbr",
    "hunyuan3d-delight-v2-0": "delight",
}
DINO = "dinov2-giant"
BASE, ADAPTER = "sd_xl_base_1.0.safetensors", mv_stored.FILES["ig2mv", "sdxl"]
UPSCALER = "RealESRGAN_x4plus.safetensors"
MESH, PLAIN = "3d/example.glb", "3d/plain.obj"


def install(server: Server) -> None:
    """Put every paint model, DINOv2, a mesh with UVs and one without among the files of a server."""
    home = built(server.tiny_folder)
    for name in (*NAMES, DINO):
        server.weights_on(home / name, name)
    for folder, name in (("checkpoints", BASE), ("diffusion_models", ADAPTER)):
        place = server.base / "models" / folder / name
        place.parent.mkdir(exist_ok=True)
        if not place.exists():
            place.symlink_to(home / name)
    enlarging(server.base / "models" / "upscale_models" / UPSCALER, 4)
    write_meshes(server.base / "input")


def replayed(client: Client, run: Run) -> str:
    """The last words of AnyGPU Replay on the one GLB that a run has saved; of its error where it was refused."""
    (name,) = (record["filename"] for given in run.outputs.values() for record in given.get("3d", ()))
    again = Graph()
    node = again.add("AnyGPUReplay", file=f"3d/{name} [output]")
    again.add("SaveGLB", mesh=again.link(node, 3), filename_prefix="3d/again")
    second = client.run(again.prompt)
    return second.texts_of(node)[-1] if second.ending == "execution_success" else second.message


def only_the_demo(server: Server) -> None:
    """A mesh and a cut-out picture for the demo model, which paints where no paint model is installed."""
    mesh = ring()
    surface = Surface.of(mesh)
    path = server.base / "input" / MESH
    path.parent.mkdir(parents=True, exist_ok=True)
    write_glb(path, mesh, torch.full((16, 16, 3), 0.5))
    alpha = in_two_colours(surface, ((1.0,) * 3,) * 2, 0.0)[0][..., :1]
    picture = torch.cat((in_two_colours(surface, PAIRS[0])[0], alpha), -1)
    Image.fromarray((picture.clamp(0, 1) * 255).byte().numpy()).save(server.base / "input" / PICTURE)


def enlarging(path: Path, times: int) -> None:
    """An upscale model (SRVGGNetCompact) that repeats each pixel: all it adds to that is zero."""
    shapes = {"0.weight": (4, 3, 3, 3), "0.bias": (4,), "1.weight": (4,)}
    shapes |= {"2.weight": (3 * times**2, 4, 3, 3), "2.bias": (3 * times**2,)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"body.{name}": torch.zeros(shape) for name, shape in shapes.items()}, path)


def built(tiny_folder: Path) -> Path:
    """The folder that holds every model, made once."""
    home = tiny_folder / "paint"
    for name, kind in NAMES.items():
        if not (home / name / "whole").exists():
            stored.checkpoint(kind, home, name)
            if kind == "delight":
                _text_encoder(home / name / "text_encoder")
            (home / name / "whole").touch()
    if not (home / DINO / "whole").exists():
        _dino(home / DINO)
        (home / DINO / "whole").touch()
    if not (home / ADAPTER).exists():
        base_file("sdxl", home / BASE)
        mv_stored.adapter_file("ig2mv", "sdxl", home)
    return home


def base_file(base: str, path: Path) -> None:
    """A tiny checkpoint as one file, with rows for all words of ComfyUI's own tokenizer."""
    rows = torch.randn(49408, 64, generator=torch.Generator().manual_seed(3))
    named = {name: rows.half() for name in mv_stored.original(base) if "token_embedding.weight" in name}
    mv_stored.single_file(base, path, torch.float16, **named)


def write_meshes(folder: Path) -> None:
    """Write the meshes that the workflows load: a torus with UVs, and a ball without."""
    (folder / "3d").mkdir(parents=True, exist_ok=True)
    write_glb(folder / MESH, torus(12, 24), torch.full((16, 16, 3), 0.5))
    lines = [f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in sphere(8, 12).vertices.tolist()]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in solid_faces(sphere(8, 12))]
    (folder / PLAIN).write_text("\n".join(lines), encoding="utf-8")


def solid_faces(mesh: Mesh) -> list[list[int]]:
    """Faces with three different places: a ball's poles have some without area."""
    corners = mesh.vertices[mesh.faces]
    areas = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).norm(dim=1)
    return mesh.faces[areas > 1e-6].tolist()


def _text_encoder(folder: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    CLIPTextModel(config).save_pretrained(folder)


def _dino(folder: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=1536, num_hidden_layers=1, num_attention_heads=24, mlp_ratio=1, image_size=224)
    Dinov2Model(config).half().save_pretrained(folder)
