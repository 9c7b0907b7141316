"""Every shipped workflow through a real ComfyUI on tiny checkpoints, with the videos kept: ``python demo.py [FOLDER]``.

What the tiny checkpoints paint is noise; that it arrives, and in which size, length and rate, is what is shown.
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the folder of the package `host`, as pytest has it

from host import lora_files, videos  # noqa: E402
from host.client import Client  # noqa: E402
from host.prompts import filmed, replay, shrunk  # noqa: E402
from host.server import ROOT, NoHost, Server, find_host, tiny_home  # noqa: E402

WIDTH, HEIGHT, FRAMES = 192, 128, 25
ROW = "| {} | {} | {} | {} | {} |\n"


def keep_results(server: Server, kept: Path) -> list[str]:
    """The rows of the report, after running every workflow; failures are rows too."""
    server.every_model()
    client, rows = Client(server.url), []
    for workflow in filmed():
        prompt = shrunk(replay(workflow), WIDTH, HEIGHT, FRAMES)
        lora_files.install(server, prompt)
        run = client.run(prompt)
        name = workflow.stem
        if run.ending != "execution_success":
            rows.append(ROW.format(name, "failed", run.message, "", f"{run.seconds:.1f} s"))
        else:
            (record,) = run.files()
            target = kept / f"{name}{Path(record['filename']).suffix}"
            shutil.copyfile(server.output(record), target)
            found = videos.facts(target)
            size = f"{found.width}x{found.height}"
            rows.append(ROW.format(name, size, found.frames, f"{float(found.fps):g} fps", f"{run.seconds:.1f} s"))
        print(rows[-1].strip(), flush=True)
    return rows


def main() -> int:
    """0 when every workflow ran, or when there is no host; 1 when one failed."""
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "demo" / "comfyui"
    try:
        host = find_host()
    except NoHost as reason:
        print(f"skipped: {reason}")
        return 0
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="anygpu-host-") as folder:
        server = Server(host, Path(folder), tiny_home())
        try:
            server.start()
            print(f"ComfyUI answers after {server.start_seconds:.1f} s", flush=True)
            rows = keep_results(server, kept)
            shutil.copyfile(server.base / "server.log", kept / "server.log")
        finally:
            server.stop()
    head = ROW.format("workflow", "size", "frames", "rate", "time") + ROW.format(*["---"] * 5)
    report = f"# Shipped workflows through ComfyUI, on tiny checkpoints\n\n{head}{''.join(rows)}"
    (kept / "report.md").write_text(report, encoding="utf-8")
    print(f"{len(rows)} workflows; videos and report.md are in {kept}")
    return 1 if any("| failed |" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
