"""Pictures on their way into the networks: sizes, alpha, squares, all (B, H, W, C) fp32 in 0..1 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..compat.device.execution import to_host
from ..compat.errors import InputError

FILLED = 0.9  # of its square, by an object for MV-Adapter
BORDER = 0.2  # of a recentred object, on each side of it: it fills 1 / 1.4 of its square


def checked_pictures(pictures: Tensor | Sequence[Tensor], subject: str) -> list[Tensor]:
    """Each picture of (B, H, W, C), (H, W, C), or several, as (H, W, 3 or 4), fp32, on the CPU, clamped to 0..1.

    Raises InputError, which names the ``subject``, for another shape, no picture, NaN or infinity."""
    batches = [pictures] if isinstance(pictures, Tensor) else list(pictures)
    checked: list[Tensor] = []
    for batch in batches:
        if batch.ndim not in (3, 4) or batch.shape[-1] not in (3, 4) or not batch.numel():
            found, expected = f"{subject} of shape {tuple(batch.shape)}", "(B, H, W, 3) or (B, H, W, 4)"
            raise InputError(found, expected=expected, fix="Connect an IMAGE, for example from Load Image.")
        if not torch.isfinite(batch).all():
            found = f"{subject} with NaN or infinite values"
            raise InputError(found, expected="values from 0 to 1", fix="Check the node that makes this picture.")
        batch = to_host(batch).float().clamp(0, 1)
        checked += [batch] if batch.ndim == 3 else list(batch)
    if not checked:
        raise InputError(f"no {subject}", expected="at least one picture", fix="Connect an IMAGE.")
    return checked


def cut_out(pictures: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Each picture as (H, W, 4) with 1 - ``mask``, resized to it, as its alpha; unchanged if no mask is above 0.

    The mask is (B or 1, h, w), 1 where the picture is transparent, as ComfyUI's Load Image gives it. Raises InputError
    for another number of masks, or NaN in one."""
    checked = checked_pictures(pictures, "reference picture")
    if mask is None or not bool(((mask > 0) | mask.isnan()).any()):
        return checked
    mask = to_host(mask).float().reshape(-1, *mask.shape[-2:])
    if not torch.isfinite(mask).all():
        found = f"a mask {tuple(mask.shape)} with NaN or infinite values"
        raise InputError(found, expected="values from 0 to 1", fix="Check the node that makes this mask.")
    if len(mask) not in (1, len(checked)):
        found, expected = f"{len(mask)} masks for {len(checked)} reference pictures", "one per picture, or one for all"
        raise InputError(found, expected=expected, fix="Connect image and mask of the same Load Image node.")
    alphas = 1 - mask.clamp(0, 1).expand(len(checked), -1, -1)
    joined = []
    for picture, alpha in zip(checked, alphas, strict=True):
        if alpha.shape != picture.shape[:2]:
            alpha = functional.interpolate(alpha[None, None], picture.shape[:2], mode="bilinear", antialias=True)[0, 0]
        joined.append(torch.cat((picture[..., :3], alpha[..., None]), dim=-1))
    return joined


def over(picture: Tensor, background: float) -> Tensor:
    """``picture`` (..., 4) on a grey of value ``background``, rounded to 8 bits as upstream; RGB is unchanged."""
    if picture.shape[-1] == 3:
        return picture
    alpha = picture[..., 3:]
    return ((picture[..., :3] * alpha + background * (1 - alpha)) * 255).round() / 255


def squared(picture: Tensor, background: float) -> Tensor:  # in the middle of a square, clear around RGBA
    height, width = picture.shape[:2]
    ground = picture.new_tensor((background, background, background, 0.0))[: picture.shape[2]]
    return picture if height == width else _in_middle(picture, max(height, width), ground)


def _in_middle(picture: Tensor, side: int, ground: Tensor) -> Tensor:
    """``picture`` (H, W, C) in the middle of a square of the colour ``ground`` (C,)."""
    square = ground.repeat(side, side, 1)
    top, left = ((side - length) // 2 for length in picture.shape[:2])
    square[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return square


def resized(pictures: Tensor, height: int, width: int) -> Tensor:
    """``pictures`` (B, H, W, C) at another size, bicubic, antialiased and rounded to 8 bits by Pillow, as upstream.

    None changes at its own size. Pillow weighs colours by their alpha, so that none leak out of transparent pixels."""
    from PIL import Image

    if tuple(pictures.shape[1:3]) == (height, width):
        return pictures
    scaled = []
    for picture in (pictures * 255).round().to(torch.uint8).numpy():
        smaller = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        scaled.append(torch.frombuffer(bytearray(smaller.tobytes()), dtype=torch.uint8).view(height, width, -1))
    return torch.stack(scaled).float() / 255


def recentred(picture: Tensor) -> Tensor:
    """The object of an RGBA picture (H, W, 4) in the middle of a transparent square; RGB comes back as it is."""
    if picture.shape[-1] != 4:
        return picture
    crop = _cropped(picture)
    side = max(length + 2 * int(length * BORDER) for length in crop.shape[:2])
    return _in_middle(crop, side, picture.new_tensor((1.0, 1.0, 1.0, 0.0)))


def filling(picture: Tensor, size: int, background: float) -> Tensor:
    """The object of an RGBA picture (H, W, 4) in the middle of a grey square, (size, size, 3), as MV-Adapter has it.

    Its box, one pixel more at the top and left, fills 0.9 of the square; sizes and colours are cut, not rounded."""
    crop = _cropped(picture, 1)
    height, width = crop.shape[:2]
    longest = size * FILLED
    if height > width:
        height, width = int(longest), int(width * longest / height)
    else:
        height, width = int(height * longest / width), int(longest)
    crop = resized(crop[None], max(height, 1), max(width, 1))[0]
    square = _in_middle(crop, size, crop.new_zeros(4))
    alpha = square[..., 3:]
    return ((square[..., :3] * alpha + background * (1 - alpha)) * 255).floor().clamp(0, 255) / 255


def _cropped(picture: Tensor, before: int = 0) -> Tensor:
    """A picture (H, W, 4) cropped to the bounding box of its alpha, with up to ``before`` pixels more above and left.

    Raises InputError where all of it is transparent."""
    seen = picture[..., 3] > 0
    if not seen.any():
        found = "a reference picture that is wholly transparent"
        fix = "Check the mask: ComfyUI's masks are 1 where the picture is transparent."
        raise InputError(found, expected="a visible object", fix=fix)
    rows, columns = seen.any(1).nonzero().flatten(), seen.any(0).nonzero().flatten()
    top, left = max(int(rows[0]) - before, 0), max(int(columns[0]) - before, 0)
    return picture[top : int(rows[-1]) + 1, left : int(columns[-1]) + 1]


def signed(pictures: Tensor) -> Tensor:  # (B, 3, H, W) in -1..1, as the VAE takes it, from (B, H, W, 3)
    return pictures.permute(0, 3, 1, 2).contiguous() * 2 - 1


def shown(decoded: Tensor) -> Tensor:  # (B, H, W, 3) in 0..1 from what the VAE gives
    return (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).contiguous()
