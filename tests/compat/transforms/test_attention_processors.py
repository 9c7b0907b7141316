"""The rewritten attention of every transformer and VAE equals upstream's, without a mask, and is put back."""

import ast
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from anygpu.compat.device.execution import to_host
from anygpu.compat.memory.parts import full_name
from anygpu.compat.transforms import attention_processors
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.attention_processors import Padding, Processor, by_rows, valid_counts
from anygpu.compat.transforms.order import replace_attention
from tiny.recipes import TINY
from tiny.weights import randomise
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, TEXT, EPS = 32, 9, torch.finfo(torch.float32).eps
SUMS = 256 * EPS  # sums of a few hundred terms in another order, through four blocks, of values up to 6
WHOLE, PADDED, APART = (TEXT, TEXT), (5, 5), (3, 7)  # valid tokens of each of two rows


def made(name: str, part: str = "transformer") -> nn.Module:
    """A tiny model with random weights; FramePack's recipe is a transformer alone."""
    with torch.random.fork_rng(devices=[]):
        module = TINY[name].parts["." if name == "framepack" and part == "transformer" else part].make()
    randomise(module, 0)
    return module.eval().requires_grad_(False)


def inputs_of(name: str, valid: tuple[int, ...], pictured: bool = True) -> dict[str, Any]:
    """Inputs of one call, a row per number of valid text tokens; padding is noise too, so that it would be noticed."""
    generator, rows = torch.Generator().manual_seed(0), len(valid)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator)

    mask = torch.arange(TEXT)[None] < torch.tensor(valid)[:, None]
    given = {
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": noise(TEXT, WIDTH),
        "encoder_attention_mask": mask,
        "return_dict": False,
    }
    if name.startswith("hunyuan_video_15"):
        quoted = torch.arange(6)[None] < torch.tensor([count // 2 for count in valid])[:, None]
        picture = noise(4, WIDTH) if pictured else torch.zeros(rows, 4, WIDTH)
        return given | {
            "hidden_states": noise(65, 2, 4, 5),
            "encoder_hidden_states_2": noise(6, WIDTH),
            "encoder_attention_mask_2": quoted,
            "image_embeds": picture,
        }
    if name == "mochi":
        return given | {"hidden_states": noise(12, 2, 8, 8)}
    if name == "ltx":
        return given | {"hidden_states": noise(12, 128), "num_frames": 3, "height": 2, "width": 2}
    given |= {"pooled_projections": noise(WIDTH), "guidance": torch.full((rows,), 6000.0)}
    if name != "framepack":
        return given | {"hidden_states": noise(16, 2, 8, 8)}
    places = torch.arange(21)
    return given | {
        "hidden_states": noise(16, 2, 8, 8),
        "image_embeds": noise(5, WIDTH),
        "indices_latents": places[19:],
        "latents_clean": noise(16, 2, 8, 8),
        "indices_latents_clean": places[[0, 18]],
        "latents_history_2x": noise(16, 2, 8, 8),
        "indices_latents_history_2x": places[16:18],
        "latents_history_4x": noise(16, 16, 8, 8),
        "indices_latents_history_4x": places[:16],
    }


FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_i2v", "hunyuan_video_15", "framepack", "mochi")


class Watched(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operator made, views of its inputs left out."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return found


@contextmanager
def masks_seen() -> Iterator[list[bool]]:
    """For each attention call that reaches torch, whether it has a mask."""
    seen, sdpa = [], functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append(attn_mask is not None)
        return sdpa(query, key, value, attn_mask, *rest, **named)

    functional.scaled_dot_product_attention = watched
    try:
        yield seen
    finally:
        functional.scaled_dot_product_attention = sdpa


@pytest.mark.parametrize("valid", [WHOLE, PADDED, APART], ids=["whole", "padded", "apart"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_upstream_and_passes_no_mask(name: str, valid: tuple[int, ...]) -> None:
    transformer, given = made(name), inputs_of(name, valid)
    with torch.no_grad():
        with masks_seen() as upstream:
            stock = transformer(**given)[0]
        undo = replace_attention(transformer, Attention())
        with masks_seen() as ours:
            found = transformer(**given)[0]
        undo()
        again = transformer(**given)[0]
    assert (found - stock).abs().max() <= SUMS * stock.abs().max()
    assert ours and not any(ours)
    assert any(upstream), "upstream passes masks"
    assert torch.equal(again, stock), "put back"
    assert not transformer._forward_pre_hooks


@pytest.mark.parametrize("name", FAMILIES)
def test_every_attention_obeys_the_choice(name: str) -> None:
    """Each block and each refiner calls what was given; no call reaches torch."""
    transformer, calls = made(name), []
    exact = Attention("native_math")

    def attend(*operands: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(operands[0].shape)
        return exact(*operands, **named)

    replace_attention(transformer, attend)
    kinds = [full_name(owner.processor) for owner in transformer.modules() if hasattr(owner, "processor")]
    assert not [kind for kind in kinds if kind.startswith("diffusers")]
    with torch.no_grad(), masks_seen() as beside:
        transformer(**inputs_of(name, WHOLE))
    pools = 1 if name == "mochi" else 0
    assert len(calls) == len(kinds) + pools >= 3
    assert len(beside) <= len(calls), "small calls go on to torch's math, no others are made"


def test_stock_mochi_does_not_obey_diffusers_own_choice() -> None:
    """What ours is for: diffusers takes the choice, says nothing, and calls torch as before."""
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    transformer = made("mochi")
    with torch.no_grad(), masks_seen() as calls, attention_backend(AttentionBackendName.FLEX):
        transformer(**inputs_of("mochi", WHOLE))
    assert calls


def require_nothing_of_all_pairs(owner: Any, run: Any, pairs: int) -> None:
    with torch.no_grad():
        with Watched() as stock:
            run()
        replace_attention(owner, Attention())
        with Watched() as ours:
            run()
    assert stock.largest >= pairs, "upstream builds one"
    assert ours.largest < pairs / 8


def test_hunyuan_video_15_has_no_mask_of_all_pairs() -> None:
    transformer, given = made("hunyuan_video_15"), inputs_of("hunyuan_video_15", PADDED, pictured=False)
    given["hidden_states"] = torch.randn(2, 65, 4, 16, 16)
    require_nothing_of_all_pairs(transformer, lambda: transformer(**given), 2 * (4 * 16 * 16) ** 2)


@pytest.mark.parametrize("pictured", [False, True])
def test_hunyuan_video_15_without_picture_or_quotation(pictured: bool) -> None:
    """A row that quotes nothing beside one that does, and the picture of zeros that means none."""
    transformer, given = made("hunyuan_video_15"), inputs_of("hunyuan_video_15", (1, 7), pictured)
    assert not given["encoder_attention_mask_2"][0].any()
    with torch.no_grad():
        stock = transformer(**given)[0]
        replace_attention(transformer, Attention())
        found = transformer(**given)[0]
    assert (found - stock).abs().max() <= SUMS * stock.abs().max()


@pytest.mark.parametrize("name", ["ltx", "mochi"])
def test_padding_elsewhere_is_masked(name: str) -> None:
    """On the left or between, where no prefix tells: as the same tokens with their padding on the right."""
    transformer, given = made(name), inputs_of(name, WHOLE)
    valid = torch.tensor([[False, True] * 4 + [True], [True] * 5 + [False] * 4])
    order = valid.logical_not().long().argsort(dim=1, stable=True)
    text = given["encoder_hidden_states"].gather(1, order[..., None].expand(-1, -1, WIDTH))
    with torch.no_grad():
        prefix = {"encoder_hidden_states": text, "encoder_attention_mask": valid.gather(1, order)}
        stock = transformer(**given | prefix)[0]
        replace_attention(transformer, Attention())
        found = transformer(**given | {"encoder_attention_mask": valid})[0]
    assert (found - stock).abs().max() <= SUMS * stock.abs().max()


def test_positional_arguments_are_understood() -> None:
    transformer, given = made("mochi"), inputs_of("mochi", PADDED)
    names = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask")
    with torch.no_grad():
        replace_attention(transformer, Attention())
        named = transformer(**given)[0]
        with masks_seen() as seen:
            placed = transformer(*(given[name] for name in names), return_dict=False)[0]
    assert torch.equal(placed, named)
    assert seen and not any(seen)


def test_foreign_processors_are_left_alone_unless_they_ask() -> None:
    transformer = made("hunyuan_video_15")
    first, second = transformer.transformer_blocks[0].attn, transformer.transformer_blocks[1].attn
    own = type("Own", (type(first.processor),), {})()
    asking = type("Asking", (), {"attend": None, "padding": None})()
    first.processor, second.processor = own, asking
    chosen = Attention()
    undo = replace_attention(transformer, chosen)
    assert first.processor is own and second.processor is asking
    assert asking.attend is chosen and isinstance(asking.padding, Padding)
    undo()
    assert asking.attend is asking.padding is None


def test_safe_fp16_obeys_too() -> None:
    """Its rewritten blocks and its own processor, with fp16 operands in the blocks and no mask."""
    from anygpu.compat.transforms.fp16 import apply_fp16_safe

    transformer, given, dtypes = made("ltx"), inputs_of("ltx", APART), []
    chosen = Attention()

    def attend(*operands: torch.Tensor) -> torch.Tensor:
        dtypes.append(operands[0].dtype)
        return chosen(*operands)

    with torch.no_grad():
        exact = transformer(**given)[0]
        applied = apply_fp16_safe(transformer, "ltx")
        undo = replace_attention(transformer, attend)
        with masks_seen() as seen:
            found = transformer(**given)[0]
        undo()
        applied.restore()
    assert dtypes == [torch.float16] * 2 * 3, "two blocks: video among itself, and to the text of each row"
    assert len(seen) == len(dtypes) and not any(seen)
    assert (found - exact).abs().max() <= 4 * torch.finfo(torch.float16).eps * exact.abs().max()


def test_two_models_keep_their_own() -> None:
    one, other, calls = made("ltx"), made("ltx"), []

    def counted(choice: str) -> Callable[..., torch.Tensor]:
        attend = Attention(choice)

        def call(*operands: torch.Tensor) -> torch.Tensor:
            calls.append(choice)
            return attend(*operands)

        return call

    replace_attention(one, counted("native_math"))
    replace_attention(other, counted("auto"))
    with torch.no_grad():
        found = [model(**inputs_of("ltx", APART))[0] for model in (one, other, one)]
    half = len(calls) // 3
    assert calls == ["native_math"] * half + ["auto"] * half + ["native_math"] * half
    assert torch.allclose(found[0], found[1], rtol=0, atol=SUMS * float(found[0].abs().max()))
    assert torch.equal(found[0], found[2])


@pytest.mark.full
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="needs torch 2.9 or newer")
@pytest.mark.parametrize("name", ["ltx", "hunyuan_video", "hunyuan_video_15", "mochi"])
def test_blocks_compile_into_one_graph_with_the_fused_kernel(name: str) -> None:
    """Torch cannot be asked for its kernel inside a graph: the answer comes from before."""
    transformer, given = made(name), inputs_of(name, PADDED)
    replace_attention(transformer, Attention(fused=frozenset({(torch.float32, 16)})))
    with torch.no_grad():
        eager = transformer(**given)[0]
        for block in transformer.transformer_blocks:
            block.compile(backend="eager", fullgraph=True)
        compiled = transformer(**given)[0]
    torch._dynamo.reset()
    assert (compiled - eager).abs().max() <= SUMS * eager.abs().max()


def test_rows_and_counts() -> None:
    kept = {"side_effect": AssertionError("a second read of the device")}
    with (
        mock.patch.object(attention_processors, "to_host", wraps=to_host) as read,
        mock.patch.object(torch, "equal", **kept),
    ):
        assert valid_counts(torch.tensor([[1, 1, 0], [1, 0, 0]])) == ([2, 1], True)
    assert read.call_count == 1
    assert valid_counts(torch.tensor([[0, 1, 1]])) == ([2], False), "padding on the left"
    assert valid_counts(torch.tensor([[1, 1], [0, 0]])) == ([2, 0], False), "nothing valid"
    q, k, v = (torch.randn(2, 1, 4, 8) for _ in range(3))
    found = by_rows(functional.scaled_dot_product_attention, q, k, v, (1, 0), queries_too=True)
    assert torch.equal(found[0, :, 3], torch.zeros(1, 8)), "a padded query gets zeros"
    masked = torch.full((2, 1, 4), 0.0)
    masked[0, :, 3] = -10000.0
    apart = Processor().by_text_rows(q, k, v, masked[:, None])
    cropped = Processor(padding=Padding((1, 0))).by_text_rows(q, k, v, masked[:, None])
    assert torch.allclose(apart, cropped, rtol=0, atol=8 * EPS * float(v.abs().max()))


# ---- VAEs ----------------------------------------------------------------------------------------

CODERS = {  # tiny VAE, what goes in, whether upstream builds a mask of all pairs of cells there
    "hunyuan_video decode": ("hunyuan_video", (1, 16, 3, 4, 6), True),
    "hunyuan_video encode": ("hunyuan_video", (1, 3, 9, 64, 64), True),
    "hunyuan_video_15 decode": ("hunyuan_video_15", (1, 32, 3, 3, 4), True),
    "hunyuan_video_15 encode": ("hunyuan_video_15", (1, 3, 9, 64, 64), True),
    "mochi encode": ("mochi", (1, 3, 13, 32, 32), False),
    "mochi one frame": ("mochi", (1, 3, 1, 32, 32), False),
}


def coded(vae: Any, case: str, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if "decode" in case:
            return vae.decode(values, return_dict=False)[0]
        return vae.encode(values).latent_dist.parameters


@pytest.mark.parametrize("case", CODERS)
def test_vae_equals_upstream_without_a_mask(case: str) -> None:
    name, shape, masked = CODERS[case]
    vae, calls = made(name, "vae"), []
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = Attention("auto")

    def attend(*operands: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(operands[0].shape)
        return exact(*operands, **named)

    with masks_seen() as upstream:
        stock = coded(vae, case, values)
    undo = replace_attention(vae, attend)
    with masks_seen() as ours:
        found = coded(vae, case, values)
    assert (found - stock).abs().max() <= SUMS * stock.abs().max()
    assert any(upstream) is masked
    assert not any(ours)
    assert bool(calls) is ("one frame" not in case)
    undo()
    assert torch.equal(coded(vae, case, values), stock), "put back"
    assert not [owner for owner in vae.modules() if "forward" in vars(owner)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_vae_builds_nothing_of_all_pairs(name: str) -> None:
    vae, kinds = made(name, "vae"), ("HunyuanVideoMidBlock3D", "HunyuanVideo15AttnBlock")
    block = next(module for module in vae.decoder.modules() if type(module).__name__ in kinds)
    width = block.in_channels if hasattr(block, "in_channels") else block.resnets[0].conv1.conv.in_channels
    cells = torch.randn(1, width, 4, 24, 24)
    require_nothing_of_all_pairs(vae, lambda: block(cells), (4 * 24 * 24) ** 2)


def test_what_is_traced_imports_from_no_lazy_package():
    """Torch 2.11 leaves HunyuanVideo's blocks uncompiled otherwise."""
    tree = ast.parse(Path(attention_processors.__file__).read_text("utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    lazy = [name for name in names if type(importlib.import_module(name)).__name__ == "_LazyModule"]
    assert lazy == []
