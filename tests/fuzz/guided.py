"""Coverage-guided fuzzing of the readers, by hand: `make fuzz`, or for one of them and ten minutes

    .fuzz/bin/python tests/fuzz/guided.py scenario --seconds 600

It needs atheris, which is no dependency of the project: `make fuzz` puts it into an environment of its own, `.fuzz`.
What it finds, it prints as a traceback and keeps as a file, which then becomes an example in `tests/test_fuzz.py`.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("guided.py: error: atheris is missing; `make fuzz` installs it into .fuzz, or: pip install atheris")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

with atheris.instrument_imports(include=["gpipe_sim", "ruamel"]):
    from targets import make_targets, seeds

DICTIONARY = (
    *(
        "&a ",
        "*a",
        "<<: ",
        "!!int ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!timestamp ",
        "%YAML 1.1\\x0a",
        "---\\x0a",
        "? ",
    ),
    *(
        ".nan",
        ".inf",
        "NaN",
        "1e400",
        "0x",
        "9999999999999999999",
        "\\xef\\xbb\\xbf",
        "\\\\ud800",
        "\\\\0",
        "[[[[",
        "{{{{",
    ),
    *(
        " GB/s",
        " GiB",
        " ms",
        "plan:",
        "cluster:",
        "model:",
        "kind: ",
        "per_stage: ",
        "__getitem__(",
        "activation_size=",
    ),
)


def main() -> None:
    """Parse our options and hand over to libFuzzer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "reader", choices=["scenario", "plan", "profile", "pipedream", "run", "trace"], help="what to fuzz"
    )
    parser.add_argument("--seconds", type=int, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer's luck (1)")
    arguments = parser.parse_args()
    # libFuzzer ends the process itself: the folder is left to the system's cleaning of temporary files.
    folder = Path(tempfile.mkdtemp(prefix="gpipe-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    corpus = folder / "corpus"
    corpus.mkdir()
    for index, seed in enumerate(seeds(folder)[arguments.reader]):
        (corpus / str(index)).write_bytes(seed)
    words = folder / "words"
    words.write_text("".join(f'"{word}"\n' for word in DICTIONARY))
    target = make_targets(folder)[arguments.reader]
    options = [f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}", "-timeout=20", "-rss_limit_mb=2048"]
    options += ["-max_len=8192", f"-dict={words}", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup([sys.argv[0], *options], lambda content: [target(content)].clear())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
