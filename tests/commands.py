"""The command line, called as a person would."""

import pytest

from gpipe_sim.cli import main


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return int(exit_.value.code or 0), output.out, output.err
