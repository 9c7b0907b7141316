"""What the recipes run is what the commands take, always with a token, and shares leave no job out."""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from anygpu.compat.errors import InputError
from anygpu.farm import cli

RECIPES = Path(__file__).resolve().parents[2] / "farm" / "recipes"


def recipe(name: str) -> Any:
    """The content of a recipe."""
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


def parsed(words: list[str]) -> Any:
    """The arguments of ``anygpu-farm`` as our own parser reads them."""
    assert words[0] == "anygpu-farm"
    return cli._parser().parse_args(words[1:])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_shares_are_every_line_once(count: int) -> None:
    lines = [str(number) for number in range(20)]
    shares = [cli.share_of(lines, f"{index}/{count}") for index in range(count)]
    assert (
        sorted((line for share in shares for line in share), key=int) == lines
        and max(map(len, shares)) - min(map(len, shares)) <= 1
    )


@pytest.mark.parametrize("share", ["8/8", "-1/8", "a/8", "²/8", "1", "1/0"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(InputError, match="I from 0 to N - 1"):
        cli.share_of(["a"], share)


def test_the_slurm_script_gives_each_task_its_share(tmp_path: Path) -> None:
    stand_in = tmp_path / "anygpu-farm"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" anygpu-farm "$@"\n')
    stand_in.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_COUNT": "8",
    }
    script = ["bash", str(RECIPES / "slurm_array.sh"), "/my farm", "/models"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    arguments = parsed(done.stdout.splitlines())
    assert (arguments.jobs, arguments.models, arguments.share, arguments.local) == ("/my farm", ["/models"], "3/8", 1)
    lost = subprocess.run(script[:2], env=environment, capture_output=True, text=True)
    assert lost.returncode != 0 and "the folder with the jobs" in lost.stderr


def test_kubernetes_runs_commands_that_exist_each_pod_its_share() -> None:
    job = recipe("kubernetes_indexed.yaml")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    arguments = parsed([word.replace("$(JOB_COMPLETION_INDEX)", "7") for word in container["command"]])
    assert arguments.share == f"7/{job['completions']}" and job["completionMode"] == "Indexed"


def test_the_ray_cluster_asks_for_a_token_and_for_as_many_gpus_as_it_may_grow() -> None:
    job = recipe("kuberay.yaml")["spec"]
    cluster = job["rayClusterSpec"]
    arguments = parsed(shlex.split(job["entrypoint"]))
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["enableInTreeAutoscaling"]
    assert arguments.address == "auto" and arguments.workers == group["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-gpus": "0"}


@pytest.mark.parametrize("name", ["compose.head.yaml", "compose.worker.yaml"])
def test_two_boxes_start_ray_with_a_token_and_fixed_ports(name: str) -> None:
    (service,) = recipe(name)["services"].values()
    assert service["environment"]["RAY_AUTH_MODE"] == "token" and service["secrets"] == ["ray_token"]
    command = service["command"].strip()
    inner = shlex.split(command)[2] if command.startswith("sh -c") else command
    for part in inner.split("&&"):
        words = shlex.split(part.strip().removeprefix("exec "))
        if words[0] == "anygpu-farm":
            assert parsed(words).address == "auto"
        else:
            assert words[:2] == ["ray", "start"] and "--disable-usage-stats" in words
            assert {"--min-worker-port=6400", "--max-worker-port=6499", "--node-manager-port=6380"} <= set(words)


def test_the_image_has_the_installed_pack_and_asks_for_a_token_which_no_recipe_has() -> None:
    image = (RECIPES / "Dockerfile").read_text(encoding="utf-8")
    version = recipe("kuberay.yaml")["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ARG RAY={version}\n" in image, "KubeRay is told the version that the image has"
    assert '"/src[farm]" "ray[default]==$RAY" boto3 && rm -rf /src' in image, "as tests/test_wheel.py installs it"
    given = (RECIPES.parents[1] / ".dockerignore").read_text(encoding="utf-8").split("\n*\n")[1].splitlines()
    rooms = {f"!{path.parent.name}" for path in RECIPES.parents[1].glob("*/__init__.py")}
    assert {line for line in given if "." not in line} == {*rooms, "!LICENSE", "**/__pycache__"}
    assert all(word in image for word in ("wget", "gcc", "boto3")), (
        "KubeRay's probes, Triton's launchers, AWS' launcher"
    )
    assert "-e " not in image and "PYTHONPATH" not in image and "RAY_AUTH_MODE=token" in image
    for path in RECIPES.iterdir():
        assert "RAY_AUTH_TOKEN:" not in path.read_text(encoding="utf-8"), "a token belongs into a secret"


def test_no_command_makes_a_token_that_others_can_read() -> None:
    texts = [*RECIPES.iterdir(), RECIPES.parents[1] / "docs" / "scale.md"]
    made = [line for path in texts for line in path.read_text(encoding="utf-8").splitlines() if "--generate" in line]
    assert len(made) == 3 and all("umask 077 && ray get-auth-token" in line for line in made)


@pytest.mark.farm
def test_what_kuberay_asks_a_head_is_answered() -> None:
    """By a head as `ray start` makes one of the extra `farm`; in the image: ``test_image.py``."""
    from anygpu.farm.cluster import LOOPBACK, QUIET

    environment = {**os.environ, **LOOPBACK, **QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "6" * 64}
    ports = ["--port=6399", "--dashboard-agent-listen-port=52365", "--dashboard-port=8265", "--disable-usage-stats"]
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", *ports, "--num-cpus=1", "--block"]
    process = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL)
    asked = ("http://127.0.0.1:52365/api/local_raylet_healthz", "http://127.0.0.1:8265/api/gcs_healthz")
    answers, until = dict[str, str](), time.monotonic() + 120
    try:
        while len(answers) < 2 and time.monotonic() < until and process.poll() is None:
            for address in asked:
                with suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
                    answers[address] = answer.read().decode()
            time.sleep(0.5)
    finally:
        process.terminate()
        process.wait(60)
    assert len(answers) == 2 and all("success" in text for text in answers.values()), answers


def test_spot_machines_hold_no_head_and_ask_for_a_token() -> None:
    cluster = recipe("spot_aws.yaml")
    head, spot = cluster["available_node_types"]["head"], cluster["available_node_types"]["spot"]
    assert spot["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"} and spot["min_workers"] == 0
    assert cluster["head_node_type"] == "head" and "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"]["GPU"] == 0 and spot["max_workers"] == cluster["max_workers"]
    commands = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2 and all(one.startswith("RAY_AUTH_MODE=token ray start") for one in starts)
    text = (RECIPES / "spot_aws.yaml").read_text(encoding="utf-8")
    (command,) = (line.split("'")[1] for line in text.splitlines() if "ray exec" in line)
    arguments = parsed(shlex.split(command))
    assert (arguments.jobs, arguments.address, arguments.workers) == ("/farm", "auto", spot["max_workers"])


def commands_in(document: Any) -> Iterator[str]:
    """Every text of a recipe that a shell is given."""
    if isinstance(document, dict):
        for name, value in document.items():
            if "command" in name:
                yield from [value] if isinstance(value, str) else value
            else:
                yield from commands_in(value)


def test_a_shell_can_read_every_command() -> None:
    texts = [command for path in sorted(RECIPES.glob("*.yaml")) for command in commands_in(recipe(path.name))]
    texts += [(RECIPES / "slurm_array.sh").read_text(encoding="utf-8")]
    assert len(texts) >= 8
    for text in texts:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, (text, done.stderr)


@pytest.mark.farm
@pytest.mark.parametrize("broken", [False, True])
def test_kubernetes_and_the_ray_launcher_know_every_field(broken: bool) -> None:
    """By the schemas that their packages bring; with a field misspelt they do not."""
    import jsonschema
    import kubernetes_validate
    from ray.autoscaler._private.util import validate_config

    job, ray_job, cluster = (recipe(name) for name in ("kubernetes_indexed.yaml", "kuberay.yaml", "spot_aws.yaml"))
    ray_cluster = ray_job["spec"]["rayClusterSpec"]
    groups = [ray_cluster["headGroupSpec"], *ray_cluster["workerGroupSpecs"]]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]} for group in groups]
    if broken:
        job["spec"]["completion_mode"] = "Indexed"
        cluster["available_node_types"]["spot"]["most_workers"] = 8
        for pod in pods:
            pod["spec"]["containers"][0]["images"] = "anygpu-farm"
    version = kubernetes_validate.latest_version()
    for document in (job, *pods):
        with pytest.raises(kubernetes_validate.ValidationError) if broken else nullcontext():
            kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(jsonschema.ValidationError) if broken else nullcontext():
        validate_config({**cluster, "cluster_synced_files": []})  # which the launcher adds


@pytest.mark.farm
@pytest.mark.parametrize("name", ["compose.head.yaml", "compose.worker.yaml"])
def test_compose_knows_every_field(name: str) -> None:
    import jsonschema

    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text("utf-8"))
    document = recipe(name)
    jsonschema.validate(document, schema)
    (service,) = document["services"].values()
    service["network"] = service.pop("network_mode")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


@pytest.mark.farm
def test_ray_start_knows_every_flag_of_the_recipes() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    text = "\n".join(path.read_text(encoding="utf-8") for path in RECIPES.glob("compose.*.yaml"))
    flags = {word.split("=")[0].strip('"') for word in text.split() if word.startswith("--")}
    ours = {"--address", "--workers", "--models", "--generate"}
    assert flags - ours and not flags - ours - known, flags - ours - known
