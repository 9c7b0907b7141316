"""Memory that runs out while a part moves, is hooked or steps down: the next run is as the first."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu.compat.device.execution import add_hook, checked_parts
from anygpu.compat.device.failures import is_shortage
from anygpu.compat.errors import PackError, UnsupportedError, parts_of
from anygpu.compat.memory import hooks, standalone
from anygpu.compat.memory.hooks import GroupHooks
from anygpu.compat.memory.offloader import PINNED, HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import STEP_DOWN, StandaloneOffloader
from anygpu.compat.ranks import Group, Ranks, SplitPlan
from anygpu.compat.transforms.attention_processors import CROPPED
from anygpu.compat.transforms.context_parallel import TokenSplit
from anygpu.compat.transforms.order import replace_attention
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Latents, Prompt, PromptRequest, SampleSettings, Silent
from hostile.words import LOST
from runs.faults import injected
from runs.injections import doctored, painted
from torch import nn

from simulated.shortages import shortage
from simulated.test_families import CASES, MODES, PICTURE, loaded_for, rendered

PART = "transformer"
Run = Callable[[StandaloneOffloader, torch.Tensor], torch.Tensor]


class Small(nn.Module):
    """Two blocks between layers of their own, a buffer, and a weight that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def small(mode: str, acc: torch.device, kept: HostWeights) -> tuple[StandaloneOffloader, nn.Module]:
    torch.manual_seed(0)
    module = Small().requires_grad_(False)
    return StandaloneOffloader(Parts({PART: lambda _: module}), acc, mode, OffloadOptions(host_weights=kept)), module


def plain(own: StandaloneOffloader, x: torch.Tensor) -> torch.Tensor:
    """Two forwards in one use of the part."""
    with torch.no_grad(), own.hold(PART) as module:
        return torch.stack([module(x), module(x)]).cpu()


def stepping(own: StandaloneOffloader, x: torch.Tensor) -> torch.Tensor:
    """A forward, a step down as a stage that ran out of memory asks for it, and another forward."""
    with torch.no_grad(), own.hold(PART) as module:
        before = module(x)
        while own.mode in STEP_DOWN:
            own.reduce_memory(PART)
        return torch.stack([before, module(x)]).cpu()


def require_whole(module: nn.Module) -> None:
    """Our hooks before and behind every module that has some, and a mark on the part, or nothing of it anywhere."""
    before, behind = (
        {id(m) for m in module.modules() for hook in getattr(m, table).values() if getattr(hook, "func", None) is ours}
        for table, ours in (("_forward_pre_hooks", hooks._pre_forward), ("_forward_hooks", hooks._post_forward))
    )
    assert before == behind and bool(before) == (hooks.HOOKS in module.__dict__)
    assert before or not any(map(hooks.group_of, module.modules()))


def sweep(acc: torch.device, mode: str, run: Run, kept: HostWeights, **options: Any) -> int:
    """Run out of memory at each step of ``run``, on a part that is new, until none is left; returns how many there are.

    Args:
        options: of :func:`shortage`.
    """
    x = torch.arange(8.0).view(2, 4).to(acc)
    own, _ = small(mode, acc, kept)
    wanted, at = run(own, x), 0
    while True:
        at += 1
        own, module = small(mode, acc, kept)
        with shortage(at, **options) as short:
            try:
                assert torch.equal(run(own, x), wanted), f"step {at} of {mode}"
            except Exception as error:
                assert is_shortage(error), f"step {at} of {mode}: {error!r}"
        require_whole(module)
        if short.count < at:
            return at - 1
        assert torch.equal(run(own, x), wanted), f"the run after step {at} of {mode}"


@pytest.mark.full
@pytest.mark.parametrize(("mode", "behind"), [("none", False), ("group", True)])
def test_a_shortage_while_a_part_steps_down_leaves_it_whole(acc, mode, behind):
    """At each swap of values, hook, stream and event; operators are in the long test."""
    assert sweep(acc, mode, stepping, HostWeights({PART: PINNED}), behind=behind, operators=False) > 20


SETTINGS = SampleSettings(64, 64, 9, steps=2, seed=3)


@pytest.mark.parametrize(
    ("offload", "short", "behind"), [("none", 1, False), ("none", 1, True), ("group", 2, False), ("group", 0, True)]
)
def test_a_shortage_while_room_is_made_says_what_to_lower(acc, tiny_folder, monkeypatch, offload, short, behind):
    """Hooks fail before or behind: at the step down after ``short`` forwards that ran out, or at the first use.

    What stays on the device, which would leave it first, is in ``test_resident.py``.
    """
    monkeypatch.setattr(standalone, "keeps", lambda *_: False)
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "acc:0", offload)
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", ""), Silent())
    wanted = stages.sample(pipeline, prompt, None, SETTINGS, Silent()).samples
    attach, reduce_memory, left = GroupHooks._attach, StandaloneOffloader.reduce_memory, [short]

    def failing(own: GroupHooks) -> None:
        if behind:
            attach(own)
        monkeypatch.setattr(GroupHooks, "_attach", attach)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def stepping_down(own: StandaloneOffloader, *parts: str) -> str:
        monkeypatch.setattr(GroupHooks, "_attach", failing)
        return reduce_memory(own, *parts)

    def full(*_: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("HIP out of memory")

    monkeypatch.setattr(StandaloneOffloader, "reduce_memory", stepping_down)
    handle = pipeline.parts["transformer"].register_forward_pre_hook(full)
    if not short:
        pipeline.offloader.detach("transformer")
        monkeypatch.setattr(GroupHooks, "_attach", failing)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stages.sample(pipeline, prompt, None, SETTINGS, Silent())
    assert {"found", "expected", "fix"} == parts_of(str(caught.value)).keys() and left[0] < 1
    handle.remove()
    monkeypatch.undo()
    assert torch.equal(stages.sample(pipeline, prompt, None, SETTINGS, Silent()).samples, wanted)


@pytest.mark.parametrize("stage", ["encode", "sample", "decode"])
def test_a_device_that_is_lost_is_named_in_every_stage(acc, tiny_folder, stage):
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "acc:0", "group")
    request = PromptRequest("a red fox", "")
    prompt = stages.encode_prompt(pipeline, request, Silent())
    latents = stages.sample(pipeline, prompt, None, SETTINGS, Silent())
    runs = {
        "encode": lambda: stages.encode_prompt(pipeline, request, Silent()),
        "sample": lambda: stages.sample(pipeline, prompt, None, SETTINGS, Silent()),
        "decode": lambda: stages.decode(pipeline, latents, Silent()),
    }
    lost = {"times": float("inf"), "errors": [lambda: RuntimeError(LOST[4])], "device": "acc"}
    for at in (80, 295):
        with shortage(at, **lost), pytest.raises(UnsupportedError, match=r"'acc:0' has stopped answering \(Command"):
            runs[stage]()
    assert torch.equal(stages.decode(pipeline, latents, Silent()), stages.decode(pipeline, latents, Silent()))


def test_a_shortage_in_the_checks_before_a_stage_says_what_to_lower(tiny_folder):
    pipeline = loaded_for(CASES["ltx image"], tiny_folder, "cpu", "none")
    image = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", Silent())
    latents = Latents(torch.zeros(1, 4, 1, 2, 2), "ltx", "text", 1, 64, 64, 24, 0)
    runs = (
        lambda: stages.sample(pipeline, Prompt("ltx", {}, {}), image, SETTINGS, Silent()),
        lambda: stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", Silent()),
        lambda: stages.encode_video(pipeline, PICTURE, 64, 64, "stretch", 0, Silent()),
        lambda: stages.upscale(pipeline, latents, Path(), Silent()),
    )
    for run in runs:
        with shortage(1), pytest.raises(torch.OutOfMemoryError) as caught:
            run()
        assert {"found", "expected", "fix"} == parts_of(str(caught.value)).keys()


def test_a_shortage_in_the_checks_before_painting_says_what_to_lower(acc, tmp_path):
    runs, _ = painted("none", tmp_path)
    with shortage(1), pytest.raises(torch.OutOfMemoryError) as caught:
        runs["paint"]()
    assert {"found", "expected", "fix"} == parts_of(str(caught.value)).keys()


@pytest.mark.full
def test_a_device_that_is_lost_while_repairs_are_tried_is_named_and_a_shortage_costs_none(acc, tiny_folder):
    """The runs with repairs fail too, which is no fault of a layer."""
    runs, *_ = doctored("ltx", "none", tiny_folder)
    lost = {"times": float("inf"), "errors": [lambda: RuntimeError(LOST[4])], "device": "acc"}
    with shortage(0, device="acc") as whole:
        runs["doctor"]()
    with shortage(0) as every:
        wanted = runs["doctor"]()
    with shortage(int(0.6 * every.count)):  # of a repair's trial, which would pass for one that does not help
        assert torch.equal(runs["doctor"](), wanted)
    with shortage(whole.count // 2, **lost), pytest.raises(UnsupportedError, match="'acc:0' has stopped answering"):
        runs["doctor"]()


def test_a_shortage_that_a_library_calls_another_error_says_what_to_lower(tiny_folder, monkeypatch):
    """As transformers does where its tensors find no room."""
    pipeline = loaded_for(CASES["mochi"], tiny_folder, "cpu")

    def failing(*_: Any, **__: Any) -> None:
        try:
            raise RuntimeError("[Errno 12] Cannot allocate memory")
        except RuntimeError as error:
            raise ValueError("Unable to create tensor, activate padding") from error

    monkeypatch.setattr(type(pipeline.tools["tokenizer"]), "__call__", failing)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stages.encode_prompt(pipeline, PromptRequest("a red fox", ""), Silent())
    assert {"found", "expected", "fix"} == parts_of(str(caught.value)).keys()


@pytest.mark.parametrize("before", [False, True])
def test_no_hook_stays_where_registering_it_fails(before):
    layer = nn.Linear(1, 1)
    with shortage(1, behind=True, operators=False, errors=[MemoryError]), pytest.raises(MemoryError):
        add_hook(layer, print, before)
    assert not layer._forward_hooks and not layer._forward_pre_hooks


class Split(nn.Module):
    """Two blocks, of which a context parallel forward can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        for block in self.transformer_blocks:
            block.attn1 = nn.Identity()
            block.attn1.heads, block.attn1.processor = 2, SimpleNamespace(attend=print)


HOOKED: dict[str, tuple[int, Callable[[nn.Module], Any]]] = {  # how many hooks, and what registers them
    "context parallel": (3, TokenSplit(Group(Ranks(None, 0, 2)), SplitPlan((), 0)).attach),
    "output check": (1, lambda module: checked_parts(module, str).__enter__()),
    "cropping": (1, lambda module: replace_attention(module, print)),
}


@pytest.mark.parametrize("name", HOOKED)
def test_nothing_stays_of_hooks_of_which_one_fails(acc, name):
    count, attach = HOOKED[name]
    for at in range(1, count + 1):
        module = type(next(iter(CROPPED)), (Split,), {})()
        with shortage(at, behind=True, operators=False, errors=[MemoryError]), pytest.raises(MemoryError):
            attach(module)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()), at
        assert all(block.attn1.processor.attend is print for block in module.transformer_blocks)


@pytest.mark.full
def test_injections_see_weights_that_stay(acc):
    """Of a part that leaves only if no run before was cut short."""
    part, x, inside = nn.Linear(4, 4).requires_grad_(False), torch.ones(4), list[int]()

    def run() -> torch.Tensor:
        inside.append(1)
        result = part.to(acc)(x.to(acc)).cpu()
        inside.pop()
        part.to(acc if inside else "cpu")
        return result

    ends = injected({"run": run}, random.Random(0), 4, parts=lambda: {PART: part})
    assert any(end.endswith(f"bytes of {PART} stay") for end in ends), ends


@pytest.mark.full
@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_shortage_anywhere_in_a_run_is_survived_or_explained(acc, tiny_folder, name, offload):
    """At places all over a run of each family; the next run is as the first."""
    pipeline = loaded_for(CASES[name], tiny_folder, "acc:0", offload)
    wanted = rendered(pipeline, CASES[name])[1]
    with shortage(0) as whole:
        rendered(pipeline, CASES[name])
    for at in range(1, whole.count, whole.count // 24):
        with shortage(at):
            try:
                rendered(pipeline, CASES[name])
            except Exception as error:
                assert is_shortage(error) or isinstance(error, PackError), f"step {at}: {error!r}"
                assert "belong together" not in str(error) and "a bug of" not in str(error), f"step {at}: {error!r}"
        for part in pipeline.parts.values():
            require_whole(part)
        again = rendered(pipeline, CASES[name])[1]
        assert torch.equal(again, wanted), f"the run after step {at}"


@pytest.mark.full
@pytest.mark.parametrize(("times", "behind"), [(1, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("kept", [HostWeights(), HostWeights({PART: PINNED}), HostWeights(shared=True)])
@pytest.mark.parametrize("run", [plain, stepping])
@pytest.mark.parametrize("mode", MODES)
def test_a_shortage_at_any_step_leaves_the_part_whole(acc, mode, run, kept, times, behind):
    assert sweep(acc, mode, run, kept, times=times, behind=behind) > 20
