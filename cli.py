"""The command `anygpu`, which works without ComfyUI: reports what this machine can do, renders clips, runs the demo."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as `python path/to/pack/cli.py`: load the folder as the package it is
    import importlib.util

    _folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _folder]
    _spec = importlib.util.spec_from_file_location(
        "anygpu", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules["anygpu"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["anygpu"])
    __package__ = "anygpu"

from .compat.durable import require_writable
from .compat.errors import InputError, PackError, parts_of, require_choice

if TYPE_CHECKING:
    from .compat.memory.parts import ProgressStage
    from .pipelines.jobs import Rendered
    from .pipelines.records.places import Machine

STATE, BAR = "~/.cache/anygpu", "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
JOB_BYTES = 1_000_000
ANYWHERE = frozenset(  # flags of a render that say where it runs and what becomes of it, not what it is
    ("command", "run", "job", "save_job", "output", "state", "device", "search", "profile", "repair", "recover", "plan")
)
OUTPUT_BYTES = 100_000_000  # that must be free before hours of work; a minute of 720p takes less
REPAIR = (
    "watch every step: offer stops at a fault and says what helps; keep goes on with what helps, in later runs too; "
    "forget drops what was kept for this model"
)
SAMPLING = ("frames", "steps", "seed", "fps", "guidance", "cfg", "shift", "scheduler", "denoise")  # flags


class Printed:
    """Progress as tqdm's bar, which is silent where stderr is not a terminal; a cancel is Ctrl+C."""

    def __init__(self) -> None:
        self._bar: Any = None
        self.time_left: dict[str, Any] = {}  # by stage: another may come in between, such as bytes that move
        self._stage = ""

    def step(self, done: int, total: int, stage: ProgressStage, preview: Callable[[], Any] | None = None) -> None:
        """Show ``done`` of ``total`` steps and the time left; a new stage replaces the bar. No ``preview`` is shown."""
        from tqdm import tqdm

        from .compat.memory.parts import PACED
        from .compat.memory.statistics import TimeLeft

        if self._bar is None or stage.name != self._stage:
            self.close(leave=False)
            self._bar, self._stage = tqdm(total=total, disable=None, bar_format=BAR), stage.name
        left = ""  # none for a stage that counts bytes: thousands of steps, and its text says how far it is
        if not stage.counted or stage.name in PACED:
            left = self.time_left.setdefault(stage.name, TimeLeft()).after(time.monotonic(), done, total)
        self._bar.total = total
        self._bar.set_description(str(stage), refresh=False)
        self._bar.set_postfix_str(left.removeprefix(", "), refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self, leave: bool = True) -> None:
        if self._bar is not None:
            self._bar.leave = leave  # on the terminal
            self._bar.close()
        self._bar = None

    def check(self) -> None:
        """Nothing: Ctrl+C raises by itself."""

    def notify(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)


def report(arguments: argparse.Namespace) -> int:
    """Print one report and return its exit code: the first that a flag asks for, else what AnyGPU chooses here."""
    from .pipelines.report import hardware_report

    parts = ((arguments.kernels, _kernels), (arguments.memory, _memory), (arguments.share is not None, _share))
    for asked, part in parts:
        if asked:
            return part(arguments)
    print(hardware_report(arguments.device, Path(arguments.state).expanduser(), arguments.again).text())
    return 0


def _share(arguments: argparse.Namespace) -> int:
    """Print the file that describes this machine for our tables; write it to ``--share``, on a terminal after a yes."""
    from .compat.durable import write_file
    from .pipelines.records.machines import HINT, this_machine
    from .pipelines.report import precisions

    path = Path(arguments.share)
    require_writable(path, JOB_BYTES, "--share")
    text = this_machine(arguments.device, Path(arguments.state).expanduser(), precisions()).text()
    print(text)
    if sys.stdin.isatty() and input(f"Write this to {path}? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was written")
        return 0
    print(f"{write_file(path, text)}: {HINT}")
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    """Print where families use fused kernels, and test each kernel on the device; 1 if one is wrong."""
    import torch

    from .compat.device.facts import facts_for
    from .compat.transforms import fused
    from .pipelines.registry import FAMILIES
    from .pipelines.speed import form_for

    facts = facts_for(arguments.device)
    _, decision = form_for(fused.AUTO, facts.device, torch.bfloat16)
    print(f"{facts}: {decision}")
    for family in FAMILIES.values():
        points = fused.published_fusion_points(family.rewrites.published_blocks)
        kinds = ", ".join(f"{count} {kind}" for kind, count in points.items())
        line = f"{family.id}: {sum(points.values())} fusion points in the published transformer: {kinds}"
        print(f"{line}; {family.rewrites.published_vae_fusion_points} in the VAE's decoder")
    failed = False
    for test in fused.self_tests(facts.device):
        print(test, flush=True)
        failed |= not test.right
    return int(failed)


def prove(arguments: argparse.Namespace) -> int:
    """Measure the device into ``--output``; 0 also where something is wrong with it, which the file says."""
    from .pipelines.stacks import prove as measure

    output = Path(arguments.output)
    require_writable(output, JOB_BYTES, "--output")
    measure(arguments.device, Path(arguments.state).expanduser(), output, print, tiny=arguments.tiny)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Print the result of each check of the device; 1 if something fails that AnyGPU would use."""
    from .compat.check import exit_code
    from .pipelines.report import hardware_check

    results = []
    for one in hardware_check(arguments.device, Path(arguments.state).expanduser()):
        results.append(one)
        print(one, flush=True)
    failed = exit_code(results)
    print(f"{len(results)} checks, {'something' if failed else 'nothing'} fails that would be used")
    return failed


def render(arguments: argparse.Namespace) -> int:
    """Render a clip to ``--output``; with ``--save-job`` or ``--plan`` only write its job, or print its forecast."""
    if arguments.save_job is not None:
        return _save_job(arguments)
    if arguments.plan:
        return _plan(arguments)
    progress, output, started = Printed(), Path(arguments.output), time.monotonic()
    require_writable(output, OUTPUT_BYTES, "--output")
    require_choice("--output", output.suffix.lower(), (".mp4", ".m4v"), "Name an MP4, such as fox.mp4.")
    made = rendered(arguments, progress)
    size = "{2}x{1}, {0} frames".format(*made.frames.shape)
    print(f"{made.write(output)}: {size} at {made.latents.fps:g} fps, {time.monotonic() - started:.1f} s")
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Write the transformer, packed as ``--weights`` says, as a file that ComfyUI reads, and print its path."""
    from .compat.checkpoints.latents import written
    from .compat.checkpoints.packed import as_in_files
    from .pipelines.load.folder import LoadRequest, load

    require_writable(arguments.output, OUTPUT_BYTES, "--output")
    asked = {name: getattr(arguments, name) for name in ("base", "image_encoder", "search", "weights")}
    pipeline = load(LoadRequest(arguments.model, device="cpu", precision="bf16", **asked))
    print(written(arguments.output, as_in_files(pipeline.parts["transformer"]), {"format": "pt"}))
    return 0


def _save_job(arguments: argparse.Namespace) -> int:
    from .pipelines.records.job import write_job

    path = Path(arguments.save_job)
    require_writable(path, JOB_BYTES, "--save-job")
    job = _job(arguments, _machine(arguments).places)
    print(f"{write_job(path, job)}: job {job.key[:16]}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """Print the memory and time that the run would take in each offload mode; no weights are read and nothing runs."""
    from .pipelines import jobs
    from .pipelines.forecast.page import memory_plan

    machine = _machine(arguments)
    job = _job(arguments, machine.places)
    pipeline = jobs.load_pipeline(job, machine, Printed(), jobs.request_of(job, machine))
    pipeline = replace(pipeline, run=replace(pipeline.run, decode=job.decode))
    texts = job.prompt if pipeline.spec.recipes.sections else None  # every section's text is encoded
    print(memory_plan(pipeline, *jobs.planned_size(job, machine, pipeline), texts)[0])
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Render while the doctor watches; print the fault and return 1 if it finds one, or if the video has one colour.
    ``--plan`` and ``--save-job`` do as in :func:`render`, without the doctor."""
    from .compat.output_check import COLOUR, NotFinite, is_flat

    if arguments.plan or arguments.save_job is not None:
        return render(arguments)
    try:
        frames = rendered(arguments, Printed()).frames
    except NotFinite as error:
        print(error)
        return 1
    flat = is_flat(frames.movedim(-1, 0)[None])
    print(f"{COLOUR if flat else 'no fault'} in {frames.shape[0]} frames of {frames.shape[2]}x{frames.shape[1]}")
    return int(flat)


def _doctor_of(arguments: argparse.Namespace, model: Path, progress: Any) -> Any:
    """The doctor of a run with the repairs kept for ``model``, which are printed; None without ``--repair``."""
    from .compat.doctor import KEEP, Doctor
    from .compat.repairs import RepairStore

    if arguments.repair is None:
        return None
    store = RepairStore(Path(arguments.state).expanduser())
    watch = Doctor(str(model.resolve()), store, arguments.repair, progress.notify)
    watch.instead, watch.keep = "add --precision fp16-safe or fp32", f"Run again with --repair {KEEP}"
    for repair in watch.repairs:
        progress.notify(f"kept: {repair}")
    return watch


def rendered(arguments: argparse.Namespace, progress: Any) -> Rendered:
    """The video that ``render`` asks for, by the nodes' own functions; ``--recover`` decodes kept latents instead."""
    import torch

    from .pipelines import jobs, stages
    from .pipelines.latents import convert, recovery

    machine = _machine(arguments)
    job = _job(arguments, machine.places)
    request = jobs.request_of(job, machine)
    if machine.trace is not None:
        require_writable(machine.trace, OUTPUT_BYTES, "--profile")
    with torch.no_grad(), request.speed.traced():
        pipeline = jobs.load_pipeline(job, machine, progress, request)
        pipeline = replace(pipeline, run=replace(pipeline.run, doctor=_doctor_of(arguments, request.model, progress)))
        for decision in pipeline.plan.decisions:
            progress.notify(str(decision))
        if arguments.recover is None:
            return jobs.run(job, machine, progress, pipeline)
        saved = recovery.load(machine.state / "kept", arguments.recover, progress.notify, pipeline.family)
        latents, folders = convert.from_core(pipeline, saved, progress.notify), machine.places.models
        latents = stages.with_decode_noise(pipeline, latents, job.decode_timestep, job.decode_noise_scale, progress)
        return jobs.Rendered(jobs.decoded(pipeline, latents, progress, job.decode, folders), latents, job.decode)


def replay(arguments: argparse.Namespace) -> int:
    """Render the video or texture of a file again, from its receipt, and write it; 1 if it is known to differ."""
    from .paint.choices import MODELS
    from .paint.jobs import replay as painted_again
    from .pipelines.jobs import replay as filmed_again

    path = Path(arguments.job)
    ending, again = (".glb", painted_again) if path.suffix.lower() == ".glb" else (".mp4", filmed_again)
    output = Path(arguments.output or path.with_name(f"{path.stem}.replay{ending}"))
    require_writable(output, OUTPUT_BYTES, "--output")
    made = again(path, _machine(arguments, (MODELS,), tuple(map(Path, arguments.search))), Printed())
    print(f"{made.rendered.write(output)}: {made.text()}")
    return 1 if made.same is False else 0


def _machine(arguments: argparse.Namespace, models: tuple[Path, ...] = (), files: tuple[Path, ...] = ()) -> Machine:
    """This machine as the flags describe it; ``models`` and ``files`` are searched after the folders of the flags."""
    from .compat.device.facts import accelerators, default_device, free_bytes
    from .pipelines.pipeline import DEMOS
    from .pipelines.records.places import Machine, Places

    state = Path(arguments.state).expanduser()
    beside_job = [Path(arguments.job).parent] if arguments.job else []
    devices = accelerators(default_device()) if arguments.device is None else ()
    cards = {device: free_bytes(device) for device in devices} if len(devices) > 1 else {}
    trace = None if arguments.profile is None else Path(arguments.profile)
    places = Places((*map(Path, arguments.search), DEMOS, *models), (*beside_job, Path(), *files), state=state)
    return Machine(places=places, state=state, device=arguments.device, trace=trace, cards=cards)


def _job(arguments: argparse.Namespace, places: Any) -> Any:
    """The job of ``--job``'s file, else of the other flags; InputError for both, no model, or a missing prompt."""
    from .compat.decision import AUTO
    from .pipelines.base import FramePackSettings, PromptRequest, SampleSettings
    from .pipelines.demo import demo_folder
    from .pipelines.files.models import family_of_folder
    from .pipelines.load import lora
    from .pipelines.records import job as job_format
    from .pipelines.vae.plan import DecodeRequest

    if arguments.job is not None:
        defaults = vars(_parser(True).parse_args([arguments.command]))
        given = [name for name, value in vars(arguments).items() if name not in ANYWHERE and value != defaults[name]]
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise InputError(f"{flag} beside --job", expected="one of the two", fix="Change the value in the job file.")
        return job_format.read_job(Path(arguments.job))
    if arguments.model is None:
        raise InputError("no --model", expected="a model folder, or --job FILE", fix="Add --model FOLDER.")
    if arguments.prompt is None and arguments.recover is None and not arguments.plan:
        raise InputError("no --prompt", expected="a text, or --recover", fix="Add --prompt TEXT.")
    model = demo_folder(arguments.model) or Path(arguments.model)
    family = family_of_folder(model) if model.is_dir() else None
    pictures = [(path, frame) for path, frame in ((arguments.image, 0), (arguments.end_image, -1)) if path is not None]
    loras = [lora.named(text) for text in arguments.lora]
    timed = arguments.seconds or (family is not None and family.recipes.sections)
    providers = {name: getattr(arguments, name) for name in ("base", "image_encoder")}
    return job_format.VideoJob(
        model=places.content(model),
        family="" if family is None else family.id,
        prompt=PromptRequest(arguments.prompt or "", arguments.negative, sections=tuple(arguments.section_prompt)),
        settings=SampleSettings(**{name: getattr(arguments, name) for name in ("width", "height", *SAMPLING)}),
        load=job_format.load_inputs(vars(arguments)),
        loras=tuple(job_format.Adapter(places.content(path), strength, blocks) for path, strength, blocks in loras),
        step_cache=job_format.Caching(arguments.step_cache),
        pictures=tuple(job_format.Picture(places.picture(Path(path)), frame) for path, frame in pictures),
        fit=arguments.fit,
        video=None if arguments.video is None else places.picture(Path(arguments.video)),
        framepack=FramePackSettings(arguments.seconds or 5.0, arguments.window) if timed else None,
        decode=DecodeRequest(arguments.decode),
        **{name: places.content(Path(path)) for name, path in providers.items() if path not in (None, AUTO)},
    )


def demo(arguments: argparse.Namespace) -> int:
    """Draw each demo clip and painted mesh into ``--output``, with a report of its checks; 1 if one fails."""
    from .paint import demo as paint_demo
    from .paint.choices import demo_adapter, demo_paint_models
    from .pipelines.demo import demo_models, drawing

    folder = Path(arguments.output)
    require_writable(folder / "report.md", OUTPUT_BYTES, "--output")
    clips = (drawing.exhibit(title, path, number, folder) for number, (title, path) in enumerate(demo_models().items()))
    painters = {**demo_paint_models(), **demo_adapter()[0]}
    meshes = (drawing.Exhibit(title, *paint_demo.show(path, folder)) for title, path in painters.items())
    return int(drawing.write_page(chain(clips, meshes), folder, print) > 0)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error that the user can act on is one line on stderr."""
    words = sys.argv[1:] if words is None else words
    return run_command(_parser(bool({"render", "doctor"} & set(words))).parse_args(words), "anygpu", "cancelled")


def run_command(arguments: argparse.Namespace, command: str, interrupted: str) -> int:
    """Run ``arguments.run`` and return its exit code: 2 for an error with a fix, 130 for Ctrl+C, said on stderr."""
    try:
        return int(arguments.run(arguments))
    except (PackError, RuntimeError, MemoryError) as error:
        if not (isinstance(error, PackError) or "fix" in parts_of(str(error))):  # a shortage keeps torch's class
            raise
        print(f"{command}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command}: {interrupted}", file=sys.stderr)
        return 130


def _memory(arguments: argparse.Namespace) -> int:
    """Print the free memory, and the memory and times of the last runs' stages."""
    from .compat.device.facts import facts_for, free_bytes, host_free_bytes
    from .compat.memory.statistics import amount_of, saved_stages

    facts = facts_for(arguments.device)
    free = "unknown" if (count := free_bytes(facts.device)) is None else amount_of(count)
    print(f"{facts}\nfree: {free} on the device, {amount_of(host_free_bytes())} of host memory")
    runs = saved_stages(Path(arguments.state).expanduser())
    for cost in runs:
        forecast = f"; {cost.against_forecast}" if cost.against_forecast else ""
        print(f"{cost.date} {cost.pipeline} on {cost.device}: {cost}{forecast}")
    if not runs:
        print("no runs recorded yet")
    return 0


def _parser(renders: bool) -> argparse.ArgumentParser:
    """The command's parser; ``renders`` adds the flags of ``render`` and ``doctor``, whose choices import torch."""
    parser = argparse.ArgumentParser(prog="anygpu", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    about = commands.add_parser("report", help="show what this machine is and what AnyGPU chooses on it")
    about.add_argument("--kernels", action="store_true", help="run each fused operation against its reference instead")
    about.add_argument("--again", action="store_true", help="run the tests on the device again")
    about.add_argument("--memory", action="store_true", help="show the last runs' peaks, bytes copied and copying time")
    share = "show and write this machine as a small file without names, for our tables; nothing is sent"
    about.add_argument("--share", nargs="?", const="anygpu-machine.json", metavar="FILE", help=share)
    tried = commands.add_parser("check", help="try conversions, loading, Conv3d and attention on the device")
    proving = commands.add_parser("prove", help="measure this device in ten minutes: a file and a picture to share")
    proving.add_argument("--output", default="anygpu-proof.json", help="file to write, or to go on with")
    proving.add_argument("--tiny", action="store_true", help="show only that everything runs, in FILE-tiny")
    rendering = commands.add_parser("render", help="render one clip with your own model")
    watched = commands.add_parser("doctor", help="find out why a model gives black or broken video, and what helps")
    if renders:
        from .compat.doctor import OFFER

        _render_arguments(rendering)
        _render_arguments(watched)
        watched.set_defaults(prompt="a red fox", steps=2, repair=OFFER)
    again = commands.add_parser("replay", help="make the video or texture of a file again from the receipt in it")
    again.add_argument("job", metavar="file", help="a video, latents or a textured GLB that AnyGPU saved")
    again.set_defaults(profile=None)
    again.add_argument("--search", action="append", default=[], help="folder with models, LoRAs, pictures; repeatable")
    again.add_argument("--output", help="default: the file's name with .replay.mp4 or .replay.glb")
    runs = ((about, report), (tried, check), (proving, prove), (rendering, render), (watched, doctor), (again, replay))
    for command, run in runs:
        command.set_defaults(run=run)
        command.add_argument("--device", help="such as cpu, cuda:0, mps; default: the accelerator, else cpu")
        command.add_argument("--state", default=STATE, help=f"folder where test results are saved (default: {STATE})")
    packing = commands.add_parser("pack", help="write a transformer with weights such as int8_convrot")
    for name, kind in (("--model", Path), ("--weights", str), ("--output", Path)):
        packing.add_argument(name, type=kind, required=True)
    for name in ("--base", "--image-encoder"):
        packing.add_argument(name, type=Path, help="FramePack: folder with the parts that it lacks")
    packing.add_argument("--search", type=Path, action="append", default=[], help="folder with such; repeatable")
    packing.set_defaults(run=pack)
    shown = commands.add_parser("demo", help="render and check clips and painted meshes with the models that ship")
    shown.add_argument("--output", default="demo", help="folder to fill (default: demo)")
    shown.set_defaults(run=demo)
    return parser


def _render_arguments(parser: argparse.ArgumentParser) -> None:
    from .compat.doctor import CHOICES as REPAIRS
    from .compat.memory import offloader
    from .compat.transforms import attention, fused, step_cache
    from .compat.transforms import compile as compiling
    from .pipelines.family import FITS, SCHEDULERS
    from .pipelines.requests import PRECISIONS
    from .pipelines.vae.plan import METHODS

    add = parser.add_argument
    add("--model", help="diffusers folder, FramePack transformer folder, or a demo model such as 'demo: LTX-Video'")
    add("--prompt", help="needed, except with --recover and --job")
    add("--job", metavar="FILE", help="render a job file; its models are searched in --search, pictures beside it")
    add("--save-job", metavar="FILE", help="write the job to a file instead of rendering it")
    add("--negative", default="")
    add("--lora", action="append", default=[], metavar="FILE[:STRENGTH[:BLOCKS]]", help="apply a LoRA; may be repeated")
    add("--section-prompt", action="append", default=[], help="FramePack: prompt of a later section; may be repeated")
    add("--output", default="anygpu.mp4")
    add("--plan", action="store_true", help="say what the run needs and how long it takes, and run nothing")
    for name in ("--image", "--end-image", "--video"):
        add(name, help="file")
    for name in ("--width", "--height", "--frames", "--steps", "--seed"):
        add(name, type=int, default=0, help="0: the model's default" if name != "--seed" else "same seed, same video")
    for name, off in (("--fps", ""), ("--cfg", "; 1: off"), ("--guidance", ""), ("--shift", "")):
        add(name, type=float, default=0.0, help=f"0: the model's default{off}")
    add("--seconds", type=float, default=0.0, help="FramePack: length of the video (default: 5)")
    add("--window", type=int, default=9, help="FramePack: latent frames per section")
    add("--denoise", type=float, default=1.0, help="with --video: how much is redrawn; 1, the default, is all")
    add("--fit", choices=FITS, default=FITS[0])
    add("--scheduler", choices=SCHEDULERS, default="auto")
    add("--precision", choices=PRECISIONS, default="auto")
    add("--offload", choices=offloader.CHOICES, default="auto")
    add("--attention", choices=attention.CHOICES, default="auto", help="kernel of the transformer's attention")
    add("--kernels", choices=fused.CHOICES, default="auto", help="fused kernels in the transformer's blocks")
    add("--compile", action="store_true", help="compile the transformer's blocks: slow first run, faster later ones")
    add("--compile-mode", choices=tuple(compiling.MODES), default="default")
    add("--compile-dynamic", choices=tuple(compiling.DYNAMIC), default="text")
    add("--compile-vae", action="store_true", help="with --compile: compile the VAE's blocks too")
    presets = step_cache.PRESET_CHOICES[:-1]
    add("--step-cache", choices=presets, default="off", help="skip work in steps that change little; lossy")
    add("--fp16-accumulation", action="store_true", help="add fp16 products in fp16: faster on GeForce; lossy")
    add("--stored-products", action="store_true", help="multiply 8-bit weights as they are stored; lossy")
    add("--repair", choices=REPAIRS, help=REPAIR)
    add("--profile", metavar="FILE", help="write a torch profiler trace with a range per stage, block and operation")
    add("--decode", choices=METHODS, default="auto", help="how; draft: roughly, by a tiny decoder in --search")
    add("--variant", default="auto")
    add("--base", help="FramePack: HunyuanVideo folder")
    add("--image-encoder", help="FramePack: folder with image_encoder and feature_extractor")
    add("--recover", metavar="NAME", help="decode kept latents, newest or by name, instead of sampling")
    add("--search", action="append", default=[], help="folder to search for missing parts; may be repeated")


if __name__ == "__main__":
    sys.exit(main())
