"""Run directories brought from another machine, as a zip file: checked strictly, and only then written, where runs are
kept."""

import io
import shutil
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from threading import Lock

from gpipe_sim.base.files import InputError, Problem, parse_json, parse_yaml, write_text
from gpipe_sim.make.planfile import parse_plan
from gpipe_sim.runs.directory import new_run_directory, parse_measured

MAX_ARCHIVE = 16 * 2**20
"""Bytes of an upload."""
MAX_FILE = 64 * 2**20
"""Bytes of one file in it, unpacked."""
MAX_RUNS = 2**30
"""Bytes of all files in the folder of runs, beyond which nothing more is taken."""
WANTED = ("plan.yaml", "measured.json", "environment.json", "predicted.json")
"""All that is taken; the first two are needed."""


def unpack_run(data: bytes, folder: Path, name: str) -> Path:
    """Make a run directory of an archive; nothing is written of one that holds no run."""
    with _one_at_a_time:
        return _unpack(data, folder, name)


_one_at_a_time = Lock()
"""An upload takes many times its bytes while it is checked, whoever sends it."""


def _unpack(data: bytes, folder: Path, name: str) -> Path:
    found = _members(data)
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if kept + sum(map(len, found.values())) > MAX_RUNS:
        message = f"there is no room for it: the runs here have {kept // 2**20} MiB, expected some to be deleted first"
        raise InputError([Problem("upload", "", message)])
    missing = [name for name in WANTED[:2] if name not in found]
    if missing:
        raise InputError([Problem("upload", missing[0], "is missing, expected the zip file of a run directory")])
    documents = {name: (parse_yaml if name == "plan.yaml" else parse_json)(text, name) for name, text in found.items()}
    parse_measured(documents["measured.json"], parse_plan(documents["plan.yaml"]))
    directory = new_run_directory(folder, PurePosixPath(name).stem)
    try:
        for member, text in found.items():
            write_text(directory / member, text)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise InputError([Problem("upload", "", f"cannot be kept here: {error.strerror}")]) from error
    return directory


_DAMAGED = (
    zipfile.BadZipFile,
    NotImplementedError,  # a compression that this Python has not
    RuntimeError,  # a password
    EOFError,
    OSError,
    OverflowError,
    ValueError,  # text that is none, offsets before the beginning
    struct.error,
    zlib.error,
)
"""What a zip file makes its reader raise that was cut off, changed, or made to confuse it."""


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
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise NotImplementedError("its compression is another than the usual one")
                with archive.open(member) as file:
                    content = file.read(MAX_FILE + 1)
                if len(content) > MAX_FILE:
                    raise InputError([Problem("upload", name, f"has more than {MAX_FILE // 2**20} MiB")])
                found[name] = content.decode()
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError([Problem("upload", "", f"is no zip file of a run directory: {error}")]) from error
    return found
