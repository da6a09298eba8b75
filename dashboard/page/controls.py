"""Controls to the state and back: what was turned since the page last heard from here, and what it should show now.

A page and its server each know something the other may not: the page what was turned or typed a moment ago, the server
what that means. A response may be dropped because another knob was turned meanwhile. So the page keeps, beside the
controls, what the server last put there; whatever differs from it was turned by a person and is not yet in the address.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dashboard.page import form, ids, knobs
from dashboard.page.state import Library, State, current, on_screen, settled
from gpipe_sim.base.files import InputError

KNOBS: Mapping[str, str] = {
    ids.SCENARIO: "value",
    **{knob: "checked" if knob == ids.OVERLAP else "value" for knob in ids.KNOBS},
    ids.CRITICAL: "checked",
}
"""What is always in sight, and the property that holds its value."""
FORM: Mapping[str, str] = {name: field.property for name, field in form.FIELDS.items()}
"""The fields of the form, which are only brought up to date while they are looked at."""
CONTROLS: Mapping[str, str] = {**KNOBS, **FORM}
"""Every control that the address depends on."""

Values = Mapping[str, Any]


def turned_since(values: Values, last_shown: Values | None) -> dict[str, Any]:
    """What a person has turned: it differs from what was last shown."""
    if last_shown is None:
        return {}
    return {name: value for name, value in values.items() if name in last_shown and value != last_shown[name]}


def steered(state: State, library: Library, turned: Values) -> State:
    """The state after these controls were turned."""
    if ids.SCENARIO in turned:
        return State(scenario=turned[ids.SCENARIO], pins=state.pins) if turned[ids.SCENARIO] else state
    for name, value in turned.items():
        if name == ids.CRITICAL:
            state = replace(state, critical=bool(value))
        elif name in form.FIELDS:
            state = form.filled(state, name, value)
        else:  # a knob turns the plan on screen: what was swept stays at its values
            plan = None
            with suppress(InputError):
                plan, state = current(state, library).plan, settled(state, library)
            state = knobs.turned(state, plan, name, value)
    return state


def shown(state: State, library: Library) -> dict[str, Any]:
    """What each control should show; those that only a right scenario can fill are absent where it is wrong."""
    found: dict[str, Any] = {ids.SCENARIO: state.scenario, ids.CRITICAL: state.critical}
    with suppress(InputError):
        found |= form.shown(on_screen(state, library).data)
    with suppress(InputError):
        found |= knobs.shown(current(state, library).plan)
    return found
