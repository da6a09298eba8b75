"""Colours, the same in the terminal, the report and the dashboard; safe for colour-blind readers (Okabe and Ito)."""

from collections.abc import Mapping, Sequence

from gpipe_sim.plan import actions

_IN_LEGENDS = sorted(actions.KINDS.values(), key=lambda kind: not kind.computes)
"""The update comes last."""
KINDS: Mapping[str, str] = {kind.letter: kind.colour for kind in _IN_LEGENDS}
"""Kind of action -> its colour."""
KIND_NAMES: Mapping[str, str] = {kind.letter: kind.name for kind in _IN_LEGENDS}


def shade(colour: str, stage: int, held: Sequence[int]) -> str:
    """The colour for one of the stages that a rank holds: that of the first as it is, the later ones lighter."""
    share = 0.55 * held.index(stage) / max(len(held) - 1, 1)
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)


LANES: Mapping[str, str] = {"send": "#CC79A7", "receive": "#BBBBBB"}
"""Messages on their way, and the time spent waiting for one."""

CRITICAL = "#D55E00"
"""The critical path, and whatever does not fit."""

MEMORY: Mapping[str, str] = {
    "parameters": "#9B7FD4",
    "optimizer": "#B9A3E3",
    "gradients": "#DACBF2",
    "inputs": "#E3C4B4",
    "activations": "#B57B66",
    "workspace": "#9C6B5C",
    "buffers": "#999999",
}
"""Violet is the model, brown the data: no colour of these is one of time."""

BREAKDOWN: Mapping[str, str] = {
    "compute": "#0072B2",
    "tensor": "#332288",
    "small_batches": "#F0E442",
    "recompute": "#56B4E9",
    "imbalance": "#D55E00",
    "fill_drain": "#BBBBBB",
    "overhead": "#666666",
    "communication": "#CC79A7",
    "contention": "#882255",
    "jitter": "#44AA99",
    "update": "#009E73",
    "collectives": "#AA4499",
}

LOSS_COLOURS: Mapping[str, str] = {
    "useful": "#0072B2",
    "checkpoints": "#009E73",
    "lost work": "#D55E00",
    "detection": "#F0E442",
    "restart": "#E69F00",
    "waiting": "#BBBBBB",
    "fewer replicas": "#56B4E9",
}
"""What the time of a training of weeks goes to."""
