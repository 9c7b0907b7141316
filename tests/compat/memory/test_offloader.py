"""The protocol of offloaders: both implementations have every member, and nobody asks one with getattr or hasattr."""

import ast
import inspect

import pytest
import torch
from anygpu.compat.memory.offloader import MODES, Offloader, OffloadOptions
from anygpu.compat.memory.parts import PartBytes, Parts
from anygpu.compat.memory.standalone import StandaloneOffloader
from test_layers import tree_of

CPU = torch.device("cpu")


def declared() -> dict[str, object]:
    """Each member of the protocol and what declares it."""
    return {name: value for name, value in vars(Offloader).items() if not name.startswith("_")}


def members_in_source(path: str, name: str) -> dict[str, list[str]]:
    """Each member of a class and the parameters of its methods; of the host's, whose file only ComfyUI can import."""
    body = next(node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    members: dict[str, list[str]] = {}
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.args, *([node.args.vararg] if node.args.vararg else [])]
            members[node.name] = [argument.arg for argument in every]
        for target in (*getattr(node, "targets", ()), getattr(node, "target", None)):
            for leaf in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(leaf, (ast.Name, ast.Attribute)):
                    members.setdefault(leaf.id if isinstance(leaf, ast.Name) else leaf.attr, [])
    return members


def test_every_member_says_what_it_is():
    assert {"mode", "hold", "release", "reduce_memory"} <= declared().keys()
    for name, member in declared().items():
        assert inspect.getdoc(member), name


@pytest.mark.parametrize(
    ("path", "name"),
    [("compat/memory/standalone.py", "StandaloneOffloader"), ("host/memory_manager.py", "ComfyOffloader")],
)
def test_both_offloaders_have_every_member(path: str, name: str) -> None:
    members = members_in_source(path, name)
    for member, declaration in declared().items():
        assert member in members, f"{name} has no {member}"
        if inspect.isfunction(declaration):
            assert members[member] == list(inspect.signature(declaration).parameters), f"{name}.{member}"


def test_what_is_resident_at_the_peak_of_each_mode():
    size = PartBytes(total=100, block=20, layer=5)
    by_mode = {mode: (size.resident(mode, "transformer"), size.resident(mode, "vae")) for mode in MODES}
    assert by_mode == {"none": (100, 100), "model": (100, 100), "group": (20, 5), "sequential": (5, 5)}


@pytest.mark.parametrize("mode", MODES)
def test_an_offloader_with_adapters_shares_all_else(mode: str) -> None:
    """A pipeline with a LoRA, and the one it was made of, are the same on the device."""
    plain = StandaloneOffloader(
        Parts({"vae": lambda _: torch.nn.Linear(2, 2)}), CPU, mode, OffloadOptions({"vae": CPU})
    )
    adapters = object()
    other = plain.with_adapters(adapters)  # type: ignore[arg-type]
    assert (plain.adapters, other.adapters) == (None, adapters)
    assert (other.parts, other.options, other.memory_stats) == (plain.parts, plain.options, plain.memory_stats)
    plain._state.mode = "model"
    assert other.mode == "model"
    with plain.hold("vae"), pytest.raises(Exception, match="while vae is in use"):
        other.switch("group")


@pytest.mark.parametrize("mode", MODES)
def test_a_part_without_weights_runs_in_every_mode(mode: str) -> None:
    offloader = StandaloneOffloader(Parts({"vae": lambda _: torch.nn.Identity()}), torch.device("meta"), mode)
    with offloader.hold("vae", 64) as vae:
        assert vae(torch.ones(2)).sum() == 2
