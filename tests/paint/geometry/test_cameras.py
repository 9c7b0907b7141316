"""Cameras are checked where they enter, and get the ids that the model was taught."""

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, RING_VIEWS, camera_ids, camera_notes, camera_table


def test_the_six_views_have_the_published_ids():
    assert camera_ids(DEFAULT_VIEWS) == [21, 12, 15, 18, 43, 37]
    assert [camera.weight for camera in DEFAULT_VIEWS] == [1, 0.1, 0.5, 0.1, 0.05, 0.05]


@pytest.mark.parametrize(
    ("azimuth", "elevation", "expected"),
    [(0, -20, 9), (90, -20, 0), (330, -20, 8), (90, 20, 24), (0, 20, 33), (90, -90, 36), (0, 90, 43), (-90, 0, 18)],
)
def test_ids_by_the_formula(azimuth, elevation, expected):
    assert camera_ids(camera_table([azimuth], [elevation], [1])) == [expected]


def test_every_known_camera_has_an_id_of_its_own():
    known = [(azimuth, elevation) for elevation in (-20, 0, 20) for azimuth in range(0, 360, 30)]
    known += [(azimuth, elevation) for elevation in (-90, 90) for azimuth in range(0, 360, 90)]
    ids = camera_ids(camera_table([a for a, _ in known], [e for _, e in known], [1]))
    assert sorted(ids) == list(range(44))


def test_unknown_elevations_are_refused_with_the_list():
    table = camera_table("0, 90, 180", "0, 45, 30.5", "1")
    with pytest.raises(InputError, match=r"elevations \[30.5, 45.0\].*-90, -20, 0, 20, 90 degrees"):
        camera_ids(table)
    assert camera_ids(table, "paint_pbr") == [0, 0, 0]


def test_lists_may_be_text_and_one_value_counts_for_all():
    table = camera_table("0, 90; -90\n", [0], "1")
    assert [(c.azimuth, c.elevation, c.weight) for c in table] == [(0, 0, 1), (90, 0, 1), (270, 0, 1)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("0, 90", "0, 0, 0", "1"), "2 azimuths, 3 elevations, 1 weights"),
        (("0, x", "0", "1"), "azimuths of cameras '0, x'"),
        (("", "0", "1"), "azimuths of cameras ''"),
        (("nan", "0", "1"), "azimuths"),
        (("0", "91", "1"), "elevations of cameras"),
        (("0", "0", "-1"), "weights of cameras"),
        (("0, 90", "0", "0"), "all 0"),
        (("0", "0", "1", 0.0), "ortho_scale"),
        (([0] * 45, [0], [1]), "at most 44"),
    ],
)
def test_bad_cameras_are_refused(arguments, text):
    with pytest.raises(InputError, match=text):
        camera_table(*arguments)


def test_what_is_unusual_is_said():
    assert camera_notes(DEFAULT_VIEWS) == []
    notes = camera_notes(camera_table("45", "0", "1", 1.0))
    assert len(notes) == 2
    assert "45" in notes[0]
    assert "cut off" in notes[1]
    above = camera_notes(camera_table([30, 90, 30], [90, 90, 0], [1, 1, 1]))
    assert above == ["azimuths between the model's steps, the lower of which is used: 30 (steps of 90)"]


@pytest.mark.parametrize("camera", [*DEFAULT_VIEWS, *RING_VIEWS[::5]])
def test_axes_are_a_right_handed_frame(camera):
    axes = torch.tensor(camera.axes(), dtype=torch.float64)
    torch.testing.assert_close(axes @ axes.T, torch.eye(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert float(torch.linalg.det(axes)) == pytest.approx(1)


def test_the_front_looks_at_plus_z_with_plus_x_to_the_right():
    right, up, towards = torch.tensor(next(iter(DEFAULT_VIEWS)).axes())
    assert (right.tolist(), up.tolist(), towards.tolist()) == ([1, 0, 0], [0, 1, 0], [0, 0, 1])
