"""The z-buffer: exact coverage, order-free, in bounded chunks, and the published rasteriser's faces."""

import pytest
import torch
from anygpu.paint.geometry import raster
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.raster import face_ids, fragments
from anygpu.paint.geometry.views import on_screen

from paint import rendered

HEIGHT, WIDTH = 120, 150


def triangles(count: int, reach: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Loose triangles of about ``reach`` pixels, some over the rim, each at depths of its own."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 1, 2, generator=generator) * torch.tensor([WIDTH + 40.0, HEIGHT + 40.0]) - 20
    corners = centre + (torch.rand(count, 3, 2, generator=generator) - 0.5) * 2 * reach
    depth = torch.randperm(count, generator=generator).view(count, 1, 1).expand(-1, 3, 1) / count
    return torch.cat((corners, depth), dim=2).view(-1, 3), torch.arange(3 * count).view(count, 3)


def by_definition(screen: torch.Tensor, faces: torch.Tensor) -> torch.Tensor:
    """(H, W): every pixel against every face in float64, where these whole numbers are exact."""
    snapped = (screen[:, :2] * raster.SUBPIXELS).round().double()
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    pixel = torch.stack((columns, rows), dim=-1).double() * raster.SUBPIXELS
    ids, best = torch.full((HEIGHT, WIDTH), -1, dtype=torch.int32), torch.full((HEIGHT, WIDTH), torch.inf)
    for number, corners in enumerate(faces.tolist()):
        a, b, c = snapped[corners]
        sides = [
            (q - p)[0] * (pixel - p)[..., 1] - (q - p)[1] * (pixel - p)[..., 0] for p, q in ((a, b), (b, c), (c, a))
        ]
        area = (b - a)[0] * (c - a)[1] - (b - a)[1] * (c - a)[0]
        depth = screen[corners[0], 2]
        inside = torch.stack([side * area.sign() >= 0 for side in sides]).all(0) & (area != 0) & (depth < best)
        ids[inside], best[inside] = number, depth
    return ids


@pytest.mark.full
@pytest.mark.parametrize(("count", "reach"), [(400, 1.5), (150, 12), (60, 60), (20, 300)])
def test_covers_the_pixels_that_the_definition_says(count, reach):
    screen, faces = triangles(count, reach)
    ids = face_ids(screen, faces, HEIGHT, WIDTH)
    assert torch.equal(ids, by_definition(screen, faces))
    assert bool((ids >= 0).any())


def test_chunks_and_order_change_nothing(monkeypatch):
    screen, faces = triangles(300, 25)
    ids = face_ids(screen, faces, HEIGHT, WIDTH)
    with monkeypatch.context() as chunked:
        chunked.setitem(raster.CANDIDATES, "cpu", 1)
        assert torch.equal(ids, face_ids(screen, faces, HEIGHT, WIDTH))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    other = face_ids(screen, faces[order], HEIGHT, WIDTH)
    assert torch.equal(ids, torch.where(other >= 0, order.to(torch.int32)[other.long()], -1))


def test_faces_in_batches_keep_their_numbers(monkeypatch):
    screen, faces = triangles(300, 25)
    ids = face_ids(screen, faces, HEIGHT, WIDTH)
    monkeypatch.setattr(raster, "FACES_AT_ONCE", 7)
    assert torch.equal(ids, face_ids(screen, faces, HEIGHT, WIDTH))


def test_no_more_pixels_are_tried_at_once_than_allowed(monkeypatch):
    sizes = []
    kept = raster._keys

    def counted(*arguments):
        for pixel, key in kept(*arguments):
            sizes.append(pixel.numel())
            yield pixel, key

    monkeypatch.setattr(raster, "_keys", counted)
    monkeypatch.setitem(raster.CANDIDATES, "cpu", 5000)
    face_ids(*triangles(200, 40), HEIGHT, WIDTH)
    assert len(sizes) > 10
    assert max(sizes) <= 5000


def test_faces_over_all_of_it_are_cut_a_few_at_once(monkeypatch):
    screen, faces = torch.tensor([[-5.0, -5, 0], [900, -5, 0], [-5, 900, 0]]), torch.tensor([[0, 1, 2]]).expand(40, 3)
    monkeypatch.setattr(raster, "TILED_AT_ONCE", 16)
    kept, rows = torch.repeat_interleave, list[int]()
    monkeypatch.setattr(torch, "repeat_interleave", lambda *given: rows.append(len(made := kept(*given))) or made)
    assert face_ids(screen, faces, 256, 256).eq(0).all()
    assert max(rows) <= 16 * 16, "of its 16 tiles each"


def test_a_closed_sheet_has_no_cracks():
    """Corners off the pixel grid by odd fractions: each pixel between them belongs to some face."""
    side = 23
    rows, columns = torch.meshgrid(
        torch.linspace(-3, HEIGHT + 3, side), torch.linspace(-3, WIDTH + 3, side), indexing="ij"
    )
    jitter = torch.rand(2, side, side, generator=torch.Generator().manual_seed(3)) * 1.7
    screen = torch.stack((columns + jitter[0], rows + jitter[1], torch.zeros_like(rows)), dim=-1).view(-1, 3)
    index = torch.arange(side * side).view(side, side)
    a, b, c, d = (part.reshape(-1) for part in (index[:-1, :-1], index[:-1, 1:], index[1:, :-1], index[1:, 1:]))
    faces = torch.cat((torch.stack((a, b, c), 1), torch.stack((b, d, c), 1)))
    assert bool((face_ids(screen, faces, HEIGHT, WIDTH) >= 0)[2:-2, 2:-2].all())


def test_ties_go_to_the_lower_face_and_lines_show_nowhere():
    screen = torch.tensor([[1.0, 1.0, 0.5], [20.0, 1.0, 0.5], [1.0, 20.0, 0.5], [40.0, 40.0, 0.1]])
    faces = torch.tensor([[0, 3, 3], [0, 1, 2], [2, 1, 0]])
    assert face_ids(screen, faces, 32, 32).unique().tolist() == [-1, 1]


def test_a_tile_that_a_face_only_touches_is_not_lost():
    """The long side runs through the first pixel of a tile and through no other of it."""
    screen = torch.tensor([[0.0, 0.0, 0.5], [128.0, 0.0, 0.5], [0.0, 128.0, 0.5]])
    ids = face_ids(screen, torch.tensor([[0, 1, 2]]), 130, 130)
    rows, columns = torch.meshgrid(torch.arange(130), torch.arange(130), indexing="ij")
    assert torch.equal(ids == 0, rows + columns <= 128)


def test_nothing_to_show():
    assert face_ids(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64), 4, 5).eq(-1).all()


@pytest.mark.parametrize("index", range(6))
def test_shows_the_published_faces(index):
    surface, stored = rendered.surface(), rendered.arrays("raster")
    screen = on_screen(surface.vertices, list(DEFAULT_VIEWS)[index], rendered.SIZE)
    ids = face_ids(screen, surface.faces, rendered.SIZE, rendered.SIZE)
    expected = stored["face_id_plus_1"][index] - 1
    assert ((ids >= 0) != (expected >= 0)).sum() <= 1, "silhouette"
    assert (ids != expected).float().mean() <= 5e-4
    shown = fragments(screen, surface.faces, ids)
    same = (ids == expected).view(-1)[shown.pixel]
    published = stored["barycentric_f16"][index].view(-1, 3)[shown.pixel]
    assert (shown.weights - published)[same].abs().max() <= 5e-4  # half precision near 1, and its rounding of the rest
    torch.testing.assert_close(shown.weights.sum(1), torch.ones(shown.weights.shape[0]))
    assert shown.weights.min() >= 0
