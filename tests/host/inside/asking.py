"""The tests' side of the worker: starts it under ComfyUI's interpreter and asks for scenes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from host.inside.worker import ANSWER
from host.server import Host

WORKER = Path(__file__).with_name("worker.py")


class Inside:
    """A ComfyUI without its server, on the simulated accelerator.

    Args:
        host: the checkout and its interpreter. tiny_folder: where tiny checkpoints are built.
    """

    def __init__(self, host: Host, tiny_folder: Path, environment: dict[str, str]) -> None:
        command = [str(host.python), str(WORKER), str(host.root), str(tiny_folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
        )
        self.reason: str = self._answer()

    def play(self, room: str, scene: str, **arguments: Any) -> Any:
        """What the scene ``scene`` of ``host/inside/<room>.py`` returned.

        Raises:
            AssertionError: it failed, with its own traceback.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"room": room, "scene": scene, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the worker."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                if "core_tiny.MissingError: " in answer.get("error", ""):
                    pytest.skip("this ComfyUI has no such class or format")
                assert "error" not in answer, answer["error"]
                return answer["result"]
            sys.stderr.write(line)
        raise AssertionError(f"the worker ended with {self.process.wait()}")
