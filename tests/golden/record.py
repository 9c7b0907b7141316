"""Golden results: runs every case and compares the bytes of each result with those that were recorded.

    python tests/golden/record.py                   compares, and prints what differs
    python tests/golden/record.py --only mochi      the cases with this in their id
    python tests/golden/record.py --write           rewrites the manifest

Hashes hold only for the arithmetic that they were recorded with; :func:`environment` tells one from another.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for runs as a command
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from simulated import accelerator

from golden.cases import CASES, Places

MANIFEST = Path(__file__).with_name("manifest.json")
Digests = dict[str, str]


def digest_of(tensor: torch.Tensor) -> str:
    """Dtype, shape and SHA-256 of a tensor's bytes, in one line."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {hashlib.sha256(data).hexdigest()}"


def environment() -> dict[str, str]:
    """What results depend on besides this repository.

    ``arithmetic`` is a digest of a few products: two machines of one CPU capability may still add up in another order.
    """
    found = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    found |= {"machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}
    generator, digest = torch.Generator().manual_seed(0), hashlib.sha256()
    left, right = torch.randn(2, 67, 193, generator=generator)
    clip, kernel = torch.randn(1, 8, 5, 17, 19, generator=generator), torch.randn(8, 8, 3, 3, 3, generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        digest.update(digest_of(left.to(dtype) @ right.to(dtype).T).encode())
        digest.update(digest_of(torch.conv3d(clip.to(dtype), kernel.to(dtype))).encode())
        digest.update(digest_of(left.to(dtype).softmax(1)).encode())
    return {**found, "arithmetic": digest.hexdigest()[:16]}


def measured(name: str, places: Places) -> Digests:
    """The digest of each result of a case."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=places.scratch) as scratch:
        results = CASES[name].run(Places(places.tiny, places.paint, Path(scratch)))
        return {key: digest_of(value) for key, value in results.items()}


def recorded() -> dict[str, dict]:
    """The manifest: ``environment``, and ``results`` by case id."""
    return json.loads(MANIFEST.read_text(encoding="utf-8"))


def differences(name: str, found: Digests, wanted: Digests) -> list[str]:
    """A line for each result of a case that is not as recorded."""
    keys = sorted(found.keys() | wanted.keys())
    return [
        f"{name}: {key}: {found.get(key, 'missing')} instead of {wanted.get(key, 'nothing')}"
        for key in keys
        if found.get(key) != wanted.get(key)
    ]


def main() -> int:
    """The exit status: 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the manifest; with --only, these cases of it")
    parser.add_argument("--only", default="", help="only cases with this in their id")
    asked = parser.parse_args()
    names = [name for name in CASES if asked.only in name]
    if reason := accelerator.reason():
        print(f"without the simulated accelerator: {reason}")
        names = [name for name in names if not CASES[name].simulated]
    here = environment()
    manifest = recorded() if MANIFEST.exists() else {"environment": here, "results": {}}
    same = manifest["environment"] == here
    if not same and not asked.write:
        print(f"recorded with {manifest['environment']},\nthis is {here}: nothing to compare with")
        return 1
    found, wrong, started = {}, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        places = Places(*(Path(folder) / name for name in ("tiny", "paint", "scratch")))
        for place in (places.tiny, places.paint, places.scratch):
            place.mkdir()
        for name in names:
            began, lines = time.monotonic(), []
            try:
                found[name] = measured(name, places)
                if not asked.write:
                    lines = differences(name, found[name], manifest["results"].get(name, {}))
            except Exception as error:
                lines = [f"{name}: {type(error).__name__}: {error}"]
            wrong += lines
            print(f"{time.monotonic() - began:6.1f} s  {name}", *lines, sep="\n    ", flush=True)
    for name in found:
        like = CASES[name].like
        if like in found:
            common = found[name].keys() & found[like].keys()
            wrong += differences(
                f"{name} beside {like}", *({k: d[k] for k in common} for d in (found[name], found[like]))
            )
    print(f"{len(found)} cases in {time.monotonic() - started:.0f} s, {len(wrong)} differences", *wrong, sep="\n")
    if asked.write and not wrong:
        kept = manifest["results"] if same and asked.only else {}
        results = {name: found.get(name, kept.get(name)) for name in CASES if name in found or name in kept}
        MANIFEST.write_text(json.dumps({"environment": here, "results": results}, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
