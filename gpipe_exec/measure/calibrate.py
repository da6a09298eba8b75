"""What the engine itself costs on this machine, per action and per hop, measured with a pipeline that computes nothing.

Its layers take their time asleep, as a rehearsal's do, or awake, keeping their core busy as arithmetic would: threads
that have to be woken and caches that have gone cold are part of what the engine costs, and differ between the two.

    rank k      ==F0==|gap|==F1==|gap|          action overhead: what a span takes beyond its layers, and the gap to
    rank k+1          |..hop..|==F0==|          the next action whose input is already there; hop overhead: what a
                                                message takes beyond its link, for actions that wait for it
"""

import time
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.alternatives.rehearsal import PacedTransport, rehearsed_workload
from gpipe_exec.devices.recorder import Recorder, StepRecord
from gpipe_exec.engine.delivery import SentAside
from gpipe_exec.engine.pipeline import Pipeline
from gpipe_exec.engine.transport import PeerToPeer, Transport
from gpipe_sim.base.files import Document
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of, rank_actions
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.reading import parse_scenario


class Overheads(NamedTuple):
    """Seconds of the engine's own."""

    action_s: float
    hop_s: float


def idle_plan(num_stages: int, message: str = "64 KiB") -> Plan:
    """Equal stages that take their time, and messages of one size over links that cost nothing."""
    layer = {"name": "nothing", "repeat": num_stages, "forward": "10 ms", "backward": "20 ms", "output": message}
    scenario = {
        "name": "calibration",
        "model": {"kind": "layers", "layers": [layer]},
        "batch": 8,
        "dtype": "fp32",
        "cluster": {
            "device": "cpu",
            "devices_per_node": num_stages,
            "link": {"bandwidth": "inf B/s", "latency": "0 s"},
        },
        "plan": {"stages": num_stages, "microbatches": 8, "checkpoint": "never"},
    }
    (point,) = parse_scenario(Document("calibration", scenario))
    return make_plan(point)


def calibrate(link: Link | None, *, asleep: bool, num_steps: int = 3) -> Overheads:
    """Run the pipeline on all ranks. Its messages pass the real `link`, whose own time is not the engine's; without
    one they are paced, as a rehearsal's are. Asleep they are small, to ask nothing of a link that may be slow."""
    plan = idle_plan(dist.get_world_size(), "64 B" if asleep and link else "64 KiB")
    rank = dist.get_rank()
    recorder = Recorder()
    began = (lambda: recorder.latest_s) if asleep else time.perf_counter
    workload, update = rehearsed_workload(plan, [rank], 1.0, began=began, asleep=asleep)

    def carry(direct: PeerToPeer, edge: int) -> Transport:
        if link is None:
            return PacedTransport(direct, plan.link(edge), 1.0)
        return SentAside(direct) if asleep else direct

    pipe = Pipeline(
        workload.layers,
        plan,
        workload.loss,
        device=torch.device("cpu"),
        recorder=recorder,
        carry=carry,
        checks=False,
    )
    own = Own(0.0, 0.0) if asleep else _own_overhead(pipe.module, plan)
    for step in range(1 + num_steps):
        recorder.enabled = step > 0
        dist.barrier()
        pipe.step(*workload.sample(plan.scenario.batch), update)
    pipe.close()
    records: list[list[StepRecord] | None] = [None] * plan.num_ranks
    dist.all_gather_object(records, recorder.steps)
    message_s = 0.0 if link is None else link.latency + float(plan.message_bytes.max(initial=0.0)) / link.bandwidth
    found = [_overheads(plan, [steps[i] for steps in records if steps], message_s, own) for i in range(num_steps)]
    return Overheads(*(median(values) for values in zip(*found, strict=True)))


class Own(NamedTuple):
    """What a layer that does nothing takes beyond its time, by itself: it is not the engine's."""

    F: float
    B: float


def _own_overhead(module: nn.Module, plan: Plan) -> Own:
    value = torch.empty((1, int(plan.message_bytes.max(initial=64)) // 2), dtype=torch.float16)
    forward, backward = [], []
    for _ in range(5):
        leaf = value.detach().requires_grad_()
        begin = time.perf_counter()
        output = module(leaf)
        middle = time.perf_counter()
        torch.autograd.backward([output], [output.detach()])
        end = time.perf_counter()
        forward.append(middle - begin - float(plan.forward_s[0, 0]))
        backward.append(end - middle - float(plan.backward_s[0, 0]))
    return Own(median(forward), median(backward))


def _overheads(plan: Plan, records: list[StepRecord], message_s: float, own: Own) -> Overheads:
    actions, senders = rank_actions(plan), program_of(plan).senders()
    ranks = list(zip(actions, records, strict=True))
    end = {action: record.end[row] for found, record in ranks for row, action in enumerate(found)}
    seconds = {"F": float(plan.forward_s[0, 0]), "B": float(plan.backward_s[0, 0])}
    beyond, gaps, hops = [], [], []
    for found, record in ranks:
        for row, action in enumerate(found[:-1]):
            beyond.append(record.end[row] - record.start[row] - seconds[action.kind] - getattr(own, action.kind))
            free = record.end[row - 1] if row > 0 else float("-inf")
            arrived = end[senders[action]] + message_s if action in senders else float("-inf")
            if arrived > free:
                hops.append(record.start[row] - arrived)
            elif row > 0 and arrived < free - 1e-3:
                gaps.append(record.start[row] - free)
    gap = median(gaps) if gaps else 0.0
    hop = median(hops) - gap if hops else 0.0
    return Overheads(max(0.0, median(beyond) + gap), max(0.0, hop))
