"""A short tour of the ideas: one chart, one knob, a few sentences each."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, dcc

from dashboard import figures, ids
from dashboard.style import graph_config
from gpipe_sim.files import Document
from gpipe_sim.plan import make_plan
from gpipe_sim.predict import Prediction, predict
from gpipe_sim.sweep import parse_scenario


@dataclass(frozen=True)
class Stop:
    """One idea."""

    title: str
    text: str
    knob: str
    """The field that its knob turns: plan.stages or plan.microbatches."""
    default: int
    most: int
    plan: tuple[tuple[str, Any], ...]


STOPS = (
    Stop(
        "Naive model parallelism",
        "The layers of a model are cut into stages, one on each device. The whole batch goes through all of them and "
        "back: while one device works, the others wait. With K stages, K-1 of K device-hours are idle.",
        "plan.stages",
        4,
        8,
        (("schedule", "naive"), ("checkpoint", "never")),
    ),
    Stop(
        "Micro-batches",
        "GPipe cuts the batch into M micro-batches. A device passes each on as soon as it is done with it, so that "
        "all of them soon have work. Gradients add up: the result is that of the whole batch.",
        "plan.microbatches",
        4,
        16,
        (("stages", 4), ("checkpoint", "never")),
    ),
    Stop(
        "The bubble",
        "Filling and draining the pipeline leaves a bubble of (K-1)/(M+K-1) at best. More micro-batches make it "
        "smaller, until each is so small that a device is no longer well used.",
        "plan.microbatches",
        8,
        32,
        (("stages", 4), ("checkpoint", "never")),
    ),
    Stop(
        "Checkpointing",
        "Instead of keeping every activation until the backward needs it, a stage keeps its inputs and computes the "
        "rest again: light blue. It costs a forward more, and memory falls from N L / K to N + (L/K)(N/M).",
        "plan.microbatches",
        8,
        16,
        (("stages", 4), ("checkpoint", "always"), ("recompute", "on_demand")),
    ),
    Stop(
        "Early recomputation",
        "A device that waits for a gradient may as well recompute already. What was bubble is used, and the step is "
        "shorter than with recomputation on demand.",
        "plan.microbatches",
        8,
        16,
        (("stages", 4), ("checkpoint", "always"), ("recompute", "early")),
    ),
    Stop(
        "1F1B",
        "As soon as the first micro-batch is through, forwards and backwards alternate. The bubble is the same, but "
        "stage k holds at most K-k micro-batches instead of all M.",
        "plan.microbatches",
        8,
        16,
        (("stages", 4), ("checkpoint", "never"), ("schedule", "1f1b")),
    ),
)


@lru_cache(maxsize=64)
def example(index: int, value: int) -> Prediction:
    """The stop's plan with its knob at this value: equal layers, free links."""
    stop = STOPS[index]
    layer = {"name": "layer", "repeat": 8, "forward": "1 ms", "backward": "2 ms", "output": "4 MB", "saved": "40 MB"}
    chosen = dict(stop.plan) | {stop.knob.removeprefix("plan."): value}
    data = {
        "name": "tour",
        "model": {"kind": "layers", "layers": [layer | {"parameters": "50 MB"}]},
        "batch": 32,
        "dtype": "bf16",
        "cluster": {"device": "a100-80gb", "link": {"bandwidth": "inf GB/s", "latency": "0 s"}},
        "plan": chosen,
    }
    (point,) = parse_scenario(Document("tour", data))
    return predict(make_plan(point), keep_step=True)


def shown(index: int, value: int) -> tuple[Any, ...]:
    """Text, knob's label, numbers and chart of a stop with its knob at this value."""
    stop = STOPS[index]
    prediction = example(index, max(1, min(int(value), stop.most)))
    name = {"plan.stages": "stages K", "plan.microbatches": "micro-batches M"}[stop.knob]
    peak = max(prediction.peak_memory_bytes) / 2**20
    numbers = (
        f"step {1e3 * prediction.step_time_s:.4g} ms, bubble {prediction.bubble_fraction:.1%} "
        f"(closed form {prediction.bubble_ideal:.1%}), peak memory {peak:.0f} MiB"
    )
    return stop.text, f"{name}: {value}", numbers, figures.gantt(prediction.step)


def tour_panel() -> dmc.Stack:
    """The stops, and what the first one shows."""
    text, label, numbers, chart = shown(0, STOPS[0].default)
    return dmc.Stack(
        [
            dmc.SegmentedControl(
                id=ids.TOUR_STEP,
                data=[{"label": f"{i + 1}. {stop.title}", "value": str(i)} for i, stop in enumerate(STOPS)],
                value="0",
                orientation="horizontal",
                style={"flexWrap": "wrap"},
                **{"aria-label": "stops of the tour"},
            ),
            dmc.Text(text, id=ids.TOUR_TEXT, maw=800),
            dmc.Text(label, id=ids.TOUR_KNOB_LABEL, size="sm", fw=500),
            dmc.Slider(
                id=ids.TOUR_KNOB,
                min=1,
                max=STOPS[0].most,
                step=1,
                value=STOPS[0].default,
                maw=420,
                thumbLabel="knob of this stop",
            ),
            dmc.Text(numbers, id=ids.TOUR_NUMBERS, fw=600),
            dcc.Graph(figure=chart, id=ids.TOUR_CHART, config=graph_config()),
        ]
    )


def register(app: dash.Dash) -> None:
    """The tour has no state but its own."""

    @app.callback(
        Output(ids.TOUR_KNOB, "max"),
        Output(ids.TOUR_KNOB, "value"),
        Input(ids.TOUR_STEP, "value"),
        prevent_initial_call=True,
    )
    def go(step: str) -> tuple[int, int]:
        stop = STOPS[int(step)]
        return stop.most, stop.default

    @app.callback(
        Output(ids.TOUR_TEXT, "children"),
        Output(ids.TOUR_KNOB_LABEL, "children"),
        Output(ids.TOUR_NUMBERS, "children"),
        Output(ids.TOUR_CHART, "figure"),
        Input(ids.TOUR_STEP, "value"),
        Input(ids.TOUR_KNOB, "value"),
        prevent_initial_call=True,
    )
    def show(step: str, value: int) -> tuple[Any, ...]:
        return shown(int(step), value)
