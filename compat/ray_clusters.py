"""Joining a Ray cluster; a refusal takes seconds, where ``ray.init`` alone asks for a quarter of an hour."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from typing import Any

from .device.facts import value_or
from .errors import first_line

NAMESPACE, GATEWAY = "anygpu", "gateway"  # the actor that AnyGPU Farm asks for
TOKEN_FIX = "Run `ray get-auth-token --generate` once, copy ~/.ray/auth_token to each machine, and {}."
ASK_SECONDS = 10.0  # a head in the same network answers within milliseconds
LOOK_SECONDS = 0.1  # between looks for a cancel


def refusal(address: str, check: Callable[[], None]) -> str:
    """The reason why the cluster at ``address`` (``10.0.0.5:6379``, ``auto``) keeps this machine out, or empty.
    ``check`` is called while it waits and may raise. A head that does not answer keeps a thread for under a minute."""
    answers: list[str] = []

    def ask() -> None:
        try:
            from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
            from ray._private.services import canonicalize_bootstrap_address_or_die
            from ray._raylet import GcsClient  # type: ignore[attr-defined]

            ensure_token_if_auth_enabled(None, create_token_if_missing=False)  # without one a client ends the process
            GcsClient(address=canonicalize_bootstrap_address_or_die(address))
            answers.append("")
        except Exception as error:  # of Ray's many kinds, which differ between its versions
            answers.append(first_line(error))

    thread = threading.Thread(target=ask, name="ray-address", daemon=True)
    thread.start()
    until = time.monotonic() + ASK_SECONDS
    while not answers and time.monotonic() < until:
        check()
        thread.join(LOOK_SECONDS)
    return answers[0] if answers else f"no answer within {ASK_SECONDS:g} s"


def join(ray: Any, address: str, check: Callable[[], None], level: str) -> str:
    """Join the cluster at ``address``, logging from ``level`` on; returns the reason if that fails, else empty."""
    reason = refusal(address, check)
    try:
        if not reason:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=level)
    except Exception as error:  # of Ray's many kinds, which differ between its versions
        cause = error.__cause__ or error  # which names the cluster's versions on lines of their own
        reason = first_line(RuntimeError(" ".join(str(cause).split()) or type(cause).__name__))
    return reason and f"{reason}; here Ray {ray.__version__}, Python {platform.python_version()}"


def answer(ray: Any, call: Any, check: Callable[[], None], seconds: float) -> Any:
    """The result of ``call``, one or a list of Ray's references; the first that fails raises its error at once.
    ``check`` is called while it waits and may raise. Raises RayError without all results in ``seconds``."""
    waiting, until = call if isinstance(call, list) else [call], time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        ready, waiting = ray.wait(waiting, timeout=LOOK_SECONDS)
        if waiting:
            ray.get(ready)
            check()
    return ray.get(call, timeout=LOOK_SECONDS)


def own_devices() -> list[str]:
    """The numbers of the devices that Ray gave this process; empty where it gave none, or this is no Ray process."""
    import ray

    return value_or(lambda: list(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"])), [])


def token_mode() -> bool:
    """True where this process speaks to Ray with a token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())
