"""Checks the recipe for KubeRay against its published schema: ``check_recipes.py RAYJOB_CRD``; ends with 1 on an error.

RAYJOB_CRD is ``helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml`` of ray-project/kuberay. Fields that it does not
know are errors. Schemas that packages bring are checked by ``test_recipes.py``.
"""

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


def main(crd: str) -> int:
    """Print each error; how many there are."""
    definition = yaml.safe_load(Path(crd).read_text(encoding="utf-8"))
    (version,) = (item for item in definition["spec"]["versions"] if item["name"] == "v1")
    job = strict(version["schema"]["openAPIV3Schema"])
    job["properties"]["metadata"] = {"type": "object"}
    document = yaml.safe_load((RECIPES / "kuberay.yaml").read_text(encoding="utf-8"))
    errors = list(Draft7Validator(job).iter_errors(document))
    for error in errors:
        print(f"{'.'.join(map(str, error.absolute_path))}: {error.message}")
    return len(errors)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))
