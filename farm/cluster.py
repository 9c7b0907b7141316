"""Ray, started here or connected to: always with its token, and on loopback unless an address is given. Without a token
whoever reaches a port can run code here, and Ray 2.60 listens on every interface by default (docs/scale.md)."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ..compat.device.facts import value_or
from ..compat.errors import InputError, MissingPackageError, UnsupportedError, first_line
from ..compat.ray_clusters import NAMESPACE, TOKEN_FIX, join

STORE_BYTES = 200_000_000  # of shared memory on this machine: what passes is JSON, pictures and finished files
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the one setting with which all of Ray binds to 127.0.0.1
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # else workers yield to everything: 15 by itself, tens of times slower on a busy CPU
}
TOKEN = "RAY_AUTH_MODE"
FIX = TOKEN_FIX.format("set RAY_AUTH_MODE=token for `ray start` and for this command")


def ray_module() -> Any:
    """The package ray; MissingPackageError if it cannot be imported."""
    try:
        import ray
    except ImportError as error:
        found, fix = f"no ray ({first_line(error)})", 'Run pip install "anygpu[farm]".'
        raise MissingPackageError(found, expected="Ray 2.52 or newer", fix=fix) from error
    return ray


def start_here(workers: int, gpus: int) -> Any:
    """Start Ray on this machine alone, with all sockets on 127.0.0.1 and its own token; UnsupportedError if it fails.
    ``workers``: processes to make room for; ``gpus``: devices to deal out. Sets environment variables; returns ray."""
    os.environ.update({**LOOPBACK, **QUIET, TOKEN: "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    ray = ray_module()
    try:
        ray.init(
            address="local",  # else it connects to a cluster that RAY_ADDRESS names, or that runs on this machine
            num_cpus=max(workers, 1), num_gpus=gpus, object_store_memory=STORE_BYTES, namespace=NAMESPACE,
            include_dashboard=False, log_to_driver=False, logging_level="warning",
        )  # fmt: skip
    except Exception as error:  # of Ray's many kinds, such as a timeout on a busy machine
        found = f"Ray did not start here ({first_line(error)})"
        fix = "Run the same command again; its logs are in ray/session_latest/logs of the temporary folder."
        raise UnsupportedError(found, expected="a machine with room for its processes", fix=fix) from error
    return ray


def connect(address: str) -> Any:
    """Connect to Ray at ``address``, such as 10.0.0.5:6379, or ``auto`` for this machine's; returns the package.
    Raises InputError if token mode is off here, or nothing at the address takes our token."""
    if os.environ.get(TOKEN) != "token":
        raise InputError(f"{TOKEN}={os.environ.get(TOKEN, '')!r}", expected=f"{TOKEN}=token on every machine", fix=FIX)
    os.environ.update(QUIET)
    ray = ray_module()
    reason = join(ray, address, lambda: None, "warning")
    if reason:
        found = f"no Ray at {address!r} ({reason})"
        expected = "a cluster of the same Ray and Python version that takes this machine's token"
        raise InputError(found, expected=expected, fix=FIX)
    return ray


def autoscales(ray: Any) -> bool:
    """True if the cluster may get further machines by itself; False if unknown.
    Ray's own monitor runs on every head. If it only watches, it names each kind of machine after the machine
    (ray/autoscaler/_private/util.py, ``format_readonly_node_type``); KubeRay's writes down what may be added."""

    def asked() -> bool:
        from ray._private.state import state

        if (config := state.get_cluster_config()) is not None:
            return any(kind.max_count for kind in config.node_group_configs)
        status = json.loads(ray.experimental.internal_kv._internal_kv_get("__autoscaling_status") or "{}")
        kinds = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
        return any(not kind.startswith("node_") for kind in kinds)

    return bool(value_or(asked, False))


def asked_by(needs: Mapping[str, float], times: int = 1) -> dict[str, float]:
    """The cluster's resources (CPU, GPU) that ``times`` actors with ``needs`` (``num_cpus``, ``num_gpus``) ask for."""
    return {{"num_cpus": "CPU", "num_gpus": "GPU"}[name]: each * times for name, each in needs.items()}


def lacking(ray: Any, asked: Mapping[str, float]) -> UnsupportedError | None:
    """The error for a cluster without the resources ``asked`` for; None if it has them, or they are unknown."""
    has = value_or(ray.cluster_resources, dict(asked))
    if all(has.get(name, 0) >= amount for name, amount in asked.items()):
        return None
    there, wanted = (" and ".join(f"{each.get(name, 0):g} {name}" for name in asked) for each in (has, asked))
    found = f"a cluster with {there} for workers that ask for {wanted}"
    fix = "Add --device cpu to render without GPUs, or start Ray with `ray start --num-gpus=N` where it counts none."
    return UnsupportedError(found, expected="as much as one of them asks for", fix=fix)
