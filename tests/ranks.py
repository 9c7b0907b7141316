"""Runs a function of a test module in several processes that form a gloo group: MODULE FUNCTION RANK SIZE FOLDER."""

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 900  # with 4 processes on 2 busy cores; each starts by importing torch and diffusers


def start(module: str, function: str, size: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The processes, one per rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    words = [sys.executable, str(HERE / "ranks.py"), module, function]
    return [
        subprocess.Popen([*words, str(rank), str(size), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in range(size)
    ]


def results(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[Any]:
    """What the function returned on each rank."""
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"rank {rank}: {errors.decode()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(len(processes))]


def main() -> None:
    """One rank."""
    module, function, rank, size, folder = sys.argv[1:]
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/meeting", int(size))
    distributed.init_process_group(
        "gloo", store=store, rank=int(rank), world_size=int(size), timeout=timedelta(seconds=SECONDS)
    )
    called = getattr(importlib.import_module(module), function)
    with torch.no_grad():
        result = called(int(rank), int(size), Path(folder))
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    distributed.barrier()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others wait for this rank in a thread of gloo's
