"""Facts about devices nobody here owns, from what torch would say of them."""

import ast
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.device import facts as device
from anygpu.compat.device import wheels
from anygpu.compat.device.execution import held
from anygpu.compat.device.facts import default_device, facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.memory.offloader import OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import offloader_for
from test_layers import SOURCES, nodes_of

CPU = facts_for("cpu")
GIBIBYTE = 1024**3


@pytest.fixture
def parsed(monkeypatch):
    """`facts_for` believes that every device answers."""
    monkeypatch.setattr(device, "_parsed", torch.device)


def nvidia(monkeypatch, major, minor, name="a card", arches=("sm_75", "sm_90"), hip=None, **more):
    properties = SimpleNamespace(name=name, major=major, minor=minor, total_memory=8 * GIBIBYTE, **more)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(arches))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3_005_001 if hip else 91_900)


@pytest.mark.parametrize(
    ("capability", "arch_class", "emulated"),
    [
        ((6, 1), "cuda-old", ("bf16",)),
        ((7, 5), "cuda-old", ("bf16",)),
        ((8, 0), "cuda-sm80+", ()),
        ((12, 0), "cuda-sm80+", ()),
    ],
)
def test_nvidia_by_its_capability_and_not_by_what_torch_can_emulate(
    monkeypatch, parsed, capability, arch_class, emulated
):
    nvidia(monkeypatch, *capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    facts = facts_for("cuda:0")
    assert (facts.backend, facts.arch_class, facts.emulated) == ("cuda", arch_class, emulated)
    assert facts.arch == f"sm{capability[0]}{capability[1]}"
    assert facts.versions["cudnn"] == "9.19.0"
    assert facts.versions["cuda"] == "12.8"


def test_radeon(monkeypatch, parsed):
    nvidia(
        monkeypatch,
        11,
        5,
        "AMD Radeon 8060S",
        ("gfx1151",),
        "7.2.1",
        gcnArchName="gfx1151:sramecc-:xnack-",
        is_integrated=1,
    )
    facts = facts_for("cuda:0")
    assert (facts.backend, facts.arch, facts.arch_class, facts.unified) == ("rocm", "gfx1151", "rocm", True)
    assert facts.compiled == ("gfx1151",)
    assert (facts.versions["rocm"], facts.versions["miopen"]) == ("7.2.1", "3.5.1")
    assert "shared with the host" in str(facts)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1 / 0)  # as beside another MIOpen than torch's
    assert facts_for("cuda:0").arch == "gfx1151"


def test_a_radeon_beside_a_geforce_has_its_own_driver(monkeypatch, tmp_path):
    for name in ("nvidia", "amdgpu"):
        (tmp_path / name).write_text(f"{name}'s\n")
    monkeypatch.setattr(device, "KERNEL_FILES", {"cuda": tmp_path / "nvidia", "rocm": tmp_path / "amdgpu"})
    assert [device._driver(backend) for backend in ("cuda", "rocm")] == ["nvidia's", "amdgpu's"]


def test_mps_and_xpu(monkeypatch, parsed):
    assert (facts_for("mps").backend, facts_for("mps").unified) == ("mps", True)
    properties = SimpleNamespace(
        name="Intel Arc A770", total_memory=16 * GIBIBYTE, has_fp64=False, driver_version="1.6"
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    facts = facts_for("xpu:0")
    assert (facts.backend, facts.driver, facts.emulated) == ("xpu", "1.6", ("fp64",)) and not facts.unified
    for name in ("Intel(R) Arc(TM) Graphics", "Intel(R) Arc(TM) 140V GPU (16GB)", "Intel(R) Graphics"):
        properties.name = name
        assert facts_for("xpu:0").unified
    properties.name = "Intel(R) Arc(TM) B580 Graphics"
    assert not facts_for("xpu:0").unified
    properties.is_integrated_gpu = True
    assert facts_for("xpu:0").unified


def test_tenstorrent_behind_xla(monkeypatch, parsed):
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(device_type=lambda: "TT"))
    memory = SimpleNamespace(get_memory_info=lambda _: {"bytes_limit": 12 * GIBIBYTE})
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", memory)
    facts = facts_for("xla:0")
    assert (facts.backend, facts.arch, facts.arch_class) == ("xla", "TT", "xla")
    assert facts.total_bytes == 12 * GIBIBYTE
    monkeypatch.setattr(memory, "get_memory_info", lambda _: [][0])  # as SPMD has none
    facts = facts_for("xla:0")
    assert (facts.arch, facts.arch_class, facts.total_bytes) == ("TT", "xla", 0)


def test_any_other_plug_in(parsed):
    npu = SimpleNamespace(type="npu", index=0)
    plug_in = device._plain(device._plug_in_facts(npu), npu)
    assert (plug_in["backend"], plug_in["arch_class"], plug_in["name"]) == ("npu", "other", "npu device")


def test_mps_is_bare_for_comfyui_and_has_its_index_where_tensors_are_compared(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *_size, device: SimpleNamespace(device=torch.device("mps", 0)))
    bare, full = torch.device("mps"), torch.device("mps", 0)
    assert facts_for("mps").device == bare != full
    offloader, _ = offloader_for("model", Parts({}), bare, {}, options=OffloadOptions({"vae": bare}))
    assert offloader.device == offloader.device_of("vae") == full

    def hosted(_parts, device, options):
        return SimpleNamespace(device=device, mode="comfyui", options=options)

    given, decision = offloader_for("auto", Parts({}), bare, {}, hosted=hosted)
    assert given.device == bare and (decision.verdict, decision.source) == ("comfyui on mps", "auto")


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_device_that_is_meant_is_waited_for(monkeypatch, kind):
    waited, chosen = [], torch.device(kind, 1)
    monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda *given: waited.append(given))
    device.synchronize(chosen)
    assert waited == [() if kind == "mps" else (chosen,)]


@pytest.mark.parametrize(("kind", "asked"), [("cuda", [True]), ("mps", []), ("npu", []), (None, [])])
def test_locked_memory_is_given_back_where_torch_can(monkeypatch, kind, asked):
    current, given = None if kind is None else SimpleNamespace(type=kind), []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_named: current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given.append(True), raising=False)
    device.empty_host_cache()
    assert given == asked


def test_facts_that_were_gathered_are_kept():
    facts = replace(CPU, name="another")
    assert facts_for(facts) is facts


def test_without_an_accelerator_the_default_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")


def _wants(arch, compiled, backend="cuda"):
    return replace(CPU, backend=backend, arch=arch, compiled=tuple(compiled), name="a card")


@pytest.mark.parametrize(
    ("arch", "compiled", "covered"),
    [
        ("sm75", ("sm_75", "sm_80"), True), ("sm61", ("sm_75", "sm_80"), False), ("sm86", ("sm_80",), True),
        ("sm89", ("sm_80", "sm_90"), True), ("sm120", ("sm_80", "sm_90"), False),
        ("sm120", ("sm_90", "compute_90"), True),
        ("sm100", ("sm_90a",), False), ("sm90", ("sm_90a",), True), ("sm70", ("sm_75", "compute_120"), False),
        ("sm61", (), True),
    ],
)  # fmt: skip
def test_which_cards_a_build_covers(arch, compiled, covered):
    assert wheels.has_kernels(_wants(arch, compiled)) is covered


def test_which_radeons_a_build_covers():
    assert wheels.has_kernels(_wants("gfx1151", ("gfx1100", "gfx1151"), "rocm"))
    assert wheels.has_kernels(_wants("gfx1101", ("gfx11-generic",), "rocm"))
    assert not wheels.has_kernels(_wants("gfx1151", ("gfx1100", "gfx90a"), "rocm"))
    for generic, archs, others in (  # LLVM's and, in its tests, HIP's own map; none covers all that its name begins
        (
            "gfx9",
            ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
            ("gfx908", "gfx90a", "gfx942", "gfx950"),
        ),
        ("gfx9-4", ("gfx940", "gfx941", "gfx942", "gfx950"), ("gfx90a", "gfx900")),
        ("gfx10-1", ("gfx1010", "gfx1011", "gfx1012", "gfx1013"), ("gfx1030", "gfx1100")),
        ("gfx10-3", tuple(f"gfx103{last}" for last in range(7)), ("gfx1010",)),
        ("gfx11", ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151"), ("gfx1170", "gfx1201")),
        ("gfx12", ("gfx1200", "gfx1201"), ("gfx1250",)),
    ):
        covered = [arch for arch in archs + others if wheels.has_kernels(_wants(arch, (f"{generic}-generic",), "rocm"))]
        assert covered == [*archs]


def test_a_cpu_has_no_more_room_than_its_control_group_leaves(tmp_path, monkeypatch):
    for name, text in (("max", 2 << 30), ("used", 2 << 30), ("group", "0::/\n")):
        (tmp_path / name).write_text(str(text))
    monkeypatch.setattr(device, "OWN_CGROUPS", str(tmp_path / "group"))
    monkeypatch.setattr(device, "CGROUPS", (("", str(tmp_path), "max", "used"),))
    assert device.free_bytes(torch.device("cpu")) == device.host_free_bytes() == 0


@pytest.mark.parametrize(
    ("arch", "backend", "index"),
    [
        ("sm61", "cuda", "/cu126"), ("sm70", "cuda", "/cu126"), ("sm75", "cuda", "/cu130"),
        ("gfx1151", "rocm", "/gfx1151/"),
        ("gfx1100", "rocm", "/gfx110X-all/"), ("gfx1201", "rocm", "/gfx120X-all/"), ("gfx942", "rocm", "/rocm7.2"),
        ("", "xpu", "/xpu"), ("", "mps", ""),
    ],
)  # fmt: skip
def test_each_device_is_named_its_index(arch, backend, index):
    assert wheels.wheel_index(_wants(arch, (), backend))[0].endswith(index)


def test_a_build_without_this_card_is_one_line_with_the_index():
    fault = "CUDA error: no kernel image is available for execution on the device"
    text = str(wheels.unusable_device(_wants("sm61", ("sm_75",)), fault))
    assert re.search(r"no kernels for a card \(sm61\).*sm_75.*whl/cu126", text) and "\n" not in text


def test_the_command_for_cards_that_newer_builds_leave_names_the_last_torch():
    for arch, bounded in (("sm52", True), ("sm61", True), ("sm70", True), ("sm75", False), ("sm120", False)):
        command = wheels.install(wheels.wheel_index(_wants(arch, ()))[0])
        assert ('"torch<2.15"' in command) is bounded, arch


def test_memory_is_given_back_after_the_work(monkeypatch):
    done = []
    monkeypatch.setattr(device, "synchronize", lambda _device: done.append("waited"))
    monkeypatch.setattr(torch.xpu, "empty_cache", lambda: done.append("emptied"))
    device.empty_cache(torch.device("xpu"))
    assert done == ["waited", "emptied"]


def test_a_device_that_has_gone_is_one_line():
    text = str(wheels.unusable_device(_wants("sm90", ("sm_90",)), "CUDA error: device-side assert triggered"))
    assert re.search(r"has stopped answering .*device-side assert", text)


def test_torch_s_flags_are_read():
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = not before
        assert device.flags()["cudnn.benchmark"] is not before
    finally:
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.backends.cudnn, "enabled"), (torch.backends.cuda.matmul, "allow_fp16_accumulation")]
)
def test_a_store_that_is_opened_during_a_run_has_the_answers_of_before(tmp_path, owner, name):
    """The tab and a forecast open one while a decode has cuDNN off, or sampling sums in fp16."""
    before = ProbeStore(CPU, tmp_path).path
    with held(owner, name, not getattr(owner, name)):
        assert ProbeStore(CPU, tmp_path).path == before
    lasting = getattr(owner, name)
    setattr(owner, name, not lasting)  # as by another pack, or a flag of ComfyUI's
    try:
        assert ProbeStore(CPU, tmp_path).path != before
    finally:
        setattr(owner, name, lasting)


def _banned(nodes):
    """(line, what) of each `is_bf16_supported` and each `torch.cuda`, however it is imported."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == "is_bf16_supported":
            found.append((node.lineno, "is_bf16_supported"))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", "") or ""
            if (
                any(n.startswith("torch.cuda") for n in names)
                or module.startswith("torch.cuda")
                or (module == "torch" and "cuda" in names)
            ):
                found.append((node.lineno, "import torch.cuda"))
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            found.append((node.lineno, "torch.cuda"))
    return found


def test_the_search_for_banned_calls_finds_them():
    source = "import torch\nfrom torch import cuda\ntorch.cuda.is_bf16_supported()\nimport torch.cuda\n"
    assert len(_banned(ast.walk(ast.parse(source)))) == 4


def test_no_file_believes_is_bf16_supported_and_only_device_asks_cuda():
    for source in SOURCES:
        found = _banned(nodes_of(source))
        if source == "compat/device/facts.py":
            found = [entry for entry in found if entry[1] == "is_bf16_supported"]
        assert not found, f"{source}: {found}"


def test_the_link_of_a_card_is_its_slot_s_width_at_its_own_highest_speed(tmp_path, monkeypatch):
    folder = tmp_path / "port" / "0000:41:00.0"
    folder.mkdir(parents=True)
    (tmp_path / folder.name).symlink_to(folder)
    for name, text in (("max_link_speed", "16.0 GT/s PCIe\n"), ("current_link_speed", "2.5 GT/s PCIe\n")):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "current_link_width").write_text("8\n", encoding="utf-8")
    monkeypatch.setattr(device, "PCI", str(tmp_path))
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    assert device._pcie(card) == pytest.approx(15.75e9, rel=1e-3)
    (folder.parent / "max_link_speed").write_text("8.0 GT/s PCIe\n", encoding="utf-8")
    assert device._pcie(card) == pytest.approx(7.88e9, rel=1e-3), "a slot of an older board"
    (folder / "max_link_speed").write_text("5.0 GT/s PCIe\n", encoding="utf-8")
    assert device._pcie(card) == pytest.approx(4e9), "a byte is ten bits below 8 GT/s"
    with pytest.raises(FileNotFoundError):
        device._pcie(SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0))


def test_units_and_clocks_are_known_where_torch_states_all_of_them(monkeypatch, parsed):
    stated = {"multi_processor_count": 114, "clock_rate": 2_520_000, "memory_clock_rate": 10_501_000}
    nvidia(monkeypatch, 8, 9, **stated)
    assert facts_for("cuda:0").clocks == () and facts_for("cuda:0").link == 0.0
    nvidia(monkeypatch, 8, 9, **stated, memory_bus_width=384)
    assert facts_for("cuda:0").clocks == (114, 2_520_000, 10_501_000, 384)
