"""Checks the recipes against published schemas: ``check_recipes.py RAYJOB_CRD COMPOSE_SPEC``; ends with 1 on an error.

RAYJOB_CRD is ``helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml`` of ray-project/kuberay, COMPOSE_SPEC the
``compose-spec.json`` of compose-spec or of the package check-jsonschema. Fields that a schema does not know are errors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

RECIPES = Path(__file__).resolve().parents[2] / "farm" / "recipes"


def strict(schema: Any) -> Any:
    """``schema`` that knows no fields but its own, and Kubernetes' numbers that may be texts."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
            schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        strict(item)
    return schema


def recipe(name: str) -> Any:
    """The content of a recipe."""
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


def main(crd: str, compose: str) -> int:
    """Print each error; how many there are."""
    definition = yaml.safe_load(Path(crd).read_text(encoding="utf-8"))
    (version,) = (item for item in definition["spec"]["versions"] if item["name"] == "v1")
    job = strict(version["schema"]["openAPIV3Schema"])
    job["properties"]["metadata"] = {"type": "object"}
    cluster = job["properties"]["spec"]["properties"]["rayClusterSpec"]["properties"]
    pod = cluster["headGroupSpec"]["properties"]["template"]
    services = json.loads(Path(compose).read_text(encoding="utf-8"))
    pairs = [
        ("kuberay.yaml", job, recipe("kuberay.yaml")),
        ("kubernetes_indexed.yaml", pod, recipe("kubernetes_indexed.yaml")["spec"]["template"]),
        *((name, services, recipe(name)) for name in ("compose.head.yaml", "compose.worker.yaml")),
    ]
    errors = 0
    for name, schema, document in pairs:
        faults = [
            f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in Draft7Validator(schema).iter_errors(document)
        ]
        print(name, faults or "fits")
        errors += len(faults)
    return errors


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
