"""Where a view cannot be trusted: the rim of the mesh, and steps of depth inside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.views import View

MARGIN = 2 / 512  # of the picture: two pixels at the size that the model paints
JUMP = 0.03  # units of the frame: the weaker Canny threshold, 30 of 255, on a mesh whose depth range is about 1
LOW, HIGH = 30, 80  # Canny thresholds of the reference, sums of absolute gradients
TAN_22 = 13573  # tan(22.5 degrees) * 2^15: directions are told apart in whole numbers, as OpenCV does


def trusted(view: View, exact: bool) -> Tensor:
    """(H, W) bool: covered pixels away from the mesh's rim and from depth edges, by two pixels at 512.

    Args:
        exact: edges as the reference finds them, by Canny on depth scaled to its own range; it takes float noise for
            edges where a view shows one flat face. Otherwise a step of depth is measured in units of the frame.
    """
    covered = view.ids >= 0
    reach = int(MARGIN * view.size)
    edges = canny(_eight_bit_depth(view)) if exact else depth_steps(view)
    return ~grown(~covered, reach) & ~grown(edges, reach)


def grown(mask: Tensor, reach: int) -> Tensor:
    """(H, W) bool: ``mask`` spread by ``reach`` pixels, as a square; two passes, each along one axis."""
    if reach == 0:
        return mask
    values = mask[None, None].to(torch.float32)
    values = F.max_pool2d(values, (2 * reach + 1, 1), 1, (reach, 0))
    return F.max_pool2d(values, (1, 2 * reach + 1), 1, (0, reach))[0, 0] > 0


def depth_steps(view: View) -> Tensor:
    """(H, W) bool: covered pixels whose depth differs from a covered neighbour's by more than a slope explains."""
    depth, covered = view.image(view.depth), view.ids >= 0
    # a face at 75 degrees, the steepest that is baked, changes by this much from one pixel to the next
    limit = max(JUMP, 4 * view.ortho_scale / view.size)
    found = torch.zeros_like(covered)
    for dim in (0, 1):
        count = depth.shape[dim] - 1
        first, second = depth.narrow(dim, 0, count), depth.narrow(dim, 1, count)
        both = covered.narrow(dim, 0, count) & covered.narrow(dim, 1, count)
        step = both & ((first - second).abs() > limit)
        found.narrow(dim, 0, count).logical_or_(step)
        found.narrow(dim, 1, count).logical_or_(step)
    return found


def _eight_bit_depth(view: View) -> Tensor:
    if not view.depth.numel():
        return torch.zeros_like(view.ids, dtype=torch.uint8)
    low, high = view.depth.min(), view.depth.max()
    span = torch.where(high > low, high - low, torch.ones_like(high))
    return view.image((view.depth - low) / span * 255).to(torch.uint8)


def canny(image: Tensor, low: int = LOW, high: int = HIGH) -> Tensor:
    """(H, W) bool: Canny edges of an 8-bit picture (H, W), 3x3 Sobel, sum of absolute gradients.

    Source: Canny 1986, in whole numbers with OpenCV's rounding, so that its result can be compared pixel for pixel.
    """
    padded = F.pad(image[None, None].to(torch.float32), (1, 1, 1, 1), mode="replicate")[0, 0]
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    dx, dy = (rows[:, 2:] - rows[:, :-2]).to(torch.int32), (columns[2:] - columns[:-2]).to(torch.int32)
    strength = dx.abs() + dy.abs()
    around = F.pad(strength, (1, 1, 1, 1))

    def shifted(down: int, right: int) -> Tensor:
        return around[1 + down : around.shape[0] - 1 + down, 1 + right : around.shape[1] - 1 + right]

    flat, steep = dx.abs() * TAN_22, dy.abs() << 15
    level = (steep < flat) & (strength > shifted(0, -1)) & (strength >= shifted(0, 1))
    upright = (steep > flat + (dx.abs() << 16)) & (strength > shifted(-1, 0)) & (strength >= shifted(1, 0))
    slanted = (steep >= flat) & (steep <= flat + (dx.abs() << 16))
    falling = (dx ^ dy) < 0
    ridges = [(strength > shifted(-1, side)) & (strength > shifted(1, -side)) for side in (1, -1)]
    ridge = torch.where(falling, ridges[0], ridges[1])
    weak = (strength > low) & (level | upright | (slanted & ridge))
    found = weak & (strength > high)
    while True:  # strong edges pull in the weak ones that touch them
        more = grown(found, 1) & weak
        if torch.equal(more, found):
            return found
        found = more
