"""How much a file may ask for, and how much of it a message quotes.

A question beyond these limits is a slip of the pen, or hostile; each limit is told where it is met. They are far from
anything real: GPipe's largest model has 1,663 layers on 128 devices. Within them a reader ends in seconds, and within a
laptop's memory.
"""

FILE_BYTES = 64 * 2**20
"""Of any file that is read."""
TRACE_BYTES = 2**30
"""Of a trace of torch's profiler, uncompressed: it has every operator and kernel of a rank."""
EVENT_CHARACTERS = 2**22
"""Of a value in it: an event, or a list that describes the devices."""
YAML_CHARACTERS = 2**20
"""Of a YAML file, beside the blocks of text in it, such as a plan's profile: comments and quotes are slow to read."""
YAML_LINES_BESIDE = 2**16
"""The same: more than it may have values."""
YAML_LINES = 2**21
"""Of a YAML file with those blocks; a profile has one for each number."""
YAML_VALUES = 50_000
"""Keys, entries and values in a YAML file, those that an alias repeats counted every time."""
YAML_DEPTH = 40
"""Mappings and lists within each other; a scenario needs six."""
JSON_DEPTH = 40
"""The same of JSON; a profile needs four."""
JSON_VALUES = 2**22
"""Entries of the lists and mappings of a JSON file, which take up to thirty times the bytes of their text; as many
numbers as measurements usually have in the largest file."""
JSON_LISTS = 2**20
"""Lists and mappings of a JSON file: an empty one takes thirty times the bytes of its text."""
TEXT = 200
"""Characters of a value that a message quotes."""
PROBLEMS = 50
"""Mistakes that are told of one file."""

LAYERS = 10_000
"""Of a model."""
CELLS = 2**23
"""Stages times micro-batches of a plan."""
POINTS = 20_000
"""Of a sweep."""
SAMPLES = 100_000
"""Of jitter."""
STEPS = 100_000
"""Of a run."""
NOTES = 1_000
"""Names and texts that a profile may have about where it was made."""

AMOUNT = 1e18
"""Bytes, or seconds, of anything that is written: products of a few of these are still far from infinity."""
FACTOR = 1e6
"""By which a device may be slower than another."""


def shown(value: object) -> str:
    """A value as the file has it: YAML's words for nothing and for truth, Python's quotes for text; not all of it if it
    is long."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(shortened(value))
    return shortened(value)


def shortened(value: object) -> str:
    """Anything as text of a length that can be read; even a number with more digits than Python prints."""
    if isinstance(value, str):
        text: str = value
    elif isinstance(value, int) and value.bit_length() > 4 * TEXT:
        return f"a number of about {round(value.bit_length() * 0.30103)} digits"
    else:
        try:
            text = repr(value) if isinstance(value, int | float | list | dict) else str(value)
        except (ValueError, RecursionError):  # a number in it is too long to be printed, or it is too deep
            return f"a {type(value).__name__}"
    return text if len(text) <= TEXT else f"{text[: TEXT - 3]}..."
