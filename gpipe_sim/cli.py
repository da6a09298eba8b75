"""The `gpipe` command: puts the commands together, and turns every expected failure into a message and a status.

Exit status: 0 done; 1 it ran and failed; 2 the input is wrong; 3 no plan fits in memory; 130 interrupted. A command
imports what it needs when it runs, so that `gpipe simulate` starts quickly.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Annotated

import typer

from gpipe_sim.base.files import InputError
from gpipe_sim.commands.accuracy import accuracy
from gpipe_sim.commands.campaign import campaign
from gpipe_sim.commands.catalog import catalog
from gpipe_sim.commands.dashboard import dashboard
from gpipe_sim.commands.demo import demo
from gpipe_sim.commands.export import export
from gpipe_sim.commands.init import init
from gpipe_sim.commands.plan import plan
from gpipe_sim.commands.profile import profile
from gpipe_sim.commands.run import compare, run
from gpipe_sim.commands.simulate import simulate
from gpipe_sim.commands.validate import validate

app = typer.Typer(
    name="gpipe",
    help="Plan pipeline-parallel training: predict how a plan behaves before running it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every expected failure ends here as a message and an exit status."""
    _prepare_output()
    if arguments is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us politely means what Ctrl-C means
    try:
        try:
            app(args=None if arguments is None else list(arguments), prog_name="gpipe")
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        from gpipe_sim.plan.program import DeadlockError

        if not isinstance(error, DeadlockError):
            raise
        print(f"gpipe: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("gpipe: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output, such as head, has seen enough
        _forget_output()
        sys.exit(0)
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, BrokenPipeError):
            raise
        _forget_output()  # the same, noticed by typer or rich, which call it a failure
        sys.exit(0)
    except OSError as error:  # what the system refuses: a folder that may not be written, a disk that is full
        if place := error.filename2 or error.filename:
            print(f"{place}: cannot be used: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        _forget_output()
        print(f"gpipe: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


def _prepare_output() -> None:
    """Have both streams, even if whoever started us has closed them; print ``?`` for what a terminal cannot show."""
    nowhere = partial(open, os.devnull, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _forget_output() -> None:
    """Let nothing more be written to a standard output that takes no more, or Python tries and complains at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main_simulate() -> None:
    """The `simulate` script: `gpipe simulate` under a name of its own."""
    main(["simulate", *sys.argv[1:]])


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpipe-planner {version('gpipe-planner')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_COMMANDS = (
    init,
    simulate,
    plan,
    campaign,
    profile,
    run,
    compare,
    accuracy,
    export,
    dashboard,
    catalog,
    validate,
    demo,
)
for command in _COMMANDS:
    app.command()(command)


if __name__ == "__main__":
    main()
