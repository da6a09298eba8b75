"""`gpipe init`: a scenario to begin with, every line explained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import say, write

if TYPE_CHECKING:
    from gpipe_sim.scenario.huggingface import Imported


def init(
    config: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take the model from a Hugging Face config.json."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The scenario to write; no file is replaced.")] = Path(
        "scenario.yaml"
    ),
) -> None:
    """Write a scenario with comments to begin with, if given for the model of a Hugging Face config.json."""
    from gpipe_sim.scenario.huggingface import read_config

    if out.is_file():
        raise InputError([Problem("--out", "", f"found {out}, which is there already, expected a new file")])
    imported = read_config(config) if config is not None else None
    name = out.stem if out.suffix else "scenario"
    write(out, scenario_text(name, imported), f"for gpipe simulate {out} and gpipe plan {out}")
    for sentence in imported.assumed if imported else ():
        say(f"assumed: {sentence}")


_COMMENTS = {
    "layers": "blocks; embedding, final norm and head come on top",
    "hidden": "width of the residual stream",
    "heads": "of attention",
    "kv_heads": "heads of keys and values, each shared by several of queries",
    "head_width": "where it is not hidden / heads",
    "ffn": "width of the feed-forward",
    "gated": "a third matrix gates it (SwiGLU)",
    "norm": "rms, or layer: with biases",
    "bias": "which products have biases: all, qkv or none",
    "positions": "rotary, learned or sinusoidal",
    "context": "positions that are learned",
    "dropout": "whether its masks are kept for the backward",
    "vocab": "tokens in the vocabulary",
    "tied": "whether the head's weights are the embedding's",
    "sequence": "tokens in a sample",
}


def scenario_text(name: str, imported: "Imported | None") -> str:
    """The scenario as a person would write it."""
    from gpipe_sim.base.files import yaml_text

    if imported is None:
        model = [
            ("preset: llama-3-8b", "or any that `gpipe catalog` lists; or layers, hidden, heads, vocab of your own"),
            ("sequence: 4096", _COMMENTS["sequence"]),
        ]
        kind, dtype, asks = "transformer", "bf16", "How would I train this model on one node?"
    else:
        fields = {key: value for key, value in imported.model.items() if key != "kind"}
        model = [(yaml_text({key: value}).strip(), _COMMENTS[key]) for key, value in fields.items()]
        kind, dtype, asks = (
            "transformer",
            imported.dtype,
            f"How would I train this {imported.architecture} on one node?",
        )
    lines = [
        f"# {asks}",
        "#",
        "#   gpipe simulate FILE    every plan below: step time, bubble, memory, and why",
        "#   gpipe plan FILE        the fastest plan that fits; what is left out under plan: is searched",
        "#   gpipe catalog          devices, links and models by name",
        *(f"# Assumed: {sentence}." for sentence in (imported.assumed if imported else ())),
        yaml_text({"name": name}).strip(),
        "model:",
        f"  kind: {kind}",
        *_commented(model, 2),
        *_commented(
            [
                ("batch: 64", "samples in a step, all micro-batches together"),
                (f"dtype: {dtype}", "of weights and activations: fp32, bf16, fp16"),
                ("optimizer: adam", "or sgd, momentum, rmsprop: it decides the bytes of state"),
            ],
            0,
        ),
        "cluster:",
        *_commented(
            [
                ("device: h100-80gb", "a name, or {memory: 80 GiB, compute: 989 TFLOP/s}; cpu is this machine"),
                ("memory_reserve: 2 GiB", "what the runtime keeps for itself on each device"),
                ("devices_per_node: 8", "with more than one node, also nodes: and network:"),
                ("link: nvlink4", "inside a node: a name, or {bandwidth: 450 GB/s, latency: 5 us}"),
            ],
            2,
        ),
        "plan:",
        *_commented(
            [
                ("stages: [2, 4, 8]", "pieces of the model, one on each device; a list is a sweep"),
                ("microbatches: [8, 16, 32]", "pieces of the batch"),
                ("checkpoint: [never, always]", "whether activations are computed again instead of being kept"),
                ("schedule: 1f1b", "or gpipe, interleaved_1f1b, zb_h1, auto, ..."),
            ],
            2,
        ),
    ]
    return "\n".join(lines) + "\n"


def _commented(rows: list[tuple[str, str]], indent: int) -> list[str]:
    width = max(len(text) for text, _ in rows)
    return [f"{' ' * indent}{text:<{width}}  # {comment}" for text, comment in rows]
