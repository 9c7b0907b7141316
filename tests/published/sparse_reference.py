"""Writes what Tencent's sparse attention makes of random tokens to
`tests/fixtures/published/sparse_attention.safetensors`.

    python tests/published/sparse_reference.py CLONE_OF_HUNYUANVIDEO_1.5

Its own ``ssta_3d_attention`` is run with the settings of its transformer; in the place of its kernel for Hopper, which
takes a mask of blocks, stands torch with that mask in full. Nothing of it is kept but the results.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[1]), sys.argv[1] + "/hyvideo/models/transformers/modules"]

from published import loops  # noqa: E402


def by_blocks(q: Any, k: Any, v: Any, rows: int, columns: int, seen: torch.Tensor) -> torch.Tensor:
    """``flex_block_attn_func``."""
    mask = seen.repeat_interleave(int(rows), -2).repeat_interleave(int(columns), -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def main() -> None:
    sys.modules["flex_block_attn"] = SimpleNamespace(flex_block_attn_func=by_blocks)  # type: ignore[assignment]
    import ssta_attention as upstream

    found = {}
    for grid in loops.SPARSE_GRIDS:
        q, k, v = loops.sparse_tokens(grid)
        around = {"tile_thw": [6, 8, 8], "kernel_thw": [3, 3, 3]}
        if grid[0] == 1:  # as its ``attention.py`` chooses
            around = {"tile_thw": (1, 16, 24), "kernel_thw": [1, 1, 1]}
        result, _ = upstream.ssta_3d_attention(
            q, k, v, grid, topk=32 if 1 < grid[0] <= 31 else 64, text_len=loops.SPARSE_TEXT, sparse_type="ssta",
            lambda_=0.7, text_mask=torch.ones(1, loops.SPARSE_TEXT), mask_share_within_head=0,
            sampling_type="importance", **around,
        )  # fmt: skip
        found["x".join(map(str, grid))] = result[0, :, :: loops.SPARSE_STEP].contiguous()
    about = loops.Loop("Tencent-Hunyuan/HunyuanVideo-1.5", "60783e7", "Tencent Hunyuan Community License", main)
    save_file(found, loops.SPARSE, metadata=about.about("sparse_reference.py CLONE"))


if __name__ == "__main__":
    main()
