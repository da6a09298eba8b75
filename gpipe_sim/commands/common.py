"""What the commands share: progress, messages and files. Results go to standard output, everything else to error."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.files import InputError, Problem, write_text

if TYPE_CHECKING:
    from gpipe_sim.predict import Prediction

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as one HTML page that opens offline.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Replace a field, such as plan.microbatches=32; repeatable."),
]


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False, long: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on standard error if there is more than one thing to wait for, or one that is long; a line where nobody
    sees it move. What it gives is called when a thing is done, or with the share of one that is."""
    long |= total > 1
    if not long or not sys.stderr.isatty():
        if long and not quiet:
            say(what)
        yield lambda _=1.0: None
        return
    from rich.progress import Progress

    from gpipe_sim.terminal import make_console

    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda share=1.0: progress.advance(task, share)


@contextmanager
def drawing() -> Iterator[None]:
    """Around the import of what draws a report, with a package that need not be installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"needs the package {error.name}, expected an installation with gpipe-planner[report]"
        raise InputError([Problem("--html", "", message)]) from error


def write_report(path: Path, predictions: "Sequence[Prediction]", title: str) -> None:
    """The report of these predictions."""
    with drawing():
        from dashboard.report import report_page
    write(path, report_page(predictions, title), "report, to open in a browser")


def write(path: Path, text: str, what: str) -> None:
    """Write a file and say what it is."""
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError([Problem(str(path), "", f"cannot be written: {error.strerror}")]) from error
    say(f"wrote {path}: {what}")


def say(message: str) -> None:
    """A line on standard error."""
    print(f"gpipe: {message}", file=sys.stderr, flush=True)


def need_torch(command: str) -> None:
    """Refuse to go on without it."""
    if find_spec("torch") is None:
        message = "needs the package torch, expected an installation with gpipe-planner[exec]"
        raise InputError([Problem(command, "", message)])
