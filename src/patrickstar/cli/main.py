"""The command `patrickstar`: verbs, exit status, and how errors are told.

0    done
1    an error found on the way: a file's content, a device, a fault of ours
2    wrong arguments or configuration
3    does not fit
130  after Ctrl-C
143  after SIGTERM
"""

from __future__ import annotations

import importlib
import signal
import traceback
from collections.abc import Sequence
from typing import Final

import click

from patrickstar.cli.flags import Invocation, debug_option
from patrickstar.cli.stop import Stopped
from patrickstar.errors import BudgetError, ConfigError, Error, RankError, nearest

# Each in a module of its name, imported when asked for: `patrickstar --help` must not load torch.
VERBS: Final = ("train", "plan", "models", "machines", "doctor", "elastic", "cluster")


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in VERBS:
            ctx.fail(f"no verb {cmd_name!r}: there are {', '.join(VERBS)}{nearest(cmd_name, VERBS)}")
        command = getattr(importlib.import_module(f"patrickstar.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@debug_option
@click.version_option(package_name="patrickstar")
def cli() -> None:
    """Train PyTorch models several times larger than memory, bit for bit equal to plain PyTorch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one call of the command line and gives its exit status; `None`: what this process was started with."""
    invocation = Invocation(may_reexecute=arguments is None)
    try:
        with invocation.signals, invocation.world:
            status = _run(arguments, invocation)
    except Stopped as stopped:  # a second signal may come while the first is being dealt with
        status = stopped.status
    if invocation.may_reexecute and invocation.world.size > 1:
        # This process is about to end with its own status, also where torchrun has seen another end before.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return status


def _run(arguments: Sequence[str] | None, invocation: Invocation) -> int:
    try:
        status = cli.main(arguments, prog_name="patrickstar", standalone_mode=False, obj=invocation)
    except click.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message(), err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see `{context.command_path} --help`)" if context else ""
        return _refuse(error, invocation, text=f"{error.format_message()}{where}", status=error.exit_code)
    except Exception as error:
        status = 3 if isinstance(error, BudgetError) else 2 if isinstance(error, ConfigError) else 1
        return _refuse(error, invocation, text=_of_exception(error), status=status)
    return status if isinstance(status, int) else 0


def _refuse(error: Exception, invocation: Invocation, *, text: str, status: int) -> int:
    if invocation.debug:
        traceback.print_exception(error)
    paragraph = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    # What is wrong with a rank each of the others says in words of its own.
    if invocation.world.tells(error.reason if isinstance(error, RankError) else paragraph):
        click.echo(f"patrickstar: {paragraph}", err=True)
    invocation.world.leave(paragraph)
    return status


def _of_exception(error: Exception) -> str:
    if isinstance(error, Error):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return f"{error}"
    if isinstance(error, ImportError):
        return f"{error}\n`patrickstar doctor` says what is wrong with the packages that are installed"
    return (
        f"{type(error).__name__}: {error}\n(we did not expect this one; `patrickstar --debug` shows where it came from)"
    )
