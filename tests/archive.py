"""The archive that ComfyUI's registry gives out: the files of the repository that ``.comfyignore`` leaves."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listed(*wanted: str) -> set[str]:
    """Files of the repository, new ones too, as git lists them."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}


def unpacked(folder: Path) -> Path:
    """The pack as a user of the registry has it, in the empty folder ``folder``."""
    ignored = listed("-cio", "--exclude-from=.comfyignore")
    for name in listed("-co", "--exclude-standard") - ignored:
        target = folder / "AnyGPU" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    return folder / "AnyGPU"
