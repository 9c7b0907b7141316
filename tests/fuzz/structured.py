"""Files that are nearly right, for every reader: it returns, or raises one of our errors in one line.

Run: python tests/fuzz/structured.py [--seconds 60] [--seed 0] [--only NAME] [--case INDEX]
Case n of a reader and a seed is always the same file, so that a finding is repeated with --only, --seed and --case.
"""

from __future__ import annotations

import argparse
import json
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

import torch
from anygpu.compat.checkpoints.headers import STORED, entries_and_notes
from anygpu.compat.checkpoints.scaled import with_scales
from anygpu.compat.checkpoints.weights import read_tensors, write_tensors
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import PackError
from anygpu.compat.memory.statistics import FILE, kept_stages
from anygpu.paint.geometry.mesh import load_mesh
from anygpu.paint.networks.weights import weights_in
from anygpu.pipelines import jobs, stages, tiny
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.latents import recovery, store
from anygpu.pipelines.latents.steps import KeptSteps
from anygpu.pipelines.loading import lora
from anygpu.pipelines.loading.folder import LoadRequest, load
from anygpu.pipelines.loading.formats import config_of, contents, layouts
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.text.prompt_files import load_prompt

Random = random.Random
ROOT = Path(__file__).resolve().parents[2]
ODD = (None, True, 0, -1, 1, 3, 10**6, 10**15, 2**70, 0.5, -0.5, 1e308, math.nan, math.inf, "", "x", "4", "\0", [], [0])
ODD += ([1, 2, 3], ["x"], {}, {"a": 1}, [[1]], "../../etc", "a\nb", "é" * 300)
MOST_BYTES = 6 * 1024**3
DTYPES = tuple(dict.fromkeys(STORED.values()))


def mutated(value: Any, rng: Random) -> Any:
    """``value`` with one thing in it replaced, taken away or put in."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice((value * 2, -value, value + 1, value / 2, str(value), [value]))
    return rng.choice(ODD)


def damaged(content: bytes, rng: Random) -> bytes:
    """``content`` with bytes changed, cut off, repeated or put in."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(len(data), 1))
        way = rng.randrange(4)
        if way == 0 and data:
            data[at] = rng.randrange(256)
        elif way == 1:
            del data[at : at + rng.randint(1, 64)]
        elif way == 2:
            data[at:at] = data[at : at + rng.randint(1, 64)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(data)


def shape(rng: Random, most: int = 5) -> list[int]:
    """Sides of a small tensor, some of them 0."""
    return [rng.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(rng.randint(0, most))]


def tensor(rng: Random, sides: list[int] | None = None) -> torch.Tensor:
    """Values of any stored dtype."""
    made = torch.randn(shape(rng) if sides is None else sides).mul(rng.choice((1, 1e30, math.nan, 0)))
    return made.nan_to_num().to(rng.choice(DTYPES)) if rng.random() < 0.9 else made


def rewritten(path: Path, rng: Random) -> None:
    """Change the JSON header of a safetensors file, sometimes, and keep its length right."""
    if rng.random() < 0.6:
        return
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(json.loads(data[8 : 8 + length]), rng)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


class Readers:
    """A method per reader: makes one file from a random generator, and reads it.

    Args:
        folder: an empty one for the files. tiny_folder: where tiny checkpoints are built.
    """

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder = folder
        self.ltx = tiny.build("ltx", tiny_folder)
        self.pipeline = load(LoadRequest(self.ltx, device="cpu"), Silent())
        self.layers = lora.layers_of(self.pipeline)
        frames = torch.rand(4, 32, 32, 3)
        self.movie = write_mp4(frames, 8.0, folder / "seed.mp4").read_bytes()
        self.facts = facts_for("cpu")

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
        job, places = jobs.read_job(path), jobs.Places((self.folder,), (self.folder,), {})
        assert jobs.read_job(jobs.write_job(path, job)) == job and len(job.key) == 64
        places.known[job.model] = self.ltx
        jobs.request_of(job, jobs.Machine(places, self.folder, "cpu"))

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
        path = write_tensors(self.folder / "a.safetensors", tensors, {})
        rewritten(path, rng)
        if rng.random() < 0.3:
            config = json.loads((self.ltx / "transformer" / "config.json").read_text(encoding="utf-8"))
            path.with_suffix(".json").write_text(json.dumps(mutated(config, rng)), encoding="utf-8")
        else:
            path.with_suffix(".json").unlink(missing_ok=True)
        for content in contents(path):
            config_of(content, rng.choice(("", "text", "image")))

    def latents(self, rng: Random) -> None:
        """Our latent files and the list of what is kept."""
        record: dict[str, Any] = {"kind": "latent", "family": "framepack", "task": "text", "frames": 5, "height": 32}
        record |= {"width": 32, "fps": 8.0, "seed": 1, "space": "vae", "version": 1, "shape": [1, 16, 2, 4, 4]}
        record |= {"extra": {"generator_state": "00ff", "section_lengths": [2], "window": 9, "prompt": "x"}}
        record |= {"saved": "2026-01-01T00:00:00", "resume": "key", "unfinished": "section 1 of 2"}
        if rng.random() < 0.3:
            record["listed"] = {"family": "Flux", "frames": 1, "height": 8, "width": 8, "fps": 0, "seed": 1}
        for _ in range(rng.randrange(3)):
            record = mutated(record, rng)
        tensors = {"latent_tensor": tensor(rng, rng.choice(([1, 16, 2, 4, 4], shape(rng)))), "history": tensor(rng)}
        names = [*tensors, "noise_mask", "latent_tensor.1", "more.audio"]
        tensors = {name: tensors.get(name, tensor(rng)) for name in rng.sample(names, rng.randint(1, len(names)))}
        notes = {"anygpu": json.dumps(record) if rng.random() < 0.95 else "{"}
        path = write_tensors(self.folder / "kept" / "a.safetensors", tensors, notes)
        rewritten(path, rng)
        store.kind_of(path)
        recovery.listing(path.parent)
        recovery.KeptSections(path.parent, lambda _: None).found("key")
        latent = store.load_latent(path, lambda _: None, rng.choice(("refuse", "clamp")), rng.choice(store.DTYPES))
        store.described(latent)

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
        KeptSteps(path.parent, lambda _: None).found("ab")

    def prompts(self, rng: Random) -> None:
        """Encoded prompts, read and sampled."""
        record: Any = {"kind": "prompt", "version": 1, "family": "ltx", "opposed": True, "sections": 0, "text": "x"}
        record = mutated(record, rng) if rng.random() < 0.7 else record
        names = [
            "embeds.prompt_embeds",
            "embeds.prompt_attention_mask",
            "negative.prompt_embeds",
            "section.0.prompt_embeds",
            "x",
        ]
        tensors = {name: tensor(rng, rng.choice(([1, 4, 32], [1, 4], shape(rng)))) for name in rng.sample(names, 3)}
        path = write_tensors(self.folder / "a.safetensors", tensors, {"anygpu": json.dumps(record)})
        rewritten(path, rng)
        prompt = load_prompt(path, lambda _: None)
        with torch.no_grad():
            stages.sample(self.pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2), Silent())

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
        adapted = lora.with_lora(self.pipeline, path, 0.5, "", rng.choice(lora.MODES), Silent())
        with torch.no_grad(), adapted.offloader.hold("transformer"):
            pass

    def musubi(self, rng: Random) -> None:
        """Caches of Musubi Tuner, both kinds."""
        notes: Any = {
            "architecture": "hunyuan_video",
            "width": "64",
            "height": "64",
            "frame_count": "9",
            "caption1": "x",
        }
        notes = mutated({**notes, "format_version": "1.0.1"}, rng)
        notes = {str(name): str(value) for name, value in notes.items()} if isinstance(notes, dict) else {}
        name = rng.choice(
            ("latents_3x8x8_float32", "latents_3x8x8_bfloat16", "latents_x", "llama_float32", "clipL_float32")
        )
        tensors = {name: tensor(rng, rng.choice(([16, 3, 8, 8], shape(rng)))), "llama_mask": tensor(rng)}
        file = rng.choice(("clip_00000-009_0064x0064_hv.safetensors", "clip_hv_te.safetensors"))
        path = write_tensors(self.folder / file, tensors, notes)
        rewritten(path, rng)
        store.kind_of(path)
        if rng.random() < 0.5:
            store.load_latent(path, lambda _: None)
        else:
            load_prompt(path, lambda _: None)

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

    def meshes(self, rng: Random) -> None:
        """Meshes of every format, nearly right."""
        from hostile.test_meshes import OBJ, PLY, gltf

        suffix = rng.choice(("obj", "ply", "gltf", "stl", "glb"))
        if suffix == "gltf":
            data = json.dumps(mutated(json.loads(gltf("a.bin")), rng)).encode()
            (self.folder / "a.bin").write_bytes(bytes(rng.choice((36, 0, 35))))
        else:
            texts = {"obj": OBJ.format(mtl="mtllib a.mtl"), "ply": PLY.format(name="a.png"), "glb": "", "stl": ""}
            data = texts[suffix].encode() or self._binary(suffix)
        path = self.folder / f"a.{suffix}"
        path.write_bytes(damaged(data, rng) if suffix != "gltf" or rng.random() < 0.2 else data)
        load_mesh(path)

    def _binary(self, suffix: str) -> bytes:
        import trimesh

        exported = trimesh.creation.box().export(file_type=suffix)
        return exported if isinstance(exported, bytes) else bytes(exported)

    def movies(self, rng: Random) -> None:
        """Videos with a damaged container or damaged frames."""
        path = self.folder / "a.mp4"
        path.write_bytes(damaged(self.movie, rng))
        read_frames(path)

    def probes(self, rng: Random) -> None:
        """Kept probe results and memory statistics."""
        made = ProbeStore(self.facts, self.folder, more={"one": lambda _: ""}, quiet=True)
        answers = {"one": {"status": "ok", "detail": "", "milliseconds": 1.0}}
        content: Any = {"device": "x", "versions": {}, "answers": answers, "remembered": {"t": {"a": 1.0}}}
        content["asking"] = ["one", 1, 0.0]
        text = json.dumps(mutated(mutated(content, rng), rng)).encode()
        assert made.path is not None
        made.path.write_bytes(damaged(text, rng) if rng.random() < 0.2 else text)
        again = ProbeStore(self.facts, self.folder, more={"one": lambda _: ""})
        assert again["one"].status in ("ok", "wrong", "unusable", "unknown")
        again.recall("t")
        row = {"stage": "x", "pipeline": "p", "mode": "none", "device": "cpu", "peak_bytes": 1, "seconds": 1.0}
        (self.folder / FILE).write_text(json.dumps(mutated([row], rng)), encoding="utf-8")
        for cost in kept_stages(self.folder):
            str(cost)

    def pickles(self, rng: Random) -> None:
        """The .bin files of paint."""
        path = self.folder / "a.bin"
        torch.save(rng.choice(({"a": torch.ones(4)}, {"a": 1}, [torch.ones(2)], {"a": {"b": torch.ones(1)}})), path)
        path.write_bytes(damaged(path.read_bytes(), rng) if rng.random() < 0.8 else path.read_bytes())
        weights = weights_in(path, "UNet")
        weights.read(list(weights.shapes), lambda _: torch.float16, lambda _: None)


NAMES = tuple(name for name in vars(Readers) if not name.startswith("_"))
WEIGHTS = {"configs": 6.0, "prompts": 2.0, "loras": 2.0}  # shares of the time; 1 for others


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
        try:
            torch.manual_seed(index)
            getattr(readers, name)(random.Random(f"{seed}/{name}/{index}"))
            counts["read"] += 1
        except PackError as error:
            assert "\n" not in str(error), f"{name} {index}: an error of more than one line"
            counts["refused"] += 1
        except Exception as error:
            counts["raw"] += 1
            raw.setdefault(place_of(error), index)
            if case is not None:
                traceback.print_exc()
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
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(main())
