"""Running out of memory says what to lower and by how much, in an error of torch's own class."""

from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.errors import parts_of
from anygpu.compat.memory.offloader import OffloadOptions
from anygpu.compat.memory.statistics import MemoryStats
from anygpu.pipelines.base import SampleSettings, Silent
from anygpu.pipelines.forecast.shortage import Shortage, explain_shortage, lowered, shortage_in
from anygpu.pipelines.pipeline import RunOptions
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.stages import DECODING, SAMPLING, running

CUDA = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. "
    "Of the allocated memory 6.50 GiB is allocated by PyTorch."
)
ACC = "acc out of memory. Tried to allocate 96.00 MiB. acc:0 has 64.00 MiB of which 24.00 MiB is free."
HOST = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def pipeline(device: str = "cuda", mode: str = "none", family: str = "ltx") -> SimpleNamespace:
    where = torch.device("cpu" if device == "cpu" else "meta")
    asked = {"mode": mode, "memory_stats": MemoryStats(), "options": OffloadOptions()}
    offloader = SimpleNamespace(device=where, device_of=lambda part: where, **asked)
    facts = SimpleNamespace(name="RTX")
    parts = SimpleNamespace(reading_seconds=0.0)
    return SimpleNamespace(
        spec=FAMILIES[family],
        family=family,
        variant="dev",
        offloader=offloader,
        facts=facts,
        parts=parts,
        plan=SimpleNamespace(speed=SimpleNamespace(request=SimpleNamespace(profile=None), compiled={})),
        run=RunOptions(),
        model=SimpleNamespace(task="text"),
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CUDA, (4 * 2**30, 2**30)),
        (ACC, (96 * 2**20, 24 * 2**20)),
        (HOST, (4096, 7)),
        (HOST.replace("4096", "6"), (6, None)),
        ("out of memory", (0, 7)),
        ("Invalid buffer size: 24.00 GiB", (24 * 2**30, 7)),
    ],
)
def test_the_message_is_read(text, found):
    short = shortage_in(RuntimeError(text), 7)
    assert (short.asked_bytes, short.free_bytes) == found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.id)
def test_what_is_proposed_is_smaller_and_on_the_grid(family):
    own = family.sizes.defaults
    size = SampleSettings(own.width, own.height, own.frames)
    short = Shortage(4 * 2**30, 2**30)
    words = " ".join(lowered(pipeline(family=family.id), size, short))
    assert "ffload to group" in words
    width, height = (int(edge) for edge in words.rsplit(" to ", 1)[1].split("x"))
    assert width % family.sizes.multiple == 0 and height % family.sizes.multiple == 0
    assert width * height <= short.share * own.width * own.height
    if family.id == "framepack":
        assert "frames" not in words
    else:
        fewer = int(words.split("lower frames from")[1].split(" to ")[1].split(",")[0].split(" ")[0])
        assert (fewer - 1) % family.sizes.stride == 0 and fewer <= max(1, short.share * own.frames)


@pytest.mark.parametrize(
    ("device", "mode", "short", "said"),
    [
        ("cpu", "none", "cpu", False),
        ("cuda", "group", "meta", False),
        ("cuda", "model", "meta", True),
        ("cuda", "model", "cpu", False),  # such as vae_device cpu
        ("cpu", "none", "meta", True),  # such as transformer_device gpu:1
    ],
)
def test_offload_is_proposed_only_where_it_helps(device, mode, short, said):
    told = explain_shortage(RuntimeError(CUDA), pipeline(device, mode), "decoding", SIZE, device=torch.device(short))
    assert ("ffload to group" in str(told)) is said


def test_image_to_video_keeps_more_than_its_picture():
    start = pipeline(family="hunyuan_video")
    start.model.task = "image"
    words = [", ".join(lowered(start, SampleSettings(704, 480, frames), Shortage())) for frames in (5, 9, 33)]
    assert [each.partition("ower frames from ")[2].partition(",")[0] for each in words] == ["", "9 to 5", "33 to 13"]


SIZE = SampleSettings(704, 480, 97)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_the_error_keeps_torch_s_class_and_words(kind):
    told = explain_shortage(kind(CUDA), pipeline(), "sampling", SIZE)
    assert isinstance(told, torch.OutOfMemoryError)
    first, second = str(told).splitlines()
    assert first.startswith("out of memory while sampling 704x480, 97 frames on RTX (4.0 GB")
    assert "; expected about 20% of that. Set offload to group" in first and "lower frames from 97 to 17" in first
    assert parts_of(str(told))["expected"] == "about 20% of that"
    assert second.startswith("CUDA out of memory")


CASES = [(RuntimeError(CUDA), torch.OutOfMemoryError), (OSError("other"), OSError)]


@pytest.mark.parametrize(("error", "raised"), CASES)
def test_a_stage_explains_a_shortage_once_and_leaves_other_errors_alone(error, raised):
    whole = pipeline("cpu")
    with (
        pytest.raises(raised) as told,
        running(DECODING, whole, Silent(), SIZE),
        running(SAMPLING, whole, Silent(), SIZE),
    ):
        raise error
    assert str(told.value).count("; expected") == (raised is not OSError)
    assert (told.value.__cause__ is error) == (raised is not OSError)
