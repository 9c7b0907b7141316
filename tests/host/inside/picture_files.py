"""Scenes about picture and video files as core's Load Image and Load Video read them."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from anygpu.compat.checkpoints.identity import picture_content
from anygpu.pipelines.movie import Allowance, content_in, read_frames, transparency, write_mp4
from comfy_api.latest import InputImpl
from PIL import ExifTags, Image, ImageFilter

TURNED = {"jpg": {"quality": 95}, "png": {}, "webp": {"lossless": True}, "tiff": {}}


def written(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Files of every kind, and whether each is a video."""
    noise = np.random.default_rng(0).integers(0, 256, (75, 101, 4), np.uint8)
    clear = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))
    plain = clear.convert("RGB")
    pictures = {
        "plain.jpg": plain, "grey.jpg": plain.convert("L"), "ink.jpg": plain.convert("CMYK"), "plain.png": plain,
        "clear.png": clear, "palette.png": plain.convert("P"), "grey.png": plain.convert("L"),
        "ink.png": plain.convert("1"), "deep.png": Image.fromarray(noise[..., 0].astype(np.uint16) * 257),
        "plain.webp": plain, "clear.webp": clear,
        "block.webp": plain.crop((0, 0, 64, 64)), "plain.bmp": plain, "plain.tif": plain, "plain.gif": plain,
        "plain.avif": plain,
    }  # fmt: skip
    for name, picture in pictures.items():
        picture.save(folder / name)
        yield folder / name, False
    for suffix, options in TURNED.items():
        for orientation in range(2, 9):
            (exif := Image.Exif())[ExifTags.Base.Orientation] = orientation
            path = folder / f"turned{orientation}.{suffix}"
            (plain if suffix == "jpg" else clear).save(path, exif=exif, **options)
            yield path, False
    for name, columns in (("odd.mp4", 98), ("even.mp4", 96)):
        frames = torch.rand(5, 64, columns, 3, generator=torch.Generator().manual_seed(0))
        yield write_mp4(frames, 25.0, folder / name), True


def unlike_core() -> list[str]:
    """What is read otherwise than core reads it: files, and of which their content or their mask."""
    wrong, count = [], 0
    with TemporaryDirectory() as folder:
        for path, _ in written(Path(folder)):
            core = InputImpl.VideoFromFile(str(path)).get_components()
            frames = core.images
            ours, count = read_frames(path)[0], count + 1
            wrong += [path.name] if ours.shape != frames.shape or not torch.equal(ours, frames) else []
            content = content_in(path, lambda: None, Allowance())
            wrong += [] if content == picture_content(frames) else [f"{path.name}, content"]
            seen = transparency(path, frames.shape[1:3])
            same = core.alpha is None if seen is None else torch.equal(seen, 1 - core.alpha[..., -1])
            wrong += [] if same else [f"{path.name}, mask"]
    assert count > 40
    return wrong
