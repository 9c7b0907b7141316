"""A step cache keeps nothing across samplings, sections and batches, and puts the transformer back."""

import pytest
import torch
from anygpu.compat.doctor import diagnose
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.repairs import SCALED
from anygpu.compat.transforms.step_cache import (
    FIRST_BLOCK,
    PYRAMID,
    TAYLOR,
    StepCacheSettings,
    cached,
    require_usable,
)
from compat.transforms.test_attention_processors import made
from torch import nn

TEXT, WIDTH = 5, 32


def call(module: nn.Module, time: float, rows: int = 1, branch: str = "cond") -> torch.Tensor:
    """LTX-Video's output for the same tokens at some time."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 12, 128), (1, TEXT, WIDTH))
    tokens, text = (torch.randn(shape, generator=generator).to(module.dtype) for shape in shapes)
    with torch.no_grad(), module.cache_context(branch):
        return module(
            hidden_states=tokens.expand(rows, -1, -1),
            encoder_hidden_states=text.expand(rows, -1, -1),
            timestep=torch.full((rows,), time),
            encoder_attention_mask=torch.ones(rows, TEXT, dtype=torch.bool),
            num_frames=3,
            height=2,
            width=2,
            return_dict=False,
        )[0]


# With the highest threshold each pass but the first of a sampling is cut short, so a whole one shows a fresh start.
EAGER_TO_SKIP = StepCacheSettings(FIRST_BLOCK, threshold=1.0)


@pytest.mark.parametrize("times", [(900, 600, 900, 600), (0, 300, 0, 300)], ids=["down", "up as Mochi's"])
def test_a_step_back_in_time_starts_anew(times):
    module = made("ltx")
    expected = call(module, times[0])
    with cached(module, EAGER_TO_SKIP, 2) as count:
        whole = []
        for time in times:
            before = count.ran
            found = call(module, time)
            whole.append(count.ran - before == len(module.transformer_blocks))
            if time == times[0]:
                assert torch.equal(found, expected)
    assert whole == [True, False, True, False]
    assert count.skipped_steps == 2 and count.forwards == 4


def test_another_batch_starts_anew():
    module = made("ltx")
    expected = call(module, 600, rows=1)
    with cached(module, EAGER_TO_SKIP, 3) as count:
        call(module, 900, rows=2)
        found = call(module, 600, rows=1)
    assert found.shape == expected.shape and torch.equal(found, expected)
    assert count.skipped_steps == 0


def test_branches_of_other_batches_keep_what_is_theirs():
    """As LTX-Video's guidance without attention, one row in each step beside two of cfg."""
    module = made("ltx")
    with cached(module, EAGER_TO_SKIP, 2) as count:
        for time in (900, 600):
            call(module, time, rows=2, branch="cond_uncond")
            call(module, time, rows=1, branch="without_attention")
    assert count.skipped_steps == 2 and count.forwards == 4
    with pytest.raises(UnsupportedError, match="'pyramid' with stg 1 and cfg 3:"):
        require_usable(StepCacheSettings(PYRAMID), module, 3.0, False, 1.0)


@pytest.mark.parametrize("kind", [FIRST_BLOCK, TAYLOR, PYRAMID])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_is_tried_again_is_computed(kind, failing):
    """Memory runs out in the last block of a step."""
    module, left = made("ltx"), [-1]
    expected = [call(module, time) for time in (900, 600)][failing]

    def short(*_):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError

    module.transformer_blocks[-1].ff.register_forward_pre_hook(short)
    with cached(module, StepCacheSettings(kind, threshold=1e-6, interval=10, start=0.0), 2) as count:
        for time in (900, 600)[:failing]:
            call(module, time)
        left[0] = 1
        with pytest.raises(torch.OutOfMemoryError):
            call(module, (900, 600)[failing])
        assert torch.equal(call(module, (900, 600)[failing]), expected)
        assert torch.equal(call(module, (900, 600)[failing]), expected), "once more, as the Doctor does"
    assert count.ran == count.units * count.forwards


@torch.no_grad()
def test_the_doctor_finds_the_layer_and_the_repair_beside_it():
    """A product of the last block overflows fp16 in the first step, then in the second."""
    module = made("ltx").half()
    up, down = (module.transformer_blocks[-1].ff.net[index] for index in (0, 2))
    up.proj.weight.mul_(3e4), down.weight.div_(3e4)
    large = up.proj.weight.clone()
    for earlier in ((), (900,)):
        with cached(module, StepCacheSettings(FIRST_BLOCK, threshold=1e-6), 2):
            up.proj.weight.zero_()
            for time in earlier:
                call(module, time)
            up.proj.weight.copy_(large)
            assert not call(module, 600).isfinite().all()
            diagnosis, output = diagnose(nn.ModuleDict({"net": module}), lambda: call(module, 600))
        assert diagnosis.finding.layer.startswith(f"net.transformer_blocks.{len(module.transformer_blocks) - 1}.ff")
        assert diagnosis.repair.way == SCALED and output.isfinite().all()


@pytest.mark.parametrize("kind", [FIRST_BLOCK, TAYLOR])
def test_guidance_that_ends_moves_no_end(kind):
    module = made("ltx")
    with cached(module, StepCacheSettings(kind, threshold=1.0, interval=10, start=0.1, end=0.7), 10) as count:
        skipped = []
        for index, time in enumerate(range(1000, 0, -100)):
            before = count.skipped_steps
            call(module, time, rows=2 if index < 3 else 1)
            skipped.append(count.skipped_steps - before)
    assert sum(skipped[:7]) and not any(skipped[7:])


@pytest.mark.parametrize("kind", [FIRST_BLOCK, TAYLOR, PYRAMID])
def test_an_error_inside_takes_it_off(kind):
    module = made("ltx")
    expected = call(module, 500)
    before = {name: vars(part).get("forward") for name, part in module.named_modules()}
    with pytest.raises(ZeroDivisionError), cached(module, StepCacheSettings(kind), 4):
        call(module, 900)
        raise ZeroDivisionError
    assert {name: vars(part).get("forward") for name, part in module.named_modules()} == before
    assert torch.equal(call(module, 500), expected)
