"""Ray on paper: actors are objects of this process, and its clock goes on when the driver waits."""

from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """As Ray's."""


class RayActorError(RayError):
    """As Ray's: the process of a call is gone."""


class OutOfMemoryError(RayError):
    """As Ray's: its memory monitor ended the process of a call."""


class Died(BaseException):
    """Raised by a renderer whose process ends."""


class Paper:
    """What a driver and a group use of Ray. A call is answered as soon as it is made; to wait takes 0.1 s."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, OutOfMemoryError=OutOfMemoryError)

    def __init__(self, **resources: float) -> None:
        self.now, self.resources, self.actors, self.kills = 0.0, resources, 0, 0
        self.token, self.cannot_start = True, False  # or the error with which a process answers instead

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, cls: type) -> Any:
        def options(**_given: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: Actor(self, cls(*given)))

        return SimpleNamespace(options=options)

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        ready = [call for call in calls if call.answered][:num_returns]
        self.now += 0.1 if ready else timeout
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Any, timeout: float = 0.0) -> Any:
        if isinstance(call, list):
            return [self.get(one) for one in call]
        if isinstance(call.answer, BaseException):
            raise call.answer
        return call.answer

    def kill(self, actor: Any, no_restart: bool = True) -> None:
        self.kills += 1


class Actor:
    """An object whose methods are called by ``.remote``."""

    def __init__(self, ray: Paper, worker: Any) -> None:
        self.ray, self.worker = ray, worker
        self.host = f"machine{ray.actors}"
        ray.actors += 1

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            answer: Any = {"host": self.host, "token": self.ray.token}
            if name == "ready" and self.ray.cannot_start:
                answer = self.ray.cannot_start
            elif name != "ready":
                try:
                    answer = getattr(self.worker, name)(*arguments)
                except Died:
                    answer = RayActorError("its process is gone")
            never = name == "ready" and not self.ray.resources
            return Call(answer, not never)

        class Method:
            remote = staticmethod(call)

            @staticmethod
            def options(**_given: Any) -> Any:
                return Method

        return Method


class Call:
    """An answer that is on its way."""

    def __init__(self, answer: Any, answered: bool) -> None:
        self.answer, self.answered = answer, answered
