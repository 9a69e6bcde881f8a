"""The part of kustomize that deploy/kubernetes uses, in plain Python. Anything else is an error.

There is no current kustomize on PyPI or in Debian, so this is not compared with the real one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "labels",
    "resources",
    "components",
    "patches",
    "images",
}
_CLUSTER_WIDE = {"Namespace", "PriorityClass", "ClusterRole", "ClusterRoleBinding"}
# Lists that are merged by a key of their items. All others are replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}


def read_all(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def render(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a kustomization.yaml."""
    (settings,) = read_all(folder / "kustomization.yaml")
    if unknown := set(settings) - _KNOWN:
        raise ValueError(f"{folder}: {unknown} are not supported here")
    manifests: list[Manifest] = []
    for name in [*settings.get("resources", []), *settings.get("components", [])]:
        path = folder / name
        manifests += render(path) if path.is_dir() else read_all(path)
    for patch in settings.get("patches", []):
        if set(patch) != {"path"}:
            raise ValueError(f"{folder}: expected patches by path, not {patch}")
        for change in read_all(folder / patch["path"]):
            (target,) = [one for one in manifests if _identity(one) == _identity(change)]
            manifests[manifests.index(target)] = merge(target, change)
    for manifest in manifests:
        _adjust(manifest, settings)
    names = [_identity(manifest) for manifest in manifests]
    if len(set(names)) != len(names):
        raise ValueError(f"{folder}: a manifest is there twice: {names}")
    return manifests


def merge(target: Any, change: Any, key: str = "") -> Any:
    """A strategic merge, for the lists in `_MERGE_KEYS`."""
    if isinstance(target, dict) and isinstance(change, dict):
        merged = copy.deepcopy(target)
        for name, value in change.items():
            merged[name] = merge(target.get(name), value, name)
        return merged
    if isinstance(target, list) and isinstance(change, list) and key in _MERGE_KEYS:
        by = _MERGE_KEYS[key]
        changes = {item[by]: item for item in change}
        merged_items = [merge(item, changes.pop(item[by], {})) for item in target]
        return merged_items + list(changes.values())
    return copy.deepcopy(change)


def pod_specs(manifest: Manifest) -> list[Manifest]:
    template = manifest.get("spec", {}).get("template")
    return [template["spec"]] if template and "spec" in template else []


def _identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _adjust(manifest: Manifest, settings: Manifest) -> None:
    metadata = manifest["metadata"]
    if "namespace" in settings and manifest["kind"] not in _CLUSTER_WIDE:
        metadata["namespace"] = settings["namespace"]
    for labels in settings.get("labels", []):
        if set(labels) != {"pairs"}:
            raise ValueError(f"only labels of the manifests are supported here, not {labels}")
        metadata["labels"] = {**metadata.get("labels", {}), **labels["pairs"]}
    images = {image["name"]: image for image in settings.get("images", [])}
    for spec in pod_specs(manifest):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            if (image := images.get(container["image"])) is not None:
                container["image"] = f"{image['newName']}:{image['newTag']}"
