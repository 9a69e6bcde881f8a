"""What Penstock is called where packages are installed, and what a missing part says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.errors import ConfigError, NotInstalled
from penstock.install import DISTRIBUTION, how_to_install, listed, not_installed

ROOT = Path(__file__).parent.parent
FOLDERS = ("penstock", "docs", "deploy", "demo", "benchmarks", "servers", "tests_vllm")
SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".txt", ".html")


def texts() -> dict[Path, str]:
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    named = [path for path in files if path.suffix in SUFFIXES or path.name == "Makefile"]
    return {path: path.read_text() for path in named if "out" not in path.parts}


def strangers(text: str) -> list[str]:
    """Commands that would install what somebody else has published under the import's name."""
    commands = re.findall(r"(?:pip|uv|pipx|poetry)\b[^\n`]*\b(?:install|add)\b[^\n`]*", text)
    argument = re.compile(r"(?:^|[\s'\"])penstock(?=$|[\s'\"\[=<>~!@,;)])")
    named = [command for command in commands if argument.search(command.partition("#")[0])]
    return named + re.findall(r"penstock\[[a-z,]+\]", text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install vllm penstock",
        "`pip install penstock`",
        "pip install 'penstock[redis]'",
        "python -m pip install penstock==0.1.0",
        "uv pip install penstock",
        "needs penstock[encryption]",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    assert strangers(text)


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    found = {path: strangers(text) for path, text in texts().items() if path.name != "CHANGELOG.md"}
    assert len(found) > 300
    assert {path: commands for path, commands in found.items() if commands} == {}


def test_one_constant_holds_the_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    modules = {path for path in texts() if path.is_relative_to(ROOT / "penstock")}
    holders = {path.name for path in modules if DISTRIBUTION in path.read_text()}
    assert holders == {"install.py"}


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for path, text in texts().items():
        for names in re.findall(r"'\.\[([a-z0-9,]+)\]'", text):
            assert set(names.split(",")) <= extras, path


def test_sentences() -> None:
    one = str(not_installed(["torch"], "engine", "this"))
    assert one.startswith("torch is not installed, which this needs; run `pip install '.[engine]'`")
    two = str(not_installed(["torch", "numpy"], "engine", "this"))
    assert two.startswith("torch and numpy are not installed")
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert how_to_install("redis").count("[redis]") == 2
    assert issubclass(NotInstalled, ImportError)
    assert issubclass(NotInstalled, ConfigError)


def without(modules: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python in which these modules cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({modules.split()!r}))"
    return subprocess.run(
        [sys.executable, "-c", f"{block}\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("modules", "argv", "extra"),
    [
        ("torch", ["generate", "x"], "engine"),
        ("torch transformers", ["chat"], "engine"),
        ("safetensors", ["serve"], "engine"),
        ("fastapi", ["serve"], "server"),
        ("fastapi uvicorn", ["dashboard", "--metrics", "http://h"], "server"),
        ("opentelemetry.exporter", ["serve", "--otlp-traces-endpoint", "http://h:4318"], "otel"),
        ("redis", ["store", "ls", "redis://h"], "redis"),
        ("obstore", ["store", "ls", "s3://b"], "s3"),
        ("mooncake", ["store", "ls", "mooncake://h"], "mooncake"),
        ("redis", ["probe", "--remote", "redis://h"], "redis"),
        ("redis", ["config", "--set", "remote.url=redis://h"], "redis"),
        ("redis", ["generate", "x", "--remote", "redis://h"], "redis"),
    ],
)
def test_a_command_without_its_extra_says_so(modules: str, argv: list[str], extra: str) -> None:
    done = without(modules, f"from penstock.cli import main; sys.exit(main({argv!r}))")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("penstock: ")
    assert done.stderr.count("\n") == 1
    assert f"pip install '.[{extra}]'" in done.stderr
    several = len(modules.split()) > 1
    verb = "are" if several else "is"
    # Of OpenTelemetry's packages whichever is missing first is named.
    names = listed(modules.split())
    assert re.search(rf"{names}[\w.]*(, which)? {verb} not installed", done.stderr)


@pytest.mark.parametrize("module", ["torch", "transformers", "numpy", "safetensors"])
def test_the_python_api_without_the_engine_is_an_import_error_in_a_sentence(module: str) -> None:
    code = (
        "from penstock import SamplingParams\n"
        "try:\n    from penstock import LLM\nexcept ImportError as error:\n    print(error)\n"
    )
    done = without(module, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{module} is not installed, which penstock.LLM needs; run `pip")
    assert "'.[engine]'" in done.stdout


def test_encryption_without_its_extra() -> None:
    code = (
        "import os; os.environ['PENSTOCK_REMOTE_SECRET'] = 'x' * 32\n"
        "from penstock.cli import main\n"
        "sys.exit(main(['config', '--set', 'remote.url=memory://x', '--set', "
        "'remote.encrypt=true']))"
    )
    done = without("cryptography", code)
    assert done.returncode == 2, done.stderr
    assert "cryptography is not installed, which remote.encrypt needs" in done.stderr
    assert "'.[encryption]'" in done.stderr


def test_a_package_that_no_extra_knows_is_a_sentence_too() -> None:
    done = without("prometheus_client", "from penstock.cli import main; sys.exit(main(['serve']))")
    assert done.returncode == 2, done.stderr
    assert "prometheus_client, which is not installed" in done.stderr
