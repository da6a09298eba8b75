"""`gpipe export`: the chosen plan for people who run it elsewhere."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import say, scenario_argument, write


class Target(StrEnum):
    """What a plan can be exported for."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    SLURM = "slurm"
    TORCHRUN = "torchrun"
    KUBERNETES = "kubernetes"
    CSV = "csv"


def export(
    plan_file: Annotated[Path, scenario_argument("A plan file, or a scenario with a single plan.", "PLAN")],
    to: Annotated[
        Target,
        typer.Option(
            help="Whose flags or config to write; slurm, torchrun and kubernetes run our own engine, csv is the order, "
            "for torch."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file instead of standard output.")
    ] = None,
) -> None:
    """Write a plan as another project's flags or config, and say what of it cannot be expressed there."""
    from gpipe_sim.export.frameworks import export_plan
    from gpipe_sim.make.planfile import read_plan

    try:
        str(plan_file).encode()
    except UnicodeEncodeError as error:
        message = "has a name that is not text in UTF-8, expected one that can be written into what is exported"
        raise InputError([Problem(str(plan_file), "", message)]) from error
    exported = export_plan(read_plan(plan_file), to.value, plan_path=str(plan_file))
    if out is None:
        typer.echo(exported.text, nl=False)
    else:
        write(out, exported.text, f"for {to.value}")
    for sentence in exported.cannot:
        say(sentence)
