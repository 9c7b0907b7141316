"""What the whole loops of Hunyuan3D paint and our untouched graphs share: mesh, picture and sizes.

`paint_reference.py` runs the publisher's loops; `tests/pipelines/test_whole_loops.py` runs ours.
"""

import torch
from anygpu.paint.demo import torus
from anygpu.paint.geometry.mesh import Mesh

from published import loops

VIEW, MAPS, TEXTURE = 128, 512, 256  # pixels: of a painted view, of the maps, of the texture
PICTURE = (150, 110)  # width and height of the picture, which is cut out


def mesh() -> Mesh:
    """A ring without symmetry, leaning, so that no view shows what another does."""
    made = torus()
    x, y, z = made.vertices.unbind(1)
    bent = torch.stack((1.1 * x + 0.3 * y, y + 0.2 * z + 0.15 * x * x, 0.8 * z - 0.25 * y), dim=1)
    return Mesh(bent, made.faces, made.uvs)


def picture() -> torch.Tensor:
    """A picture (H, W, 4) in 0..1 of 8 bits: an ellipse with a soft rim, off the middle."""
    width, height = PICTURE
    colours = loops.picture(width, height)[0]
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    far = ((rows - 0.1) / 0.7).square() + ((columns + 0.2) / 0.6).square()
    alpha = ((1 - far) * 12).clamp(0, 1)
    return torch.cat((colours, (alpha * 255).round()[..., None] / 255), dim=-1)
