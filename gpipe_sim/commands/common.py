"""What the commands share: progress, messages and files. Results go to standard output, everything else to error."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpipe_sim.base.files import InputError, Problem, write_text
from gpipe_sim.base.units import parse_tokens

if TYPE_CHECKING:
    from gpipe_sim.campaign.campaign import Campaign
    from gpipe_sim.explain.predict import Prediction


def complete_scenario(incomplete: str) -> list[str]:
    """What a shell may offer for a scenario: those that come with the tool, then folders and files of YAML."""
    from glob import escape, glob

    from gpipe_sim.scenario.reading import shipped_scenarios

    names = [file.stem for file in sorted(shipped_scenarios().glob("*.yaml")) if file.stem.startswith(incomplete)]
    paths = [path + "/" * Path(path).is_dir() for path in sorted(glob(f"{escape(incomplete)}*"))]
    return names + [path for path in paths if path.endswith(("/", ".yaml", ".yml"))]


def scenario_argument(help_text: str, metavar: str = "SCENARIO") -> Any:
    """An argument that takes a scenario by its file or name."""
    return typer.Argument(metavar=metavar, help=help_text, autocompletion=complete_scenario)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as one HTML page that opens offline.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Replace a field, such as plan.microbatches=32; repeatable."),
]

Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Also say how many days, and how much money, so many tokens take: 1T."),
]


def to_tokens(text: str | None) -> float | None:
    """What ``--tokens`` says."""
    try:
        return None if text is None else parse_tokens(text)
    except ValueError as error:
        raise InputError([Problem("--tokens", "", str(error))]) from error


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

    from gpipe_sim.show.terminal import make_console

    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda share=1.0: progress.advance(task, share)


@contextmanager
def importing(what: str, extra: str) -> Iterator[None]:
    """Around the import of something whose packages need not be installed: a missing one is told by its name."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        message = f"needs the package {package}, expected an installation with gpipe-planner[{extra}]"
        raise InputError([Problem(what, "", message)]) from error


def write_report(
    path: Path,
    predictions: "Sequence[Prediction]",
    title: str,
    tokens: float | None = None,
    *,
    chosen: "Prediction | None" = None,
    reason: str = "",
    training: "Campaign | None" = None,
) -> None:
    """The report of these predictions, of which one may have been chosen."""
    with importing("--html", "report"):
        from dashboard.report import report_page
    page = report_page(predictions, title, tokens, chosen=chosen, reason=reason, training=training)
    write(path, page, "report, to open in a browser")


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
