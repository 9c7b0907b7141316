"""Files that are nearly right, for every reader: it returns, or raises one of our errors in one line.

It takes at most the memory that its files may, beside what it gives back, and ten seconds of the processor.

Run: python tests/fuzz/structured.py [--seconds 60] [--seed 0] [--only NAME] [--case INDEX]     (make fuzz SECONDS=)
Case n of a reader and a seed is always the same file, so that a finding is repeated with --only, --seed and --case.
"""

import argparse
import json
import logging
import math
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest has it

import machines_page
import tiny
import torch
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.compat.checkpoints.quantised import with_scales
from anygpu.compat.checkpoints.weights import read_tensors, weight_files, write_tensors
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import PackError, reading_budget
from anygpu.compat.memory.statistics import FILE, saved_stages
from anygpu.compat.packages import beginning
from anygpu.compat.repairs import FP32, Repair, RepairStore
from anygpu.paint.geometry.mesh import load_mesh
from anygpu.paint.networks.weights import weights_in
from anygpu.pipelines import jobs, stages
from anygpu.pipelines.base import Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.files import catalogue, download
from anygpu.pipelines.files.evidence import evidence_of
from anygpu.pipelines.files.formats import config_of, contents, layouts
from anygpu.pipelines.latents import musubi, recovery, store
from anygpu.pipelines.latents.prompt_files import load_prompt, save_prompt
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.load import lora
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.records import job as job_format
from anygpu.pipelines.records import receipts
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.places import Machine, Places
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LORA_MODES, LoadRequest
from anygpu.pipelines.sampling.resume import SectionState
from mutations import ODD, Random, claimed, damaged, mutated, rewritten, shape, tensor, varied

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES, MOST_SECONDS = 6 * 1024**3, 10.0  # of the process; of a case


def seed_files(folder: Path, prompt: Prompt) -> dict[str, list[Path]]:
    """Whole files of ours, of core and of Musubi Tuner, by what reads them."""
    samples, own = torch.randn(1, 16, 2, 4, 4), folder / "seeds"
    extra = {"section_lengths": [2], "window": 9, "prompt": "x"}
    kept = Latents(samples, "framepack", "image", 5, 32, 32, 30.0, 1, extra=extra)
    sections = recovery.SavedSections(own, lambda _: None)
    sections.save("key", 0, 3, kept, SectionState(samples, (2,), torch.Generator().get_state().numpy().tobytes()))
    whole = recovery.save(own, Latents(samples, "hunyuan_video", "text", 5, 32, 32, 24.0, 1), print)
    plain = recovery.save_plain_recovery(own, recovery.Sampled([samples], "Flux", latent_format="Wan21"), print)
    latents = [own / f"{name}.safetensors" for name in (sections.names["key"], whole, plain)]
    core = {"latent_tensor": samples, "latent_format_version_0": torch.zeros(0)}
    latents.append(write_tensors(own / "core.safetensors", core, {"prompt": "{}", "workflow": "{}"}))
    embeds = {"prompt_embeds": torch.randn(1, 5, 16), "pooled_prompt_embeds": torch.randn(1, 8)}
    of_text = musubi.save_text_cache(own, "clip", Prompt("hunyuan_video", embeds, extra={"text": "x"}))
    of_video = musubi.save_latent_cache(own, "clip", store.load_latent(latents[1], print))
    return {
        "latents": latents,
        "prompts": [save_prompt(own / "prompt.safetensors", prompt)],
        "musubi": [of_text, of_video],
    }


class Readers:
    """A method per reader: makes one file from a random generator, and reads it.

    Args:
        folder: an empty one for the files. tiny_folder: where tiny checkpoints are built.
    """

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder = folder
        self.ltx = tiny.build("ltx", tiny_folder)
        self.pipeline = load(LoadRequest(self.ltx, device="cpu"), Silent())
        self.layers = tiny.matrices_of(self.pipeline)
        frames = torch.rand(4, 32, 32, 3)
        self.movie = write_mp4(frames, 8.0, folder / "seed.mp4").read_bytes()
        self.facts = facts_for("cpu")
        with torch.no_grad():
            prompt = stages.encode_prompt(self.pipeline, PromptRequest("a fox", "blurry"), Silent())
        self.seeds = seed_files(folder, prompt)

    def job(self, rng: Random) -> None:
        """A job file, and the request that it makes."""
        record = {"anygpu_job": 1, "model": {"name": "LTX", "content": "ab"}, "prompt": {"text": "a fox"}}
        record |= {
            "settings": {"width": 64, "height": 64, "frames": 9, "sigmas": [1.0, 0.0]},
            "load": {"compile": True},
        }
        record |= {"pictures": [{"file": {"name": "a.png", "content": ""}, "frame": 3}], "decode": {"method": "tiled"}}
        path = self.folder / "job.json"
        for _ in range(rng.randint(0, 3)):
            record = mutated(record, rng)
        content = json.dumps(record).encode()
        path.write_bytes(damaged(content, rng) if rng.random() < 0.2 else content)
        job, places = job_format.read_job(path), Places((self.folder,), (self.folder,), {})
        assert job_format.read_job(job_format.write_job(path, job)) == job and len(job.key) == 64
        places.known[job.model] = self.ltx
        jobs.request_of(job, Machine(places, self.folder, "cpu"))

    def scaled(self, rng: Random) -> None:
        """Safetensors with scales of every kind beside weights of every dtype."""
        names = [f"{base}.{end}" for base in "ab" for end in ("weight", "bias", "scale_weight", "weight_scale")]
        names += ["a.comfy_quant", "b.input_scale", "scaled_fp8"]
        tensors = {name: tensor(rng, shape(rng, 2)) for name in rng.sample(names, rng.randint(1, len(names)))}
        if "a.comfy_quant" in tensors:
            text = json.dumps(mutated({"format": "float8_e4m3fn", "params": {"convrot": False}}, rng))
            tensors["a.comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        layers = mutated({"layers": {"a": {"format": "int8_tensorwise"}}}, rng)
        notes = {"_quantization_metadata": json.dumps(layers)} if rng.random() < 0.5 else {}
        path = write_tensors(self.folder / "a.safetensors", tensors, notes)
        rewritten(path, rng)
        entries, notes = entries_and_notes(path)
        entries = with_scales(entries, notes, path)
        for dtype in (None, torch.bfloat16):
            read_tensors(entries, dtype, lambda _count: None)

    def layouts(self, rng: Random) -> None:
        """Single files: the names of a layout, some of them, in shapes that are nearly possible."""
        layout = rng.choice(layouts())
        rows = layout.rows if isinstance(layout.rows, tuple) else layout.rows(())
        names = [mark.split("|")[0] for mark in layout.marks]
        names += [
            row.source.split("|")[0].replace("*", str(rng.randrange(3))) for row in rng.sample(rows, min(len(rows), 9))
        ]
        tensors = {rng.choice(("", "", "model.diffusion_model.")) + name: tensor(rng) for name in names}
        said = {"allowed_inference_steps": [1.0, 0.5], "scheduler": {"sampler": "Uniform"}, "shift": 3.0}
        said["vae"] = {"spatial_padding_mode": "reflect"}
        notes = {"config": json.dumps(mutated(said, rng))} if rng.random() < 0.5 else {}
        path = write_tensors(self.folder / "a.safetensors", tensors, notes)
        rewritten(path, rng)
        evidence = evidence_of(path, {})
        for family in FAMILIES.values():
            for ask in ("guess_variant", "settings_in"):
                if hook := getattr(family.code, ask):
                    hook(evidence)
        if rng.random() < 0.3:
            config = json.loads((self.ltx / "transformer" / "config.json").read_text(encoding="utf-8"))
            path.with_suffix(".json").write_text(json.dumps(mutated(config, rng)), encoding="utf-8")
        else:
            path.with_suffix(".json").unlink(missing_ok=True)
        for content in contents(path):
            config_of(content, rng.choice(("", "text", "image")))
        for family in FAMILIES.values():
            if family.code.vae_settings_in is not None:
                family.code.vae_settings_in(evidence, path)

    def latents(self, rng: Random) -> None:
        """Latent files of ours, of core and of unfinished samplings, and the list of what is kept."""
        seed = rng.choice(self.seeds["latents"])
        shutil.rmtree(self.folder / "kept", ignore_errors=True)
        path = varied(seed, self.folder / "kept" / seed.name, rng)
        store.kind_of(path)
        recovery.listing(path.parent)
        recovery.SavedSections(path.parent, lambda _: None).found("key")
        latent = store.load_latent(path, lambda _: None, rng.choice(("refuse", "clamp")), rng.choice(store.DTYPES))
        store.described(latent)

    def machine(self, rng: Random) -> None:
        """A machine that somebody shared, and the page."""
        record: Any = {"anygpu_machine": 1, "device": "RTX", "backend": "cuda", "arch": "sm75", "driver": "1"}
        record |= {"memory_gb": 6.0, "versions": {"torch": "2.8"}, "precision": {"LTX-Video": "fp16"}}
        record |= {"answers": [{"probe": "float8", "status": "ok", "milliseconds": 0.5}]}
        record |= {"runs": [{"stage": "text", "pipeline": "ltx", "mode": "none", "precision": "", "seconds": 1.0}]}
        for _ in range(rng.randint(0, 2)):
            record = mutated(record, rng)
        content = json.dumps(record).encode()
        path = self.folder / "machine.json"
        path.write_bytes(damaged(content, rng) if rng.random() < 0.2 else content)
        machine = machines_page.machine_in(path.read_bytes())
        assert machines_page.machine_in(machine.text()) == machine and machines_page.page_of([machine]).count("<") == 0

    def receipt(self, rng: Random) -> None:
        """The receipt of a video, and its job."""
        record: Any = {"anygpu_receipt": 1, "latents": "ab", "made_with": {"torch": "2.8"}, "device": {"device": "RTX"}}
        record |= {"decisions": [["precision", "fp16"]], "missing": []}
        record["job"] = {"anygpu_job": 1, "kind": "video", "model": {"name": "LTX"}, "prompt": {"text": "x"}}
        record["job"]["settings"] = {"width": 64, "height": 64, "frames": 9}
        for _ in range(rng.choice((0, 0, 1, 2, 300))):
            record["job"] = {**record["job"], "first": record["job"], "upscalers": [{"name": "up"}]}
        for _ in range(rng.randint(0, 2)):
            record = mutated(record, rng)
        text = damaged(json.dumps(record).encode(), rng).decode(errors="replace") if rng.random() < 0.2 else ""
        tags = {"anygpu": (text or json.dumps(record)).replace("\0", "")}
        path = write_mp4(torch.zeros(1, 32, 32, 3), 8.0, self.folder / "receipt.mp4", tags)
        read = receipts.read_receipt(path)
        receipts.differences_from(read, self.pipeline)
        receipts.job_of(read)

    def steps(self, rng: Random) -> None:
        """The state of an unfinished sampling."""
        record: dict[str, Any] = {"kind": "steps", "version": 1, "key": "ab", "done": 2, "section": 0}
        record |= {"solver": {"_step_index": {"value": 2}, "model_outputs": [None, None]}}
        record["generator_state"] = torch.Generator().get_state().numpy().tobytes().hex()
        for _ in range(rng.randrange(3)):
            record = mutated(record, rng)
        names = ("latents", "solver.model_outputs.0", "solver.last_sample.0")
        tensors = {name: tensor(rng) for name in names if rng.random() < 0.9} or {"latents": tensor(rng)}
        path = write_tensors(self.folder / "steps" / "ab.safetensors", tensors, {"anygpu": json.dumps(record)})
        rewritten(path, rng)
        SavedSteps(path.parent, lambda _: None).found("ab")

    def prompts(self, rng: Random) -> None:
        """Encoded prompts, read and sampled."""
        prompt = load_prompt(varied(self.seeds["prompts"][0], self.folder / "a.safetensors", rng), lambda _: None)
        with torch.no_grad():
            stages.sample(self.pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2), Silent())

    def musubi(self, rng: Random) -> None:
        """Caches of Musubi Tuner, both kinds."""
        seed = rng.choice(self.seeds["musubi"])
        path = varied(seed, self.folder / seed.name, rng)
        store.kind_of(path)
        if seed is self.seeds["musubi"][1]:
            store.load_latent(path, lambda _: None)
        else:
            load_prompt(path, lambda _: None)

    def loras(self, rng: Random) -> None:
        """LoRA files, put on the transformer as both modes do."""
        tensors: dict[str, torch.Tensor] = {}
        for name in rng.sample(list(self.layers), 3):
            out, into = self.layers[name][0], math.prod(self.layers[name][1:])
            rank = rng.choice((0, 1, 4))
            base = rng.choice(("transformer.", "diffusion_model.", "")) + name
            down, up = rng.choice((("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")))
            tensors[f"{base}.{down}"] = tensor(rng, rng.choice(([rank, into], [rank, into], shape(rng))))
            tensors[f"{base}.{up}"] = tensor(rng, rng.choice(([out, rank], [out, rank], shape(rng))))
            if rng.random() < 0.4:
                tensors[f"{base}.alpha"] = tensor(rng, rng.choice(([], [1], shape(rng))))
        if rng.random() < 0.3:
            tensors.pop(rng.choice(list(tensors)))
        path = write_tensors(self.folder / "a.safetensors", tensors, {})
        rewritten(path, rng)
        adapted = lora.with_lora(self.pipeline, path, 0.5, "", rng.choice(LORA_MODES), Silent())
        with torch.no_grad(), adapted.offloader.hold("transformer"):
            pass

    def configs(self, rng: Random) -> None:
        """A model folder with one JSON file changed, also of tokenizer or scheduler: loaded, and one clip made."""
        folder = self.folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        files = sorted(file for file in self.ltx.rglob("*.json") if ".anygpu" not in file.name)
        chosen = rng.choice(files)
        for source in self.ltx.rglob("*"):
            target = folder / source.relative_to(self.ltx)
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source) if source != chosen else None
        content = mutated(json.loads(chosen.read_text(encoding="utf-8")), rng)
        text = json.dumps(content).encode()
        target = folder / chosen.relative_to(self.ltx)
        target.write_bytes(damaged(text, rng) if rng.random() < 0.1 else text)
        with torch.no_grad():
            pipeline = load(LoadRequest(folder, device="cpu"), Silent())
            prompt = stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
            latents = stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2), Silent())
            stages.decode(pipeline, latents, Silent(), "auto")

    def meshes(self, rng: Random) -> int:
        """Meshes of every format, nearly right."""
        from hostile.test_meshes import OBJ, PLY, gltf

        suffix = rng.choice(("obj", "ply", "gltf", "stl", "glb"))
        if suffix == "gltf":
            data = json.dumps(mutated(json.loads(gltf("a.bin")), rng)).encode()
            (self.folder / "a.bin").write_bytes(bytes(rng.choice((36, 0, 35))))
        else:
            texts = {"obj": OBJ.format(mtl="mtllib a.mtl"), "ply": PLY.format(name="a.png"), "glb": "", "stl": ""}
            data = texts[suffix].encode() or self._binary(suffix)
        if suffix == "glb" and rng.random() < 0.7:  # its JSON changed, its chunks whole
            length = int.from_bytes(data[12:16], "little")
            text = json.dumps(mutated(json.loads(data[20 : 20 + length]), rng)).encode()
            text += b" " * (-len(text) % 4)
            body = len(text).to_bytes(4, "little") + data[16:20] + text + data[20 + length :]
            data = data[:8] + (12 + len(body)).to_bytes(4, "little") + body
        path = self.folder / f"a.{suffix}"
        path.write_bytes(damaged(data, rng) if not suffix.startswith("gl") or rng.random() < 0.2 else data)
        return mesh_bytes(load_mesh(path)[0])

    def _binary(self, suffix: str) -> bytes:
        import trimesh

        exported = trimesh.creation.box().export(file_type=suffix)
        return exported if isinstance(exported, bytes) else bytes(exported)

    def movies(self, rng: Random) -> int:
        """Videos with a damaged container or damaged frames, or whole ones of odd kinds."""
        path = self.folder / f"a.{rng.choice(('mp4', 'mkv', 'gif', 'avi', 'png'))}"
        if rng.random() < 0.4:
            self._odd_movie(path, rng)
        content = path.read_bytes() if path.is_file() and rng.random() < 0.5 else self.movie
        change = rng.choice((damaged, damaged, claimed, lambda whole, _: whole))
        path.write_bytes(change(content, rng))
        return read_frames(path)[0].nbytes

    def _odd_movie(self, path: Path, rng: Random) -> None:
        import av

        names = {"mp4": ("mpeg4", "libx264"), "mkv": ("ffv1", "mjpeg"), "gif": ("gif",), "avi": ("mpeg4", "rawvideo")}
        with suppress(av.FFmpegError, ValueError, OverflowError), av.open(str(path), "w", format=None) as container:
            container.metadata["comment"] = str(rng.choice(ODD))
            rate = rng.choice((1, 8, 24, 1000))
            stream: Any = container.add_stream(rng.choice(names.get(path.suffix[1:], ("png",))), rate=rate)
            stream.width, stream.height = rng.choice((2, 16, 34)), rng.choice((2, 16, 34))
            stream.pix_fmt = rng.choice(("yuv420p", "rgb24", "gray", "rgba", "pal8", "gray16be", "yuvj420p", "rgb8"))
            for _ in range(rng.randrange(3)):
                frame = av.VideoFrame(stream.width, stream.height, stream.pix_fmt)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    def probes(self, rng: Random) -> None:
        """Kept probe results and memory statistics."""
        made = ProbeStore(self.facts, self.folder, more={"one": lambda _: ""}, quiet=True)
        answers = {"one": {"status": "ok", "detail": "", "milliseconds": 1.0}}
        content: Any = {"device": "x", "versions": {}, "answers": answers, "remembered": {"t": {"a": 1.0}}}
        content["asking"] = ["one", 1, 0.0]
        assert made.path is not None
        made.path.write_bytes(self._json(mutated(content, rng), rng))
        again = ProbeStore(self.facts, self.folder, more={"one": lambda _: ""})
        assert again["one"].status in ("ok", "wrong", "unusable", "unknown")
        again.recall("t")
        row = {"stage": "x", "pipeline": "p", "mode": "none", "device": "cpu", "peak_bytes": 1, "seconds": 1.0}
        (self.folder / FILE).write_bytes(self._json([row], rng))
        for cost in saved_stages(self.folder):
            str(cost)

    def stores(self, rng: Random) -> None:
        """What else is kept as JSON: the doctor's repairs, what a download has checked, the state of workers."""
        repairs = RepairStore(self.folder)
        rows = {"model": [{"layer": "a.b", "way": "fp32"}, {"layer": "c", "way": "zeros"}]}
        assert repairs.path is not None
        repairs.path.write_bytes(self._json(rows, rng))
        repairs.load("model")
        repairs.add("model", Repair("d", FP32))
        repairs.forget("model")
        model = next(iter(catalogue.offers().values())).downloads[0]
        note = self.folder / download.NOTE
        note.parent.mkdir(parents=True, exist_ok=True)
        stamps = {"files": {"model_index.json": [1, 2]}, "fetched": [[model.revision, []]]}
        note.write_bytes(self._json(stamps, rng))
        download.is_checked(self.folder, model)
        download._note(self.folder, model, {})
        work = JobFolder(self.folder / "jobs")
        work.write_workers("one", [])
        (work.root / "workers" / "one.json").write_bytes(self._json([{"device": "x", "done": 1}], rng))
        work.workers()

    def indexes(self, rng: Random) -> None:
        """A part in shards, whose index is nearly right."""
        folder = self.folder / "shards"
        folder.mkdir(exist_ok=True)
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for number, name in enumerate(names):
            write_tensors(folder / name, {f"w{number}": tensor(rng)}, {})
        index = {"metadata": {"total_size": 8}, "weight_map": {"w0": names[0], "w1": names[1]}}
        (folder / "model.safetensors.index.json").write_bytes(self._json(index, rng))
        weight_files(folder, "transformer")

    def ggufs(self, rng: Random) -> None:
        """GGUF files with notes and blocks of several kinds, some of them damaged."""
        import gguf

        path = self.folder / "a.gguf"
        writer = gguf.GGUFWriter(path, rng.choice(("ltxv", "hyvid", "t5encoder", "llama", "x")))
        writer.add_uint32("a", rng.randrange(2**32))
        writer.add_array("comfy.gguf.orig_shape.b", rng.choice(([4, 32], [2, 2, 32], [0], [-1], [10**9], [128])))
        for name in ("blk.0.attn_q.weight", "token_embd.weight", "b"):
            values = torch.randn(rng.choice((1, 4)), 32).numpy()
            kind = rng.choice(("F32", "F16", "BF16", "Q8_0", "Q4_0"))
            kind = getattr(gguf.GGMLQuantizationType, kind)
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if rng.random() < 0.6:
            path.write_bytes(damaged(path.read_bytes(), rng))
        entries = gguf_header(path)[0]
        contents(path)
        for dtype in (None, torch.bfloat16):
            read_tensors(entries, dtype, lambda _: None)

    def _json(self, content: Any, rng: Random) -> bytes:
        text = json.dumps(mutated(content, rng) if rng.random() < 0.9 else content).encode()
        if rng.random() < 0.03:
            return b"[" * 100_000
        return damaged(text, rng) if rng.random() < 0.2 else text

    def texts(self, rng: Random) -> None:
        """Prompts of any length, whose first tokens are those of the whole text."""
        parts = [str(rng.choice((*ODD, "☃", " ", "\n", "fox", "é́", "a b"))) for _ in range(rng.choice((1, 5, 40)))]
        text = "".join(part * rng.choice((1, 2, 300)) for part in parts).encode("utf-8", "ignore").decode()
        room, tokenizer = rng.choice((1, 8, 77)), self.pipeline.tools["tokenizer"]
        whole, start = (tokenizer(each)["input_ids"][:room] for each in (text, beginning(tokenizer, text, room)))
        assert whole == start or len(text) > 10**5, "other tokens"

    def pickles(self, rng: Random) -> None:
        """The .bin files of paint."""
        path = self.folder / "a.bin"
        torch.save(rng.choice(({"a": torch.ones(4)}, {"a": 1}, [torch.ones(2)], {"a": {"b": torch.ones(1)}})), path)
        path.write_bytes(damaged(path.read_bytes(), rng) if rng.random() < 0.8 else path.read_bytes())
        weights = weights_in(path, "UNet")
        weights.read(list(weights.shapes), lambda _: torch.float16, lambda _: None)


NAMES = tuple(name for name in vars(Readers) if not name.startswith("_"))
WEIGHTS = {"configs": 6.0, "prompts": 2.0, "loras": 2.0}  # shares of the time; 1 for others


def mesh_bytes(mesh: Any) -> int:
    """The memory of a mesh that was read."""
    return sum(part.nbytes for part in (mesh.vertices, mesh.faces, mesh.uvs) if part is not None)


def peak(reset: bool = False) -> int:
    """The most memory that this process has had since the last reset, in bytes; 0 where the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def place_of(error: BaseException) -> str:
    """The class of an error and the last line of ours that it went through."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
    ours = [
        frame for frame in ours if "site-packages" not in frame.filename and "tests" not in Path(frame.filename).parts
    ]
    last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error).splitlines()[:1]}"


def run(
    name: str, readers: Readers, seed: int, seconds: float, case: int | None
) -> tuple[Counter[str], dict[str, int]]:
    """How many files were read and refused, and the raw errors with the first case of each."""
    counts: Counter[str] = Counter()
    raw: dict[str, int] = {}
    ends, index = time.monotonic() + seconds, case or 0
    while time.monotonic() < ends or index == (case or 0):
        before, began, kept = peak(reset=True), time.process_time(), 0
        try:
            torch.manual_seed(index)
            kept = getattr(readers, name)(random.Random(f"{seed}/{name}/{index}")) or 0
            counts["read"] += 1
        except PackError as error:
            assert "\n" not in str(error), f"{name} {index}: an error of more than one line"
            counts["refused"] += 1
        except Exception as error:
            counts["raw"] += 1
            raw.setdefault(place_of(error), index)
            if case is not None:
                traceback.print_exc()
        took, lasted = peak() - before - kept, time.process_time() - began
        size = sum(file.stat().st_size for file in readers.folder.rglob("*") if file.is_file())
        for what, found, most in (("bytes", took, reading_budget(size)), ("seconds", lasted, MOST_SECONDS)):
            if found > most and index:  # the first case imports what it needs
                counts["raw"] += 1
                raw.setdefault(f"{found:,.0f} {what} of at most {most:,.0f}", index)
        index += 1
        if case is not None:
            break
    return counts, raw


def main() -> int:
    """Fuzz every reader for its share of the time; 1 where a raw error came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--case", type=int)
    parser.add_argument("--tiny", type=Path, default=ROOT / ".build" / "tiny-fuzz")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with suppress(ImportError):  # of a system without such limits: a file that asks for far more is an error here
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(1)
    arguments.tiny.mkdir(parents=True, exist_ok=True)
    chosen = (arguments.only,) if arguments.only else NAMES
    total, failed = sum(WEIGHTS.get(name, 1.0) for name in chosen), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        readers = Readers(Path(folder), arguments.tiny)
        for name in chosen:
            share = arguments.seconds * WEIGHTS.get(name, 1.0) / total
            counts, raw = run(name, readers, arguments.seed, share, arguments.case)
            print(f"{name}: {counts['read']} read, {counts['refused']} refused, {counts['raw']} raw errors", flush=True)
            for text, case in raw.items():
                print(f"  {text}; --only {name} --seed {arguments.seed} --case {case}")
            failed += counts["raw"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
