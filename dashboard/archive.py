"""Run directories brought from another machine, as a zip file: checked strictly, unpacked only where runs are kept."""

import io
import zipfile
from pathlib import Path, PurePosixPath

from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.runs import load_run, new_run_directory

MAX_ARCHIVE = 16 * 2**20
"""Bytes of an upload."""
MAX_FILE = 64 * 2**20
"""Bytes of one file in it, unpacked."""
WANTED = ("plan.yaml", "measured.json", "environment.json", "predicted.json")
"""All that is taken; the first two are needed."""


def unpack_run(data: bytes, folder: Path, name: str) -> Path:
    """Make a run directory of an archive; nothing is left of one that holds no run."""
    found = _members(data)
    missing = [name for name in WANTED[:2] if name not in found]
    if missing:
        raise InputError([Problem("upload", missing[0], "is missing, expected the zip file of a run directory")])
    directory = new_run_directory(folder, PurePosixPath(name).stem)
    try:
        for member, text in found.items():
            write_text(directory / member, text)
        load_run(directory)
    except (InputError, OSError):
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        raise
    return directory


def _members(data: bytes) -> dict[str, str]:
    """The wanted files by their bare name, wherever in the archive they lie."""
    if len(data) > MAX_ARCHIVE:
        raise InputError([Problem("upload", "", f"has more than {MAX_ARCHIVE // 2**20} MiB")])
    found: dict[str, str] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename).name
                if member.is_dir() or name not in WANTED or name in found:
                    continue
                with archive.open(member) as file:
                    content = file.read(MAX_FILE + 1)
                if len(content) > MAX_FILE:
                    raise InputError([Problem("upload", name, f"has more than {MAX_FILE // 2**20} MiB")])
                found[name] = content.decode()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, UnicodeDecodeError, EOFError) as error:
        raise InputError([Problem("upload", "", f"is no zip file of a run directory: {error}")]) from error
    return found
