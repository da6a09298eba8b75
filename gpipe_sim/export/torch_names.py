"""What torch.distributed.pipelining calls a schedule: the class whose order is exactly the plan's, where there is one.

    ours                torch                    for these numbers only
    gpipe               GPipe                    backwards first in first out
    1f1b                1F1B                     M at least K (a single micro-batch: GPipe)
    interleaved_gpipe   LoopedBFS                backwards in reverse
    interleaved_1f1b    Interleaved1F1B          M a multiple of its rounds, M // K; with v = 1 it is 1f1b
    zb_h1               InterleavedZeroBubble    as the one before
    zb_v                ZBVZeroBubble
    dualpipe_v          DualPipeV                M at least 2K

Every other order, be it zb_h2's, a file's, `auto`'s or one of these for other numbers, is loaded from a file of torch's
own format, which its runtime executes on any placement.
"""

from gpipe_sim.plan.orders import Pattern
from gpipe_sim.plan.plan import Plan


def torch_name(plan: Plan) -> str | None:
    """The name by which torch's `get_schedule_class` finds a class with this very order; None if no class has it.

    The classes number processes as positions in the pipeline.
    """
    K, v, M = plan.num_ranks, plan.stages_per_rank, plan.num_microbatches
    one_forward_one_backward = ("1F1B", M >= K) if M > 1 else ("GPipe", True)
    in_rounds = M % max(1, M // K) == 0
    known = {
        "naive": ("GPipe", True),
        "gpipe": ("GPipe", plan.backward == "fifo" or M == 1),
        "1f1b": one_forward_one_backward,
        "interleaved_gpipe": ("LoopedBFS", plan.backward == "reverse" or M == 1),
        "interleaved_1f1b": ("Interleaved1F1B", in_rounds) if v > 1 else one_forward_one_backward,
        "zb_h1": ("InterleavedZeroBubble", in_rounds),
        "zb_v": ("ZBVZeroBubble", True),
        "dualpipe_v": ("DualPipeV", M >= 2 * K),
    }
    if plan.order is not None or plan.schedule not in known:
        return None
    name, fits = known[plan.schedule]
    return name if fits else None


PLACING: dict[Pattern, str] = {"in_order": "1F1B", "looped": "Interleaved1F1B", "v": "ZBVZeroBubble"}
"""Pattern -> a class of torch's that places stages so."""
