"""Published figures whose inputs are not published: only their order or direction is claimed."""

from collections.abc import Iterator, Mapping, Sequence

from gpipe_sim.evidence.fits import amoebanet_costs, amoebanet_plan, recompute_share, two_partitions
from gpipe_sim.evidence.literature import Figure, printed, published_tables
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios
from gpipe_sim.step.evaluate import evaluate
from gpipe_sim.step.metrics import bubble_fraction, bubble_ideal
from gpipe_sim.step.simulate import simulate

_STAGES, _MICROBATCHES = (2, 4, 8), (1, 4, 32)


def table2() -> Iterator[Figure]:
    """The direction along each row and column of the table, for both models."""
    transformer = [make_plan(point) for point in load_scenario(shipped_scenarios() / "gpipe_transformer48.yaml")]
    amoebanet = [amoebanet_plan(amoebanet_costs(), K, M, 256, "always", None) for K in _STAGES for M in _MICROBATCHES]
    yield from _trends("Transformer-48", transformer, "scenarios/gpipe_transformer48.yaml")
    yield from _trends(
        "AmoebaNet-D (18, 256)", amoebanet, "costs fitted to torchgpipe's n=2, batch 256, cut for balance"
    )


def _trends(model: str, plans: Sequence[Plan], what: str) -> Iterator[Figure]:
    """The direction along every row and column of a model's part of the table, and what micro-batches do to scaling."""
    steps = evaluate(plans, memory=False)
    ours = {
        (plan.num_stages, plan.num_microbatches): plan.scenario.batch / step.step_time_s
        for plan, step in zip(plans, steps, strict=True)
    }
    rows = [row for row in published_tables()["gpipe_table2"].rows if row["model"] == model]
    theirs = {(K, row["M"]): printed(row[str(K)]).value for row in rows for K in _STAGES}

    def trend(name: str, claim: str, cells: Sequence[tuple[int, int]], base: Sequence[tuple[int, int]] = ()) -> Figure:
        """Of these cells or, if there is a base, of what each gains over its own."""

        def values(table: Mapping[tuple[int, int], float]) -> tuple[float, ...]:
            under = [table[cell] for cell in base] or [table[2, 1]] * len(cells)
            return tuple(table[cell] / one for cell, one in zip(cells, under, strict=True))

        return Figure(
            table="gpipe_table2",
            name=f"{model}, {name}",
            kind="trend",
            published=values(theirs),
            predicted=values(ours),
            basis=f"{claim}; {what}",
        )

    for K in _STAGES:
        yield trend(f"K={K}, M=1, 4, 32", "up or down with M", [(K, M) for M in _MICROBATCHES])
    for M in _MICROBATCHES:
        yield trend(f"M={M}, K=2, 4, 8", "up or down with K", [(K, M) for K in _STAGES])
    wide, narrow = ([(K, M) for M in _MICROBATCHES] for K in (8, 2))
    yield trend("gain of K=8 over 2, M=1, 4, 32", "more micro-batches, more gain", wide, narrow)


# --- GPipe, overhead breakdown ---------------------------------------------------------------------------------------


def early_recompute() -> Iterator[Figure]:
    """Whether recomputing early makes the bubble smaller than (K-1)/(M+K-1), and what takes most of a step."""
    table = published_tables()["gpipe_breakdown"]
    early = {M: bubble_fraction(simulate(two_partitions(M, "early"), memory=False)) for M in range(1, 33)}
    is_below = all(bubble < bubble_ideal("gpipe", 2, M) for M, bubble in early.items())
    yield Figure(
        table=table.name,
        name="bubble with early recompute, against (K-1)/(M+K-1)",
        kind="trend",
        published="below",
        predicted="below" if is_below else "not below",
        basis="the text: slightly lower than theory, because recompute is scheduled early; for every M to 32",
    )
    M, share = 16, {part: printed(text).value for part, text in table.rows[0].items()}
    plan = two_partitions(M, "early")
    again = recompute_share(plan) * (1 - early[M])
    yield Figure(
        table=table.name,
        name="computation, recompute, bubble",
        unit="%",
        kind="trend",
        published=(share["computation"], share["recompute"], share["bubble"]),
        predicted=(100 * (1 - early[M] - again), 100 * again, 100 * early[M]),
        basis=f"which takes most; M is not published, {M} here; imbalance, setup and update are left out",
    )
