"""What painting takes at full size, counted on the meta device: each tensor that is alive, weights apart."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from anygpu.paint.networks import vae
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.multiview import StreamInputs
from anygpu.paint.networks.pbr import MATERIALS
from anygpu.paint.networks.published import networks_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, set_attention
from torch.utils._python_dispatch import TorchDispatchMode

GIBIBYTE = 1024**3
HALF = Dtypes(torch.float16, torch.float16)
SAFE = Dtypes(torch.float16, torch.float32)
STABLE_DIFFUSION_VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2,
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "norm_num_groups": 32, "act_fn": "silu",
}  # fmt: skip


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operators made and that still live."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return result

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def fused(query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor) -> torch.Tensor:
    """An attention that needs nothing beside its result, as a fused kernel."""
    return torch.empty_like(query)


def stages(
    kind: str, pixels: int, views: int, dtypes: Dtypes, rows: int = 2, attention: Callable[..., Any] = fused
) -> dict[str, tuple[int, int]]:
    """Stage -> (bytes at its peak beside the weights, bytes of its weights), at full size.

    What one stage leaves on the device for the next, the kept reference tokens, counts in both.
    """
    side, materials = pixels // 8, MATERIALS if kind == "paint_pbr" else 1
    found = {}
    with torch.device("meta"), torch.no_grad():
        made = networks_for(kind, STABLE_DIFFUSION_2, dtypes)
        made["vae"] = vae.autoencoder(STABLE_DIFFUSION_VAE)
        for network in made.values():
            for parameter in network.parameters():
                parameter.data = parameter.data.to(dtypes.compute)
            set_attention(network, attention)
        vae.set_vae_attention(made["vae"], attention)

        def counted(name: str, part: str, act: Callable[[], Any], left: int = 0) -> Any:
            weights = list(made[part].parameters())
            with Alive(weights) as alive:
                result = act()
            found[name] = (alive.peak + left, sum(weight.nbytes for weight in weights))
            return result

        picture, latent = torch.empty(1, 3, pixels, pixels), torch.empty(1, 4, side, side)
        counted("encode a picture", "vae", lambda: made["vae"].encode(picture.to(dtypes.compute)).latent_dist.mean)
        left, step = 0, torch.empty(1)
        if kind != "delight":
            kept = counted("look at the reference", "reference", lambda: made["reference"](latent[None]))
            left = sum(tensor.nbytes for tensor in kept.values())
            run = StreamInputs(views, kept, (0.0, 1.0)[-rows:], materials=materials)
            sample, maps = (rows, views, 4, side, side), torch.empty(1, views, 8, side, side)
        if kind == "delight":
            given = (torch.empty(rows, 8, side, side), step, torch.empty(rows, 77, 1024))
        elif kind == "paint":
            given = (torch.empty(sample), step, maps, torch.zeros(views, dtype=torch.long), run)
        else:
            given = (torch.empty(rows, 2, *sample[1:]), step, maps, torch.empty(rows, 257, 1536), run)
        counted("a step", "unet", lambda: made["unet"](*given), left)
        counted("decode a view", "vae", lambda: made["vae"].decode(latent.to(dtypes.compute))[0])
    return found
