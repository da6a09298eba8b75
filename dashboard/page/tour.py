"""A short tour of the ideas: one timeline, one knob, a few sentences each, and what was before."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, html
from dash import State as Given

from dashboard.charts.timeline import timeline_data
from dashboard.page import ids
from gpipe_sim.base.files import Document
from gpipe_sim.explain.predict import Prediction, predict
from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.step.metrics import step_time_s


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
    Stop(
        "Several stages on a rank",
        "Each device holds two shorter pieces of the model instead of one, and a micro-batch goes around twice. Filling"
        " and draining take half as long; more messages are sent, and more micro-batches are held.",
        "plan.microbatches",
        8,
        16,
        (("stages", 8), ("stages_per_rank", 2), ("checkpoint", "never"), ("schedule", "interleaved_1f1b")),
    ),
    Stop(
        "Backwards in two halves",
        "Only the gradient of a stage's input is waited for: brown. That of its weights, yellow, can come any time "
        "later, and fills what would be bubble.",
        "plan.microbatches",
        8,
        16,
        (("stages", 4), ("checkpoint", "never"), ("schedule", "zb_h1")),
    ),
)


@lru_cache(maxsize=64)
def example(index: int, value: int) -> Prediction:
    """The stop's plan with its knob at this value: equal layers, free links."""
    stop = STOPS[index]
    layer = {"name": "layer", "repeat": 8, "forward": "1 ms", "backward": "2 ms", "backward_weights": "1 ms"}
    layer |= {"output": "4 MB", "saved": "40 MB"}
    chosen = dict(stop.plan) | {stop.knob.removeprefix("plan."): value}
    data = {
        "name": "tour",
        "model": {"kind": "layers", "layers": [layer | {"parameters": "50 MB"}]},
        "batch": 32,
        "dtype": "bf16",
        "cluster": {"device": {"memory": "4 GiB"}, "link": {"bandwidth": "inf GB/s", "latency": "0 s"}},
        "plan": chosen,
    }
    (point,) = parse_scenario(Document("tour", data))
    return predict(make_plan(point), keep_step=True)


def numbers(prediction: Prediction) -> str:
    """What a stop's chart comes to."""
    peak = max(prediction.peak_memory_bytes) / 2**20
    return (
        f"step {1e3 * prediction.step_time_s:.4g} ms, bubble {prediction.bubble_fraction:.1%} "
        f"(closed form {prediction.bubble_ideal:.1%}), peak memory {peak:.0f} MiB"
    )


def shown(index: int, value: int) -> tuple[Any, ...]:
    """Text, knob's label, numbers and timeline of a stop with its knob at this value, and of the stop before it.

    Both have one axis, which stays where it is while the knob is turned: what is shorter is seen to be.
    """
    stop = STOPS[index]
    value = max(1, min(int(value), stop.most))
    prediction = example(index, value)
    name = {"plan.stages": "ranks K", "plan.microbatches": "micro-batches M"}[stop.knob]
    before = example(index - 1, STOPS[index - 1].default) if index else None
    others = [example(index, stop.default), *([before] if before else [])]
    axis_s = max(step_time_s(one.step) for one in (*others, prediction))
    chart = timeline_data(prediction.plan, prediction.step, axis_s=axis_s)
    return stop.text, f"{name}: {value}", numbers(prediction), chart, _before(index, before, axis_s)


def _before(index: int, before: Prediction | None, axis_s: float) -> Any:
    """The stop before, to compare with; nothing at the first."""
    if before is None:
        return None
    chart: Any = {"data-timeline": timeline_data(before.plan, before.step, axis_s=axis_s)}
    return [
        dmc.Text(f"Before: {STOPS[index - 1].title.lower()}, {numbers(before)}", size="sm", className="quiet", mt="md"),
        html.Div(id="tour-chart-before", className="timeline", **chart),
    ]


def tour_panel() -> dmc.Stack:
    """The stops, and what the first one shows."""
    text, label, told, chart, before = shown(0, STOPS[0].default)
    drawing: Any = {"data-timeline": chart}
    return dmc.Stack(
        [
            dmc.Group(
                [
                    dmc.Button("Back", id=ids.TOUR_BACK, variant="default", disabled=True),
                    dmc.Select(
                        id=ids.TOUR_STEP,
                        data=[{"label": f"{i + 1}. {stop.title}", "value": str(i)} for i, stop in enumerate(STOPS)],
                        value="0",
                        allowDeselect=False,
                        w=280,
                        **{"aria-label": "stops of the tour"},
                    ),
                    dmc.Button("Next", id=ids.TOUR_NEXT),
                ],
                gap="xs",
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
                updatemode="drag",
            ),
            dmc.Text(told, id=ids.TOUR_NUMBERS, fw=600),
            html.Div(id=ids.TOUR_CHART, className="timeline", **drawing),
            html.Div(before, id=ids.TOUR_BEFORE),
        ]
    )


_WALK = """(back, next, step) => {
    const by = dash_clientside.callback_context.triggered_id === 'tour-back' ? -1 : 1;
    return String(Math.min(Math.max(Number(step) + by, 0), LAST));
}"""


def register(app: dash.Dash) -> None:
    """The tour has no state but its own."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        _WALK.replace("LAST", str(len(STOPS) - 1)),
        Output(ids.TOUR_STEP, "value"),
        Input(ids.TOUR_BACK, "n_clicks"),
        Input(ids.TOUR_NEXT, "n_clicks"),
        Given(ids.TOUR_STEP, "value"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output(ids.TOUR_KNOB, "max"),
        Output(ids.TOUR_KNOB, "value"),
        Output(ids.TOUR_BACK, "disabled"),
        Output(ids.TOUR_NEXT, "disabled"),
        Input(ids.TOUR_STEP, "value"),
        prevent_initial_call=True,
    )
    def go(step: str) -> tuple[int, int, bool, bool]:
        stop = STOPS[int(step)]
        return stop.most, stop.default, int(step) == 0, int(step) == len(STOPS) - 1

    @app.callback(
        Output(ids.TOUR_TEXT, "children"),
        Output(ids.TOUR_KNOB_LABEL, "children"),
        Output(ids.TOUR_NUMBERS, "children"),
        Output(ids.TOUR_CHART, "data-timeline"),
        Output(ids.TOUR_BEFORE, "children"),
        Input(ids.TOUR_STEP, "value"),
        Input(ids.TOUR_KNOB, "value"),
        prevent_initial_call=True,
    )
    def show(step: str, value: int) -> tuple[Any, ...]:
        return shown(int(step), value)
