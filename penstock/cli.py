"""The command line: registers every command, and turns errors into one line on stderr.

0    success
1    `store check` found damage, `doctor` found a problem, or a prompt was answered with no
2    wrong usage, or the command failed; stderr has one line that says why
130  interrupted
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from penstock.commands import (
    advise,
    chat,
    config,
    dashboard,
    doctor,
    generate,
    kv_size,
    node,
    node_status,
    plan,
    probe,
    serve,
    sglang_config,
    sim,
    store,
    top,
    vllm_config,
)
from penstock.errors import PenstockError
from penstock.install import VERSION

app = typer.Typer(
    help="Tiered KV-cache offloading for LLM inference: GPU, DRAM, disk and remote stores.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {VERSION}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("vllm-config", epilog=vllm_config.EXAMPLE)(vllm_config.vllm_config)
app.command("sglang-config", epilog=sglang_config.EXAMPLE)(sglang_config.sglang_config)
app.command("node", epilog=node.EXAMPLE)(node.node)
app.command("node-status", epilog=node_status.EXAMPLE)(node_status.node_status)
app.command("kv-size", epilog=kv_size.EXAMPLE)(kv_size.kv_size)
app.command("probe", epilog=probe.EXAMPLE)(probe.probe)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("advise", epilog=advise.EXAMPLE)(advise.advise_server)
app.command("top", epilog=top.EXAMPLE)(top.top)
app.command("dashboard", epilog=dashboard.EXAMPLE)(dashboard.dashboard)
app.command("sim", epilog=sim.EXAMPLE)(sim.sim)
app.command("config", epilog=config.EXAMPLE)(config.config)
app.add_typer(doctor.app, name="doctor")
app.add_typer(store.app, name="store")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` does not include the program's name."""
    for stream in (sys.stdout, sys.stderr):
        # A path may not be valid UTF-8, and a terminal may not support "µ". Do not fail for that.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(args=argv, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
    except PenstockError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except typer.Abort as abort:
        # Typer raises this for Ctrl-C, and for the end of input at a prompt.
        if isinstance(abort.__context__, KeyboardInterrupt):
            return _fail("interrupted", 130)
        return _fail("nothing was done", 1)
    except BrokenPipeError:
        # The reader closed the pipe. Keep the interpreter from flushing the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "penstock":
            raise  # a bug in Penstock, not in the installation
        return _fail(
            f"this command needs {error.name}, which is not installed: run `pip install "
            f"{error.name}`, or reinstall Penstock"
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}")
    except Exception as error:
        # Wrong usage. The class depends on Typer's version: older ones raise click's.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "penstock"
        return _fail(f"{format_message().rstrip('.')} (see {path} --help)")
    if code == 130:  # newer versions of Typer handle Ctrl-C themselves
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int = 2) -> int:
    print("penstock:", " ".join(sentence.split()), file=sys.stderr)
    return code
