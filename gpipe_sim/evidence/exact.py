"""Published figures that follow from published inputs.

A tolerance says what the inputs leave open: the digits that were printed, or what a count may leave out. It is the same
for all figures of one sort.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gpipe_sim.cost.amoebanet import shapes
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.evidence.fits import GiB, plan_of, transformer_model, zero_bubble_plan
from gpipe_sim.evidence.literature import Figure, PublishedTable, Value, printed, published_tables
from gpipe_sim.plan.plan import Plan
from gpipe_sim.step.memory import step_bytes
from gpipe_sim.step.metrics import bubble_fraction, longest_rank_span_s, pipeline_time_s
from gpipe_sim.step.simulate import simulate

GB = 1e9
_COUNTING = 0.01
_COUNTED = "1 % for what a count may leave out (biases, norms, positions), and the printed digits"
_DIGITS = "the printed digits"


# --- parameters and their memory -------------------------------------------------------------------------------------


def transformer_sizes() -> Iterator[Figure]:
    """Parameters of GPipe's Transformers, and what they take with their gradients and optimizer state."""
    table = published_tables()["gpipe_table1_transformer"]
    for row in table.rows:
        plan = plan_of(
            transformer_model(row["layers"]),
            32,
            {"stages": row["stages"], "microbatches": 1},
            dtype="bf16",
            optimizer="rmsprop",
            cluster={"device": "tpu-v3-core"},
        )
        held = step_bytes([plan])
        count, memory = printed(row["parameters"]), printed(row["model"])
        yield Figure(
            table=table.name,
            name=f"{row['config']}, parameters",
            unit="billion",
            kind="exact",
            published=count.value / 1e9,
            predicted=float(plan.profile.parameter_bytes.sum()) / bytes_per_parameter("rmsprop", "bf16").weight / 1e9,
            basis="layers, widths and vocabulary",
            tolerance=_COUNTING + count.rounding,
            allowance=_COUNTED,
        )
        yield Figure(
            table=table.name,
            name=f"{row['config']}, model",
            unit="GiB",
            kind="exact",
            published=memory.value,
            predicted=float((held.parameters + held.optimizer + held.gradients).sum()) / GiB,
            basis="layers, widths, vocabulary and RMSProp",
            tolerance=_COUNTING + memory.rounding,
            allowance=_COUNTED,
        )


def _amoebanet_sizes(name: str, unit: str, unit_bytes: float) -> Iterator[Figure]:
    table = published_tables()[name]
    for row in table.rows:
        count, memory = printed(row["parameters"]), printed(row["model"])
        yield Figure(
            table=name,
            name=f"{row['config']}, {row['model_name']}, parameters",
            unit="million",
            kind="exact",
            published=count.value / 1e6,
            predicted=sum(layer.parameters for layer in shapes(row["L"], row["D"])) / 1e6,
            basis="the cells of AmoebaNet-D, L, D and 1,000 classes",
            tolerance=_COUNTING + count.rounding,
            allowance=_COUNTED,
        )
        yield Figure(
            table=name,
            name=f"{row['config']}, {row['model_name']}, model",
            unit=unit,
            kind="exact",
            published=memory.value,
            predicted=count.value * sum(bytes_per_parameter("rmsprop", "fp32")) / unit_bytes,
            basis="the published count of parameters and RMSProp",
            tolerance=_COUNTING + count.rounding + memory.rounding,
            allowance=_COUNTED,
            known=row.get("contradiction", ""),
        )


def gpipe_amoebanet() -> Iterator[Figure]:
    """What GPipe's AmoebaNets take, from its own counts of parameters."""
    return _amoebanet_sizes("gpipe_table1_amoebanet", "GB", GB)


def torchgpipe_amoebanet() -> Iterator[Figure]:
    """The same, as torchgpipe counted and measured it."""
    return _amoebanet_sizes("torchgpipe_memory", "GiB", GiB)


# --- Zero Bubble -----------------------------------------------------------------------------------------------------


def zero_bubble() -> Iterator[Figure]:
    """Bubbles from profiled times, and the memory of the fullest stage from the model's shape."""
    table = published_tables()["zero_bubble"]
    yield from _zero_bubble_rates(table)
    for row in table.rows:
        rate = printed(row["bubble"])
        yield Figure(
            table=table.name,
            name=f"{row['model']}, m={row['m']}, bubble rate",
            kind="exact",
            published=rate.value,
            predicted=bubble_fraction(simulate(zero_bubble_plan(row), memory=False)),
            basis="profiled forward, backward and communication",
            tolerance=rate.rounding,
            allowance=_DIGITS,
        )
    for name, model in table.models.items():
        memory = printed(model["memory_GB"])
        yield Figure(
            table=table.name,
            name=f"{name}, memory of the fullest GPU",
            unit="GB",
            kind="exact",
            published=memory.value,
            predicted=max(curve.peak_bytes for curve in simulate(_zero_bubble_model(model)).memory) / GB,
            basis="the model's shape, Adam in mixed precision, 1F1B",
            tolerance=0.05 + memory.rounding,
            allowance="5 % for the runtime's own memory, and the printed digits",
        )


def _zero_bubble_rates(table: PublishedTable) -> Iterator[Figure]:
    """Of split and interleaved schedules: what of the longest rank's span is not compute."""
    for row in table.rows:
        v, work = table.models[row["model"]]["stages_per_rank"], sum(float(row[name]) for name in ("F", "B", "W"))
        spans = {
            name: longest_rank_span_s(simulate(zero_bubble_plan(row, schedule, each), memory=False))
            for name, schedule, each in (
                ("zb_h1", "zb_h1", 1),
                ("zb_h2", "zb_h2", 1),
                ("interleaved", "interleaved_1f1b", v),
            )
        }
        # The authors' formula of the interleaved cost has p communications less than Megatron-LM's own order takes.
        spans["interleaved"] -= 8 * float(row["comm"]) / 1e3
        for name, span in spans.items():
            rate = printed(row[name])
            yield Figure(
                table=table.name,
                name=f"{row['model']}, m={row['m']}, bubble rate of {_ZERO_BUBBLE_NAMES[name]}",
                kind="exact",
                published=rate.value,
                predicted=1 - row["m"] * work / 1e3 / span,
                basis="profiled forward, both halves of the backward and communication",
                tolerance=rate.rounding,
                allowance=_DIGITS,
            )


_ZERO_BUBBLE_NAMES = {"zb_h1": "ZB-H1", "zb_h2": "ZB-H2", "interleaved": "1F1B-I, by its formula"}


def _zero_bubble_model(model: Mapping[str, Any]) -> Plan:
    """Its vocabulary is not published; it weighs on the first and last stage only, which are not the fullest."""
    shape = {name: model[name] for name in ("layers", "heads", "hidden", "sequence")}
    per_stage = -(-model["layers"] // model["stages"])
    ends, middle = per_stage - 1, [per_stage] * (model["stages"] - 2)
    return plan_of(
        {"kind": "transformer", "vocab": 50304, "attention": "classic"} | shape,
        24 * model["microbatch"],
        {
            "stages": model["stages"],
            "microbatches": 24,
            "schedule": "1f1b",
            "balance": [1 + ends, *middle, ends + 2],
            "window": 2,
        },
        dtype="fp16",
        cluster={"device": "a100-80gb"},
    )


# --- Korthikanti et al. ----------------------------------------------------------------------------------------------


def korthikanti_memory() -> Iterator[Figure]:
    """What a layer keeps, and how many micro-batches' worth of it a stage holds."""
    table = published_tables()["korthikanti_memory"]

    def exact(name: str, unit: str, published: Value, predicted: Value, basis: str, tolerance: float = 1e-9) -> Figure:
        allowance = "a formula" if tolerance < 1e-6 else _DIGITS
        return Figure(
            table=table.name,
            name=name,
            unit=unit,
            kind="exact",
            published=published,
            predicted=predicted,
            basis=basis,
            tolerance=tolerance,
            allowance=allowance,
        )

    for row in table.rows:
        name, per, shape = row["model"], "bytes per s b h", "heads, width and sequence"
        whole = row["linear"] + row["quadratic"]
        kept = _layer_bytes(row, "classic", "activations", "never")
        selective = _layer_bytes(row, "flash", "activations", "never")
        yield exact(f"{name}, a layer without recompute", per, whole, kept, shape)
        yield exact(f"{name}, a layer with selective recompute", per, row["selective"], selective, shape)
        yield exact(
            f"{name}, a layer with full recompute",
            per,
            row["full"],
            _layer_bytes(row, "classic", "inputs", "always"),
            shape,
        )
        saving = printed(row["saving"])
        yield exact(
            f"{name}, saved by selective recompute",
            "%",
            saving.value,
            100 * (1 - selective / kept),
            shape,
            saving.rounding,
        )
    stages = (2, 4, 8)
    gpt3 = table.rows[0]
    yield exact(
        "GPT-3, all that 1F1B's first stage holds, p=2, 4, 8",
        "bytes per s b h L",
        (gpt3["linear"] + gpt3["quadratic"],) * len(stages),
        tuple(_first_stage_bytes(gpt3, p) for p in stages),
        "heads, width, sequence; L layers' worth whatever p is",
    )
    p = 8
    layer = {"name": "stage", "repeat": p, "forward": "1 s", "saved": "1 MB"}
    plan = plan_of({"kind": "layers", "layers": [layer]}, 16, {"stages": p, "microbatches": 16, "schedule": "1f1b"})
    held = tuple(float(curve.parts["activations"].max()) / 1e6 for curve in simulate(plan).memory)
    yield exact("micro-batches that stage 0 ... 7 holds", "", tuple(float(p - S) for S in range(p)), held, "p - S")


def _layer_bytes(row: Mapping[str, Any], attention: str, part: str, checkpoint: str) -> float:
    """What a stage that is a single block holds of one micro-batch, in units of s b h."""
    plan = _transformer(row, 3, attention, {"stages": 3, "balance": [2, 1, 2 + 1], "checkpoint": checkpoint}, 1)
    return float(simulate(plan).memory[1].parts[part].max() / (row["sequence"] * row["hidden"]))


def _first_stage_bytes(row: Mapping[str, Any], p: int) -> float:
    """What 1F1B's first stage holds, its embedding left out, in units of s b h L."""
    per_stage = row["layers"] // p
    choices = {"stages": p, "schedule": "1f1b", "balance": [1 + per_stage, *[per_stage] * (p - 2), per_stage + 2]}
    plan = _transformer(row, row["layers"], "classic", choices, 2 * p)
    embedding = p * float(plan.profile.at(1).saved_bytes[0])
    held = float(simulate(plan).memory[0].parts["activations"].max())
    return float((held - embedding) / (row["sequence"] * row["hidden"] * row["layers"]))


def _transformer(row: Mapping[str, Any], layers: int, attention: str, choices: Mapping[str, Any], M: int) -> Plan:
    shape = {name: row[name] for name in ("heads", "hidden", "sequence")}
    model = {"kind": "transformer", "layers": layers, "vocab": 51200, "attention": attention} | shape
    return plan_of(model, M, {"microbatches": M} | dict(choices), dtype="fp16", cluster={"device": "a100-80gb"})


def korthikanti_times() -> Iterator[Figure]:
    """What recomputing a layer adds to its backward."""
    table = published_tables()["korthikanti_table4"]
    (row,) = table.rows
    forward, backward = printed(row["forward"]), printed(row["backward"])
    layer = {"name": "layer", "forward": f"{row['forward']} ms", "backward": f"{row['backward']} ms"}
    plan = plan_of({"kind": "layers", "layers": [layer]}, 1, {"stages": 1, "microbatches": 1, "checkpoint": "always"})
    total_ms = 1e3 * pipeline_time_s(simulate(plan))
    without_ms = forward.value + backward.value
    rounding = 2 * forward.half_unit + backward.half_unit
    for name, unit, text, predicted, slack in (
        ("backward with full recompute", "ms", row["backward_recompute"], total_ms - forward.value, rounding),
        ("forward and backward with full recompute", "ms", row["total_recompute"], total_ms, rounding),
        ("overhead of full recompute", "%", row["overhead"], 100 * (total_ms / without_ms - 1), 0.0),
    ):
        value = printed(text)
        yield Figure(
            table=table.name,
            name=name,
            unit=unit,
            kind="exact",
            published=value.value,
            predicted=predicted,
            basis="forward and backward without recompute",
            tolerance=(value.half_unit + slack) / value.value,
            allowance=_DIGITS,
        )


# --- Boehm -----------------------------------------------------------------------------------------------------------


def boehm() -> Iterator[Figure]:
    """Steps and micro-batches that can be counted on a diagram."""
    table = published_tables()["boehm"]
    (row,) = table.rows
    layer = {"name": "stage", "repeat": 4, "forward": "1 s", "backward": "1 s", "saved": "1 MB"}

    def plan(M: int, schedule: str) -> Plan:
        choices = {"stages": 4, "microbatches": M, "schedule": schedule}
        return plan_of({"kind": "layers", "layers": [layer]}, M, choices)

    def exact(name: str, published: float, predicted: float) -> Figure:
        return Figure(
            table=table.name,
            name=name,
            kind="exact",
            published=published,
            predicted=predicted,
            basis="the schedule alone",
            tolerance=1e-9,
            allowance="counted",
        )

    steps = pipeline_time_s(simulate(plan(row["microbatches"], "gpipe")))
    yield exact("unit steps of GPipe with 4 micro-batches", row["steps"], steps)
    for schedule, held in row["held"].items():
        curve = simulate(plan(row["held_microbatches"], schedule)).memory[0]
        yield exact(f"micro-batches of 8 that {schedule} holds", held, float(curve.parts["activations"].max()) / 1e6)
