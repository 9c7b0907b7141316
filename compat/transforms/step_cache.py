"""Step caches: diffusers' ways to skip work that changed little since the previous step. Lossy. A cache is put on for
one sampling, and counts what ran. Sharing guidance's results, or acting inside a compiled block, is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..device.execution import COMPILED, HOST, add_hook, placed, to_host
from ..errors import InputError, UnsupportedError, require_choice, require_range
from ..memory.parts import Undo, transformer_blocks

FIRST_BLOCK, TAYLOR, PYRAMID, AUTO = "first_block", "taylor", "pyramid", "auto"
KINDS: dict[str, str] = {
    AUTO: FIRST_BLOCK,
    FIRST_BLOCK: "runs the first block, and the others only if its result changed by more than the threshold",
    TAYLOR: "runs attention once every few steps and extrapolates in between",
    PYRAMID: "runs attention once every few steps and repeats the result in between",
}
OFF, CUSTOM = "off", "custom"
PRESETS: dict[str, tuple[float, int]] = {"quality": (0.05, 2), "balanced": (0.1, 3), "fast": (0.2, 4)}
PRESET_CHOICES = (OFF, *PRESETS, CUSTOM)
DEVICES = ("device", "cpu")
SHARED = {PYRAMID: "it stores one result for both branches of guidance"}
INSIDE = "it acts inside a block, and a compiled block is a single graph"
ATTENTIONS = r"(single_)?transformer_blocks\.\d+\.attn[12]?"  # diffusers' own patterns miss the numbered names
WARM_UP = 2  # steps that an extrapolation needs


@dataclass(frozen=True, slots=True)
class StepCacheSettings:
    """The user's settings of a step cache."""

    kind: str = AUTO  # one of KINDS
    threshold: float = PRESETS["balanced"][0]  # of ``first_block``: relative change below which blocks are skipped
    interval: int = PRESETS["balanced"][1]  # of the others: every so many steps are computed
    start: float = 0.0  # share of the steps from which on it acts
    end: float = 1.0
    device: str = DEVICES[0]  # where results are kept between steps

    def __str__(self) -> str:
        how = f"threshold {self.threshold:g}" if self.kind == FIRST_BLOCK else f"every {self.interval} steps"
        return f"{self.kind}, {how}, from {self.start:.0%} to {self.end:.0%} of the steps"

    def skipped(self, steps: int) -> float:
        """The share of blocks, or of attentions, skipped in ``steps``, for a forecast; only a run tells the true one.
        Source: FLUX.1-dev at thresholds 0.06 to 0.12 (diffusers docs/source/en/optimization/para_attn.md)."""
        if self.kind in (TAYLOR, PYRAMID):
            return max(0.0, self.end - max(self.start, WARM_UP / steps)) * (1 - 1 / self.interval)
        return (self.end - self.start) * min(0.6, 4 * self.threshold)


def settings_for(preset: str, asked: StepCacheSettings) -> StepCacheSettings | None:
    """The settings ``asked``, ``auto`` resolved, with the ``preset``'s numbers unless it is ``custom``; None for
    ``off``. Raises InputError for an unknown choice or a number out of range, UnsupportedError for an unknown kind."""
    require_choice("preset", preset, PRESET_CHOICES)
    if preset == OFF:
        return None
    kind = FIRST_BLOCK if asked.kind == AUTO else asked.kind
    if kind not in KINDS:
        found = f"step cache kind {asked.kind!r}"
        raise UnsupportedError(found, expected=f"one of {', '.join(KINDS)}", fix="Choose one of these.")
    threshold, interval = PRESETS.get(preset, (asked.threshold, asked.interval))
    require_range("threshold", threshold, 1e-6, 1)
    require_range("interval", interval, 2, 10)
    require_range("start", asked.start, 0, 1)
    require_range("end", asked.end, 0, 1)
    if asked.start >= asked.end:
        found = f"start {asked.start:g} at or after end {asked.end:g}"
        raise InputError(found, expected="start before end", fix="Lower start." if asked.start else "Raise end.")
    require_choice("cache device", asked.device, DEVICES)
    return replace(asked, kind=kind, threshold=threshold, interval=interval)


def require_usable(settings: StepCacheSettings, transformer: nn.Module, cfg: float, batched: bool, stg: float) -> None:
    """Raise UnsupportedError for a cache that would break in compiled blocks, or by guidance in two forwards: ``stg``,
    or ``cfg`` above 1 that is not ``batched`` into one."""
    guided = [f"stg {stg:g}"] if stg > 0 else []
    guided += [f"cfg {cfg:g}"] if cfg > 1.0 and not batched else []
    if settings.kind in SHARED and guided:
        found = f"step cache {settings.kind!r} with {' and '.join(guided)}: {SHARED[settings.kind]}"
        raise UnsupportedError(found, expected="no such guidance, or another kind", fix=f"Choose kind {FIRST_BLOCK}.")
    if settings.kind != FIRST_BLOCK and any(hasattr(block, COMPILED) for block in transformer_blocks(transformer)):
        found = f"step cache {settings.kind!r} with compile: {INSIDE}"
        raise UnsupportedError(found, expected=f"kind {FIRST_BLOCK}, or compile off", fix=f"Choose kind {FIRST_BLOCK}.")


@dataclass(slots=True)
class Count:
    """Runs of the units, blocks or attentions, that a cache may skip."""

    units: int = 0  # in the transformer
    forwards: int = 0  # of the transformer, so that ``units * forwards`` would run without a cache
    ran: int = 0  # units that did run, in all forwards
    skipped_steps: int = 0  # forwards in which any unit was skipped
    unit: str = "block"  # or ``attention``

    def __str__(self) -> str:
        whole = self.units * self.forwards
        if not whole:
            return "nothing ran"
        share = 1 - self.ran / whole
        shortened = f"{self.skipped_steps} of {self.forwards} passes of the transformer shortened"
        return f"{shortened}, {share:.0%} of {self.unit} passes skipped ({whole - self.ran} of {whole})"


@contextmanager
def cached(transformer: Any, settings: StepCacheSettings, steps: int) -> Iterator[Count]:
    """Apply the cache to ``transformer`` for the block, a sampling of ``steps``; yields the count of what it skips.
    Each sampling, and section of a FramePack video, starts anew. Forwards must run in diffusers' ``cache_context``."""
    active = _Active(transformer, settings, steps)
    with active.undo:
        with torch.inference_mode(False), torch.no_grad():
            active.attach()
        yield active.count


@dataclass(slots=True)
class _Active:
    """A cache on one transformer for one sampling; a change of the timestep begins a new step."""

    transformer: Any
    settings: StepCacheSettings
    steps: int
    count: Count = field(default_factory=Count)
    undo: Undo = field(default_factory=Undo)
    time: float = 0.0  # timestep of the last forward
    direction: int = 0  # of time in this sampling: down in most families, up in Mochi
    index: int = -1  # of the step
    rows: dict[str, int] = field(default_factory=dict)  # batch size of each branch of guidance, which has its own state
    begun: set[str] = field(default_factory=set)  # the branches whose forward at this time has begun
    ran: int = 0  # units, in this forward

    def attach(self) -> None:
        """Put the cache, the counters and the hooks on the transformer; ``undo`` takes them off."""
        units = list(_units(self.transformer, self.settings.kind))
        self.count.units, self.count.unit = len(units), "block" if self.settings.kind == FIRST_BLOCK else "attention"
        for unit in units:
            self.undo.set(unit, "forward", partial(self._counted, unit.forward))
        _register_blocks()
        self.transformer.enable_cache(self._config())
        self.undo.append(self.transformer.disable_cache)
        for hook in _hooks(self.transformer):
            if hasattr(hook, "threshold"):
                hook._should_compute_remaining_blocks = partial(_changed, hook._should_compute_remaining_blocks)
            elif hasattr(hook, "_measure_should_compute"):
                hook._measure_should_compute = partial(self._due, hook._measure_should_compute)
        self.undo.append(add_hook(self.transformer, self._before, before=True, with_kwargs=True).remove)
        self.undo.append(add_hook(self.transformer, self._after, with_kwargs=True).remove)

    def acts(self) -> bool:
        """True where this step lies between the settings' start and end."""
        return self.settings.start <= self.index / max(self.steps, 1) < self.settings.end

    def _due(self, measure: Callable[[], tuple[bool, Any]]) -> tuple[bool, Any]:
        """TaylorSeer's answer whether attention is computed, and its state; always computed outside start and end."""
        due, state = measure()
        return due or not self.acts(), state

    def _config(self) -> Any:
        """diffusers' config of this kind of cache; start and end act by `_before`, `_due` or a callback."""
        from diffusers import hooks

        settings = self.settings
        if settings.kind == FIRST_BLOCK:
            return hooks.FirstBlockCacheConfig(threshold=settings.threshold)
        if settings.kind == TAYLOR:
            return hooks.TaylorSeerCacheConfig(
                cache_interval=settings.interval,
                disable_cache_before_step=WARM_UP,  # counted anew after guidance ends; `_due` sees to start and end
                max_order=1,
                taylor_factors_dtype=torch.float32,
                cache_identifiers=[ATTENTIONS],
            )
        return hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=settings.interval,
            spatial_attention_timestep_skip_range=(0, 2),
            spatial_attention_block_identifiers=(f"^{ATTENTIONS}$",),
            current_timestep_callback=lambda: 1 if self.acts() else -1,  # in the range, or outside it
        )

    def _before(self, module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        """A pre-hook: find this forward's step by its time, drop what another sampling or batch size left, set the
        first block's threshold, and fetch the branch's results from the host where they are kept there."""
        time, states = named.get("timestep"), named.get("hidden_states", args[0] if args else None)
        now = float(to_host(time).max()) if isinstance(time, torch.Tensor) else self.time
        contexts = (manager._context for hook in _hooks(module) for manager in _managers(hook))
        branch = next((context.name for context in contexts if context is not None), "")  # that is open, if any
        rows = states.shape[0] if isinstance(states, torch.Tensor) else self.rows.get(branch, 0)
        direction = (now > self.time) - (now < self.time)  # 0 within a step
        started = self.index < 0 or direction * self.direction < 0  # back in time: another sampling
        again = not direction and branch in self.begun  # the step is repeated, or another section has a single step
        if started:
            self.index = 0
        elif direction:
            self.index, self.direction = self.index + 1, direction
        if started or again or self.rows.get(branch, rows) != rows:  # another batch size: guidance began or ended
            _forget(module)
        self.begun = {branch} if direction or again else self.begun | {branch}
        self.time, self.rows[branch], self.ran = now, rows, 0
        for hook in _hooks(self.transformer):
            if hasattr(hook, "threshold"):  # the first block's change is never below -1, so all blocks run
                hook.threshold = self.settings.threshold if self.acts() else -1.0
        if self.settings.device != DEVICES[0] and isinstance(states, torch.Tensor):
            _place_states(module, states.device, current_only=True)

    def _after(self, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        """A forward hook: count what ran, and move the caches' results to the host where the settings ask for it."""
        self.count.forwards += 1
        self.count.ran += self.ran  # here, so that a forward that is cut short does not count
        self.count.skipped_steps += self.ran < self.count.units
        if self.settings.device != DEVICES[0]:
            _place_states(module, HOST)

    def _counted(self, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.ran += 1
        return inner(*args, **named)


class _Measured(torch.Tensor):
    """A tensor whose ``item`` reads the device by ``to_host``, which keeps every bit."""

    def item(self) -> Any:
        return to_host(self.as_subclass(torch.Tensor)).item()


def _changed(decide: Callable[[torch.Tensor], bool], residual: torch.Tensor) -> bool:
    """The verdict of diffusers' ``decide`` on the first block's residual, (B, N, D); it compares by ``item``."""
    return decide(residual.as_subclass(_Measured))


def _units(transformer: nn.Module, kind: str) -> Iterator[nn.Module]:
    """The modules that a cache of ``kind`` skips: blocks, or attentions, for ``PYRAMID`` without cross attention."""
    for block in transformer_blocks(transformer):
        if kind == FIRST_BLOCK:
            yield block
            continue
        for name, child in block.named_children():
            cross = kind == PYRAMID and bool(getattr(child, "is_cross_attention", False))
            if name in ("attn", "attn1", "attn2") and not cross:
                yield child


def _hooks(transformer: nn.Module) -> Iterator[Any]:
    """diffusers' stateful hooks in ``transformer``: those of its caches."""
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        yield from (hook for hook in getattr(registry, "hooks", {}).values() if hook._is_stateful)


def _managers(hook: Any) -> Iterator[Any]:
    """The managers of a hook's states, one state for each branch of guidance."""
    from diffusers.hooks.hooks import StateManager

    yield from (value for value in vars(hook).values() if isinstance(value, StateManager))


def _forget(transformer: nn.Module) -> None:
    """Drop the results that the caches hold, but keep their current branch, which upstream's own reset drops too."""
    for hook in _hooks(transformer):
        for manager in _managers(hook):
            manager._state_cache.clear()
        if hasattr(hook, "state"):
            hook.state.reset()


def _place_states(transformer: nn.Module, device: torch.device, current_only: bool = False) -> None:
    """Move the results that the caches hold to ``device``; with ``current_only``, those of the current branch alone."""
    for hook in _hooks(transformer):
        states = [hook.state] if hasattr(hook, "state") else []
        for manager in _managers(hook):
            current = manager._context.name if current_only and manager._context is not None else None
            states += [state for name, state in manager._state_cache.items() if current in (None, name)]
        for state in states:
            for name, value in list(vars(state).items()):
                setattr(state, name, placed(value, device))


def _register_blocks() -> None:
    """Tell diffusers what HunyuanVideo 1.5's block returns, which it does not know by itself."""
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

    try:
        TransformerBlockRegistry.get(HunyuanVideo15TransformerBlock)
    except ValueError:
        places = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
        TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, places)
