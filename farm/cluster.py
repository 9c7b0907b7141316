"""Ray, started on this machine or connected to: always with its token, and on loopback unless an address is given.

Anyone who reaches a port of Ray without a token can run code on the machine, and Ray 2.60 listens on every interface
without one unless it is told otherwise (docs/scale.md).
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from ..compat.device.facts import first_line
from ..compat.errors import InputError, MissingPackageError
from ..compat.ray_clusters import refusal

NAMESPACE = "anygpu"
GATEWAY = "gateway"  # the actor that AnyGPU Farm asks for
STORE_BYTES = 200_000_000  # of shared memory on this machine: what passes is JSON, pictures and finished files
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the one setting with which all of Ray binds to 127.0.0.1
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # else workers yield to everything: 15 by itself, tens of times slower on a busy CPU
}
TOKEN = "RAY_AUTH_MODE"
TOKEN_FIX = (
    "Run `ray get-auth-token --generate` once, copy ~/.ray/auth_token to each machine, and set RAY_AUTH_MODE=token "
    "for `ray start` and for this command."
)


def ray_module() -> Any:
    """The package ``ray``.

    Raises:
        MissingPackageError: it is not installed, or the settings that it reads while it is imported come too late.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(
            f"no ray ({first_line(error)})", expected="Ray 2.52 or newer", fix='Run pip install "anygpu[farm]".'
        ) from error
    return ray


def start_here(workers: int, gpus: int) -> Any:
    """Ray on this machine alone: every socket on 127.0.0.1, and a token that lives as long as it does.

    Args:
        workers: processes to make room for.
        gpus: devices that Ray deals out to them; 0 for a machine without.
    """
    own_token = {TOKEN: "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update({**LOOPBACK, **QUIET, **own_token})
    ray = ray_module()
    ray.init(
        address="local",  # else it connects to a cluster that RAY_ADDRESS names, or that runs on this machine
        num_cpus=max(workers, 1),
        num_gpus=gpus,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
        logging_level="warning",
    )
    return ray


def connect(address: str) -> Any:
    """Ray at ``address``, such as 10.0.0.5:6379, or ``auto`` for the cluster that this machine belongs to.

    Raises:
        InputError: no token mode here, or nothing that takes our token at the address.
    """
    if os.environ.get(TOKEN) != "token":
        raise InputError(
            f"{TOKEN}={os.environ.get(TOKEN, '')!r}", expected=f"{TOKEN}=token on every machine", fix=TOKEN_FIX
        )
    os.environ.update(QUIET)
    ray = ray_module()
    reason = refusal(address, lambda: None)
    try:
        if not reason:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        reason = first_line(error.__cause__ or error)
    if reason:
        raise InputError(
            f"no Ray at {address!r} ({reason})",
            expected="a cluster of the same Ray and Python version that takes this machine's token",
            fix=TOKEN_FIX,
        )
    return ray


def token_mode() -> bool:
    """Whether this process speaks to Ray with a token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())
