"""The dtype of each part of a pipeline on a device, with the reason, and the one string-to-dtype map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..decision import AUTO, CHOSEN, Decision
from ..errors import UnsupportedError
from .facts import DeviceFacts
from .probe_store import Probes
from .probes import BF16 as BF16
from .probes import DTYPES as DTYPES
from .probes import FP16 as FP16
from .probes import FP32 as FP32
from .probes import NAMES as NAMES
from .quirks import Abilities, Verdict, abilities_of

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # of transformer, text encoders, VAE
ALL_BF16: Dtypes = (BF16, BF16, BF16)
SAFE = "fp16-safe"
ON_CPU = "on a CPU"
CHOICES = ("auto", "fp32", "bf16", "fp16", SAFE)


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the parts of one pipeline, and why."""

    transformer: torch.dtype  # of its weights
    text: torch.dtype
    vae: torch.dtype  # of its weights and activations
    why: str
    compute: torch.dtype | None = None  # of the transformer's products and attention; None as ``transformer``
    residual: torch.dtype | None = None  # of its residual, norms, modulation and gates; None as ``compute``
    conv: torch.dtype | None = None  # of the VAE's convolutions; None as ``vae``
    latents: torch.dtype = FP32  # between the steps of the sampler
    automatic: bool = True  # the user left it open: a part may run in another dtype when it fails

    def __post_init__(self) -> None:
        for name, default in (("compute", "transformer"), ("residual", "compute"), ("conv", "vae")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, default))

    @property
    def safe(self) -> bool:
        """True for fp16-safe: fp16 operands around an fp32 residual stream."""
        return self.compute is FP16 and self.residual is FP32

    @property
    def operands(self) -> str:
        return NAMES[self.compute or self.transformer]

    @property
    def choice(self) -> str:
        """The explicit choice that has this transformer."""
        return SAFE if self.safe else NAMES[self.transformer]

    @property
    def decision(self) -> Decision:
        return Decision("precision", str(self), self.why, AUTO if self.automatic else CHOSEN)

    def __str__(self) -> str:
        convolutions = "" if self.conv is self.vae else f" with convolutions in {NAMES[self.conv or self.vae]}"
        return f"transformer {self.choice}, text {NAMES[self.text]}, VAE {NAMES[self.vae]}{convolutions}"


def _safe(text: torch.dtype, why: str) -> Precision:
    return Precision(transformer=FP16, text=text, vae=FP32, why=why, compute=FP16, residual=FP32)


_OLD = "GPUs before sm80 have no bf16 units; fp16 products around an fp32 residual are fast"
_MAC = "bf16 halves the largest part; the VAE stays accurate in fp32"

PRECISION: dict[str, Precision] = {  # by arch class; a row of the model's own wins over its dtypes
    "cpu": Precision(FP32, FP32, FP32, "a CPU computes fp32 fastest and exactly"),
    "cuda-sm80+": Precision(BF16, BF16, BF16, "this GPU has bf16 tensor cores and the models were trained in it"),
    "cuda-old": _safe(FP32, _OLD),
    "rocm": Precision(BF16, BF16, BF16, "bf16 has the range of fp32 at half its memory"),
    "xpu": Precision(BF16, BF16, BF16, "Intel GPUs have bf16 units"),
    "mps": Precision(BF16, FP32, FP32, _MAC),
    "xla": Precision(BF16, BF16, FP32, "XLA accelerators are built for bf16, but VAEs lose accuracy in it"),
    "other": Precision(FP32, FP32, FP32, "nothing is known about this device, so AnyGPU computes exactly"),
}


@dataclass(frozen=True, slots=True)
class ModelPrecision:
    """The dtypes of a model that differ from the common rows."""

    rows: Mapping[Dtypes, Precision] = field(default_factory=dict)  # dtypes of a common row to its own
    half_text: bool = False  # upstream runs its text encoders in fp16, which a T5 cannot
    half_vae: bool = False  # upstream decodes in fp16
    half_unet: bool = False  # a UNet with 2-D convolutions, in fp16 with its encoders upstream


_TEXT = "its text encoders run in fp16 upstream too"
_HALF = "its text encoders and VAE run in fp16 upstream too"  # VAE: diffusers#11112, FramePack's demo_gradio.py
_VAE = "its VAE runs in fp16 upstream too"  # Tencent-Hunyuan/HunyuanVideo-1.5, hunyuan_video_pipeline.py: vae_dtype
PLAIN = ModelPrecision()
_HALF_TEXT = {
    (FP16, FP32, FP32): replace(_safe(FP16, f"{_OLD}; {_HALF}"), vae=FP16, conv=FP16),
    (BF16, FP32, FP32): Precision(BF16, FP16, FP32, f"{_MAC}; {_TEXT}"),
}
HALF_TEXT = ModelPrecision(_HALF_TEXT, half_text=True, half_vae=True)  # Llama and CLIP
_HALF_VAE = replace(_safe(FP32, f"{_OLD}; {_VAE}"), vae=FP16, conv=FP16)
HALF_VAE = ModelPrecision({(FP16, FP32, FP32): _HALF_VAE}, half_vae=True)
# Tencent-Hunyuan/Hunyuan3D-2, hy3dgen/texgen: every network is loaded with torch_dtype float16; CLIP and DINOv2 too
_PAINT = Precision(FP16, FP16, FP16, "the published code runs this model in fp16 throughout")
PAINT = ModelPrecision({ALL_BF16: _PAINT}, half_unet=True)

_EXPLICIT: dict[str, Precision] = {
    "fp32": Precision(FP32, FP32, FP32, "exact, twice the memory of bf16"),
    "bf16": Precision(BF16, BF16, BF16, "half the memory of fp32 with its range"),
    "fp16": Precision(FP16, FP32, FP16, "half the memory"),
    SAFE: _safe(FP32, "fp16 operands around an fp32 residual"),
}
_WIDE_TEXT = {"fp16": "text encoders stay fp32, since fp16 overflows in T5", SAFE: "text and VAE in fp32"}


def precision_for(
    model: ModelPrecision, facts: DeviceFacts, choice: str = "auto",
    probes: Probes = None, offered: Sequence[str] = CHOICES,
) -> Precision:  # fmt: skip
    """The dtypes for ``model`` on the device of ``facts``; ``probes`` outrank a known bug's row, None asks nothing.
    ``auto`` takes the table's row and leaves it where the device cannot follow: bf16 becomes fp16-safe, then fp32. An
    explicit choice is never changed; only convolutions that a device lacks are computed in fp32, which loses nothing.
    Raises UnsupportedError for an unknown or impossible choice, or no row; it names those that are ``offered``."""
    able = abilities_of(facts, probes)
    if choice == "auto":
        return _automatic(model, _row(model, facts), able)
    if choice not in _EXPLICIT:
        found = f"precision {choice!r}"
        raise UnsupportedError(found, expected=f"one of {', '.join(CHOICES)}", fix="Choose one on the load node.")
    if _contradicts(choice, facts):
        found = f"precision {choice!r} {ON_CPU}"
        expected = f"one of {', '.join(_possible(model, able, facts, offered))}"
        fix = "Choose auto. A CPU has no fp16 units, so this would be slower and less exact than fp32."
        raise UnsupportedError(found, expected=expected, fix=fix)
    chosen, ability = _EXPLICIT[choice], _ability(model, choice, able)
    if not ability.usable:
        found = f"precision {choice!r} {_refusal(ability, facts)}"
        expected = f"one of {', '.join(_possible(model, able, facts, offered))}"
        raise UnsupportedError(found, expected=expected, fix="Choose auto, which uses what works on this device.")
    why = [chosen.why]
    if choice in _WIDE_TEXT and (model.half_text or model.half_unet):
        chosen = replace(chosen, text=FP16)
    elif choice in _WIDE_TEXT:
        why.append(_WIDE_TEXT[choice])
    if ability.costly:
        why.append(f"slow here ({ability.why})")
    return replace(chosen, why="; ".join(why), conv=_conv_dtype(chosen.vae, able), automatic=False)


def copies_decision(precision: Precision, facts: DeviceFacts, probes: Probes = None) -> tuple[Decision, ...]:
    """The decision to copy 16-bit floats as integers, if a part has them and this device damages plain copies."""
    for dtype in dict.fromkeys((precision.transformer, precision.text, precision.vae)):
        plain = abilities_of(facts, probes).verdict(f"copy.{NAMES[dtype]}")
        if not plain.usable:
            return (Decision("copies", "16-bit values as integers", plain.why, AUTO),)
    return ()


def reason_against(choice: str, models: Iterable[ModelPrecision], facts: DeviceFacts) -> str:
    """The reason why none of ``models`` can run in ``choice`` here, as :func:`precision_for` has it; else empty."""
    if choice == "auto":
        return ""
    if _contradicts(choice, facts):
        return ON_CPU
    abilities = [_ability(model, choice, abilities_of(facts)) for model in models]
    return "" if any(ability.usable for ability in abilities) else _refusal(abilities[-1], facts)


def _contradicts(choice: str, facts: DeviceFacts) -> bool:
    return choice == SAFE and facts.backend == "cpu"


def _ability(model: ModelPrecision, choice: str, able: Abilities) -> Verdict:
    """The verdict on the explicit ``choice``: its products and attention, and for a ``half_unet`` its convolutions."""
    name = _EXPLICIT[choice].operands
    ability = able.transformer(name)
    return able.vae(name) if ability.usable and model.half_unet else ability


def _refusal(ability: Verdict, facts: DeviceFacts) -> str:
    return f"cannot run on {facts.name} ({ability.why})"


def _row(model: ModelPrecision, facts: DeviceFacts) -> Precision:
    """The common row of a class of devices, or the model's own in its place; UnsupportedError for an unknown class."""
    row = PRECISION.get(facts.arch_class)
    if row is None:
        found, expected = f"no precision policy for {facts.arch_class!r}", f"one of {', '.join(sorted(PRECISION))}"
        fix = "Choose a precision yourself, or add a row to PRECISION in compat/device/precision.py."
        raise UnsupportedError(found, expected=expected, fix=fix)
    return model.rows.get((row.transformer, row.text, row.vae), row)


def _automatic(model: ModelPrecision, row: Precision, able: Abilities) -> Precision:
    """``row``, but with fp16 or fp32 for each part whose dtype the device lacks or emulates, and with the reasons."""
    why, causes = row.why, list[Verdict]()
    if row.transformer is not FP32:
        row, why, causes = _transformer(row, able)
    if model.half_unet and row.compute is not FP32 and _refused(ability := able.vae(row.operands)):
        row, causes = replace(row, transformer=FP32, compute=FP32, residual=FP32), [ability]
        why = f"fp32, because this UNet's convolutions do not work in half precision here ({ability.why})"
    if row.text is not FP32 and _refused(ability := able.transformer(NAMES[row.text])):
        text = FP16 if model.half_text and row.safe and not _refused(able.transformer("fp16")) else FP32
        row, why = replace(row, text=text), f"{why}; text in {NAMES[text]}{_cause(ability, causes)}"
        causes.append(ability)
    if row.vae is not FP32 and _refused(ability := able.vae(NAMES[row.vae])):
        vae = FP16 if model.half_vae and not _refused(able.vae("fp16")) else FP32
        row, why = replace(row, vae=vae), f"{why}; VAE in {NAMES[vae]}{_cause(ability, causes)}"
    return replace(row, why=why, conv=_conv_dtype(row.vae, able))


def _transformer(row: Precision, able: Abilities) -> tuple[Precision, str, list[Verdict]]:
    """``row`` with a transformer's dtypes that run here, the reason, and the verdicts that the reason names."""
    ability = able.transformer(row.operands)
    if not row.safe and not _refused(ability):
        return row, row.why, []
    half = able.transformer("fp16")
    refused = half if not half.usable else able.verdict("conv2d.fp16")  # NaN there: trusted with no fp16 at all
    if row.safe:
        if refused.usable:
            return row, row.why, []
        return Precision(FP32, FP32, row.vae, ""), f"fp32, because fp16 does not work here ({refused.why})", [refused]
    since = f"since {row.operands} {'is emulated or slow' if ability.usable else 'does not work'} here ({ability.why})"
    if refused.usable:
        return replace(row, transformer=FP16, compute=FP16, residual=FP32), f"fp16-safe, {since}", [ability]
    changed = replace(row, transformer=FP32, compute=FP32, residual=FP32)
    if refused == ability:  # the row is fp16 itself: name its one verdict once
        return changed, f"fp32, {since}", [ability]
    return changed, f"fp32, {since} and fp16 does not work either ({refused.why})", [ability, refused]


def _conv_dtype(vae: torch.dtype, able: Abilities) -> torch.dtype:
    """The VAE's dtype if the device computes 2-D or 3-D convolutions in it right and not slowly, else fp32."""
    each = [able.verdict(f"{name}.{NAMES[vae]}") for name in ("conv3d", "conv2d")]
    return FP32 if all(map(_refused, each)) else vae


def _refused(ability: Verdict) -> bool:
    return not ability.usable or ability.costly


def _cause(ability: Verdict, causes: Sequence[Verdict]) -> str:
    """The reason of ``ability`` in brackets; empty if it is among ``causes``, already named."""
    return "" if ability in causes else f" ({ability.why})"


def _possible(model: ModelPrecision, able: Abilities, facts: DeviceFacts, offered: Sequence[str]) -> list[str]:
    usable = {name: _ability(model, name, able).usable for name in _EXPLICIT}
    return [name for name in offered if usable.get(name, True) and not _contradicts(name, facts)]
