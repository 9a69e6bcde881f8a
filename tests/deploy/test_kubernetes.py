"""deploy/kubernetes and the Dockerfiles: valid, consistent, and of options that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from kustomize import Manifest, pod_specs, read_all, render

from penstock.cli import app
from penstock.config import Config, load_config
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.install import VERSION
from penstock.units import GiB

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = render(KUBERNETES / "base")
PREFILL_DECODE = render(KUBERNETES / "overlays" / "prefill-decode")
MONITORS = render(KUBERNETES / "components" / "monitoring")
RENDERED = {"base": BASE, "prefill-decode": PREFILL_DECODE}
KSERVE = [read_all(path)[0] for path in sorted((KUBERNETES / "kserve").glob("*.yaml"))]
LLM_D: dict[str, Any] = read_all(KUBERNETES / "llm-d" / "values.yaml")[0]
# The oldest that is supported, and the newest that the validator knows.
VERSIONS = ["1.31.0", kubernetes_validate.latest_version()]
NODE_USER = 10001  # user and group of the node

EVERYWHERE = pytest.mark.parametrize("manifests", RENDERED.values(), ids=RENDERED)
EACH = pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(each, id=f"{name}-{each['kind']}-{each['metadata']['name']}")
        for name, manifests in RENDERED.items()
        for each in manifests
    ],
)


def by_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if pod_specs(each)]


def pods_of(role: str) -> Manifest:
    """A pod as llm-d's chart makes it of our values: what we give it, and nothing else."""
    values = LLM_D[role]
    containers = []
    for given in values["containers"]:
        chart_only = {"modelCommand", "mountModelVolume", "extraConfig"}
        container = {key: value for key, value in given.items() if key not in chart_only}
        containers.append({**container, **given["extraConfig"]})
    return {"containers": containers, "volumes": values["volumes"], **values["extraConfig"]}


# Pods that others complete: KServe, and llm-d's chart.
FOREIGN: dict[str, Manifest] = {
    "kserve": KSERVE[1]["spec"]["template"],
    "kserve-decode": KSERVE[0]["spec"]["template"],
    "kserve-prefill": KSERVE[0]["spec"]["prefill"]["template"],
    "llm-d-decode": pods_of("decode"),
    "llm-d-prefill": pods_of("prefill"),
}
PODS: dict[str, Manifest] = {
    **{
        f"{name}-{each['metadata']['name']}": pod_specs(each)[0]
        for name, manifests in RENDERED.items()
        for each in workloads(manifests)
    },
    **FOREIGN,
}
EACH_POD = pytest.mark.parametrize(("name", "pod"), PODS.items(), ids=PODS)


def containers_of(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


# Schemas.


def test_every_file_is_used() -> None:
    read = {KUBERNETES / "llm-d" / "values.yaml", *(KUBERNETES / "kserve").glob("*.yaml")}
    for folder in ("base", "components/monitoring", "overlays/prefill-decode"):
        file = KUBERNETES / folder / "kustomization.yaml"
        settings = read_all(file)[0]
        names = [*settings["resources"], *(each["path"] for each in settings.get("patches", []))]
        read |= {file, *(KUBERNETES / folder / name for name in names if name.endswith(".yaml"))}
    assert read == set(KUBERNETES.rglob("*.yaml"))


@pytest.mark.parametrize("version", VERSIONS)
@EACH
def test_a_manifest_is_valid(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "pod"), FOREIGN.items(), ids=FOREIGN)
def test_a_pod_for_kserve_or_llm_d_is_valid(name: str, pod: Manifest, version: str) -> None:
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_is_strict() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(by_kind(BASE, "DaemonSet")["penstock-node"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readonlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


# What belongs together.


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def selected(manifests: list[Manifest], selector: dict[str, str]) -> list[Manifest]:
    return [each for each in workloads(manifests) if selector.items() <= labels_of(each).items()]


@EVERYWHERE
def test_selectors_find_the_pods_they_are_for(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        found = selected(manifests, workload["spec"]["selector"]["matchLabels"])
        assert found == [workload]  # its own pods and no others
    for service in by_kind(manifests, "Service").values():
        found = selected(manifests, service["spec"]["selector"])
        assert found, service["metadata"]["name"]
        for each in found:
            ports = {port["name"] for port in pod_specs(each)[0]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for each in by_kind(manifests, kind).values():
            labels = each["spec"][field].get("matchLabels", {})
            assert selected(manifests, labels), each["metadata"]["name"]


@EVERYWHERE
def test_network_policies_name_ports_that_exist(manifests: list[Manifest]) -> None:
    for policy in by_kind(manifests, "NetworkPolicy").values():
        own = selected(manifests, policy["spec"]["podSelector"].get("matchLabels", {}))
        rules = [(rule, own) for rule in policy["spec"].get("ingress", [])]
        for rule in policy["spec"].get("egress", []):
            peers = [to["podSelector"] for to in rule.get("to", []) if "podSelector" in to]
            found = [one for peer in peers for one in selected(manifests, peer["matchLabels"])]
            rules.append((rule, found))
        for rule, targets in rules:
            names = {port["port"] for port in rule["ports"] if isinstance(port["port"], str)}
            for target in targets:
                ports = pod_specs(target)[0]["containers"][0]["ports"]
                assert names <= {port["name"] for port in ports}
            assert targets or not names


@EVERYWHERE
def test_accounts_roles_and_settings_exist(manifests: list[Manifest]) -> None:
    accounts = by_kind(manifests, "ServiceAccount")
    for workload in workloads(manifests):
        pod = pod_specs(workload)[0]
        assert pod["serviceAccountName"] in accounts
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in by_kind(manifests, "ConfigMap")
        if "priorityClassName" in pod:
            assert pod["priorityClassName"] in by_kind(manifests, "PriorityClass")
    for binding in by_kind(manifests, "RoleBinding").values():
        assert binding["roleRef"]["name"] in by_kind(manifests, "Role")
        for subject in binding["subjects"]:
            assert subject["name"] in accounts
            assert subject["namespace"] == accounts[subject["name"]]["metadata"]["namespace"]


def test_monitors_find_services_and_their_ports() -> None:
    services = by_kind(BASE, "Service").values()
    found = set()
    for monitor in MONITORS:
        assert (monitor["apiVersion"], monitor["kind"]) == (
            "monitoring.coreos.com/v1",
            "ServiceMonitor",
        )
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [
            each for each in services if labels.items() <= each["metadata"]["labels"].items()
        ]
        found.add(service["metadata"]["name"])
        ports = {port["name"] for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["port"] in ports
            assert endpoint["path"] == "/metrics"
    assert found == set(by_kind(BASE, "Service"))


@EACH_POD
def test_probes_ask_ports_that_exist(name: str, pod: Manifest) -> None:
    for container in pod["containers"]:
        ports = container.get("ports", [])
        known = {port.get("name") for port in ports} | {port["containerPort"] for port in ports}
        probes = {key: value for key, value in container.items() if key.endswith("Probe")}
        if not name.startswith("kserve"):  # KServe adds them
            assert {"livenessProbe", "readinessProbe"} <= set(probes)
        for probe in probes.values():
            assert probe["httpGet"]["port"] in known
        # The option and the port say the same.
        for argument in container.get("args", []):
            if found := re.fullmatch(r"--(?:[a-z]+-)?port=(\d+)", argument):
                assert int(found[1]) in known


@EACH_POD
def test_mounts_are_of_volumes_that_exist(name: str, pod: Manifest) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = [mount for each in containers_of(pod) for mount in each.get("volumeMounts", [])]
    assert {mount["name"] for mount in mounts} == volumes


# Safety.


@EACH_POD
def test_a_pod_has_no_more_rights_than_it_needs(name: str, pod: Manifest) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        assert not pod.get(field)
    if name.startswith("kserve"):
        return  # KServe's template has a context for the container
    for container in containers_of(pod):
        own = container["securityContext"]
        assert not own.get("privileged")
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"]["drop"] == ["ALL"]
        if container["name"] == "own-folders":
            assert own["capabilities"]["add"] == ["CHOWN", "FOWNER"]
            assert container in pod["initContainers"]
        else:
            assert set(own["capabilities"]) == {"drop"}
            assert own.get("runAsUser", context["runAsUser"]) > 0


@EACH_POD
def test_only_the_folders_of_the_node_are_shared_with_the_machine(name: str, pod: Manifest) -> None:
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    if name.endswith("penstock-node"):
        assert set(paths.values()) == {"/run/penstock", "/var/lib/penstock"}
        assert pod["securityContext"]["runAsGroup"] == NODE_USER
        return
    assert set(paths.values()) <= {"/run/penstock"}
    for container in pod["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] in paths:
                # The whole folder, because a node that restarts makes a new socket.
                assert mount == {**mount, "mountPath": "/run/penstock", "readOnly": True}
                assert pod["securityContext"]["supplementalGroups"] == [NODE_USER]
                assert pod["securityContext"]["runAsUser"] != NODE_USER


@EACH_POD
def test_images_have_versions(name: str, pod: Manifest) -> None:
    for container in containers_of(pod):
        _, _, tag = container["image"].rpartition("/")[2].partition(":")
        assert tag, container["image"]
        assert tag != "latest"
        if "penstock" in container["image"]:
            assert tag.split("-")[0] == VERSION


@EVERYWHERE
def test_pods_get_no_settings_from_services(manifests: list[Manifest]) -> None:
    """Kubernetes would set PENSTOCK_NODE_PORT for a Service `penstock-node`, and VLLM_PORT."""
    for workload in workloads(manifests):
        assert pod_specs(workload)[0]["enableServiceLinks"] is False
    # For pods that do not say so: headless services are not in the environment.
    for name, service in by_kind(manifests, "Service").items():
        if name.startswith("penstock") or name == "vllm":
            assert service["spec"]["clusterIP"] == "None"


@EVERYWHERE
def test_every_container_has_requests_and_a_memory_limit(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        for container in containers_of(pod_specs(workload)[0]):
            resources = container["resources"]
            assert set(resources["requests"]) >= {"cpu", "memory"}
            assert resources["limits"]["memory"] >= resources["requests"]["memory"]
            assert not any(key.startswith("hugepages") for key in resources["requests"])


# The node.


def node_pod() -> Manifest:
    return pod_specs(by_kind(BASE, "DaemonSet")["penstock-node"])[0]


def node_config(tmp_path: Path) -> Config:
    text = by_kind(BASE, "ConfigMap")["penstock-node"]["data"]["penstock.toml"]
    tomllib.loads(text)
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    return load_config(file, env={})


def test_the_nodes_settings_load_and_fit_its_memory(tmp_path: Path) -> None:
    config, pod = node_config(tmp_path), node_pod()
    (container,) = pod["containers"]
    for each in containers_of(pod):  # else the quality of service is not Guaranteed
        assert each["resources"]["requests"] == each["resources"]["limits"]
    memory = container["resources"]["limits"]["memory"]
    assert memory.endswith("Gi")
    assert int(memory.removesuffix("Gi")) * GiB >= config.host.size_bytes + 4 * GiB
    assert config.node.url is None
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(config.disk.path) in mounts
    assert config.host.numa_node is None  # needs CAP_SYS_NICE in a container


def test_engines_connect_where_the_node_listens() -> None:
    arguments = node_pod()["containers"][0]["args"]
    assert "--socket=/run/penstock/node.sock" in arguments
    assert f"--group={NODE_USER}" in arguments
    for name, pod in PODS.items():
        for container in pod["containers"]:
            values = {each["name"]: each["value"] for each in container.get("env", [])}
            given = {key: text for key, text in values.items() if key.startswith("PENSTOCK_")}
            if not given:
                assert name.endswith(("penstock-node", "vllm-router"))
                continue
            assert load_config(env=given).node.url == "unix:///run/penstock/node.sock"


# Options.


def test_options_of_penstock_exist() -> None:
    command: Any = typer.main.get_command(app)
    for name, pod in PODS.items():
        for container in containers_of(pod):
            if container.get("command", [])[:1] != ["penstock"]:
                continue
            (subcommand,) = container["command"][1:]
            known = {
                option
                for parameter in command.commands[subcommand].params
                for option in parameter.opts
            }
            for argument in container["args"]:
                assert argument.split("=")[0] in known, f"{name}: {argument}"


def vllm_arguments(pod: Manifest) -> list[str]:
    """The arguments of the first container, where KServe's template has them or we do."""
    container = pod["containers"][0]
    values = {each["name"]: each["value"] for each in container.get("env", [])}
    more = shlex.split(values.get("VLLM_ADDITIONAL_ARGS", ""))
    if more:
        assert more[0] == "--kv-transfer-config"
        return [f"{more[0]}={more[1]}", *more[2:]]
    return list(container["args"])


ROLES = {
    "base-vllm": "kv_both",
    "prefill-decode-vllm": "kv_consumer",
    "prefill-decode-vllm-prefill": "kv_producer",
    "kserve": "kv_both",
    "kserve-decode": "kv_consumer",
    "kserve-prefill": "kv_producer",
    "llm-d-decode": "kv_consumer",
    "llm-d-prefill": "kv_producer",
}


@pytest.mark.parametrize(("name", "role"), ROLES.items(), ids=ROLES)
def test_vllm_gets_our_connector_and_its_role(name: str, role: str) -> None:
    (given,) = [
        argument.partition("=")[2]
        for argument in vllm_arguments(PODS[name])
        if argument.startswith("--kv-transfer-config=")
    ]
    expected = transfer_config(VllmSettings())
    assert expected.pop("kv_connector_extra_config") == {}
    assert json.loads(given) == {**expected, "kv_role": role}


def test_all_engines_are_in_the_list_of_roles() -> None:
    engines = {name for name in PODS if not name.endswith(("penstock-node", "vllm-router"))}
    assert engines == set(ROLES)


def test_a_prefiller_differs_from_the_base_in_its_role_alone() -> None:
    def without_roles(name: str, manifests: list[Manifest]) -> str:
        text = json.dumps(by_kind(manifests, "Deployment")[name]["spec"]["template"])
        return re.sub(r"kv_(both|producer)|(?<=role\": \")\w+", "", text.replace("\\", ""))

    assert without_roles("vllm-prefill", PREFILL_DECODE) == without_roles("vllm", BASE)


def program(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@pytest.mark.skipif(program("vllm-router") is None, reason="vllm-router is not installed")
@EVERYWHERE
def test_options_of_the_router_exist(manifests: list[Manifest]) -> None:
    executable = program("vllm-router")
    assert executable is not None
    told = subprocess.run([executable, "--help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"--[a-z][a-z-]+", told.stdout))
    (container,) = pod_specs(by_kind(manifests, "Deployment")["vllm-router"])[0]["containers"]
    for argument in container["args"]:
        option, _, value = argument.partition("=")
        assert option in known
        if option.endswith("selector"):
            label, _, wanted = value.partition("=")
            assert selected(manifests, {label: wanted}), argument


# Images.


def dockerfiles() -> list[Path]:
    return [ROOT / "Dockerfile", KUBERNETES / "router.Dockerfile"]


@pytest.mark.parametrize("file", dockerfiles(), ids=lambda file: file.name)
def test_hadolint_accepts(file: Path) -> None:
    executable = program("hadolint")
    assert executable is not None, "hadolint is not installed: pip install '.[dev]'"
    told = subprocess.run([executable, str(file)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("file", dockerfiles(), ids=lambda file: file.name)
def test_what_an_image_copies_is_there_and_not_ignored(file: Path) -> None:
    kept = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M)
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), re.M):
        for source in line.split():
            assert (ROOT / source).exists()
            assert source in kept
    assert ":latest" not in file.read_text()
    assert re.search(r"^USER 1000\d", file.read_text(), re.M)


def test_extras_and_users_of_the_image_are_those_of_the_project() -> None:
    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for chosen in re.findall(r"EXTRAS=(\S+)", text):
        assert set(chosen.split(",")) <= set(extras)
    users = {int(found) for found in re.findall(r"useradd --uid (\d+)", text)}
    router = re.findall(r"useradd --uid (\d+)", (KUBERNETES / "router.Dockerfile").read_text())
    assert {pod["securityContext"]["runAsUser"] for pod in PODS.values()} == users | {
        int(found) for found in router
    }
