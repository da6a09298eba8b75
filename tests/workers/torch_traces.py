"""Under torchrun: torch's own schedules, traced by torch's profiler, with the times of each action beside them.

torch_traces.py FOLDER       makes FOLDER/<schedule>/rank<r>.json, and FOLDER/<schedule>.rank<r>.noted
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.profiler import ProfilerActivity, profile

from gpipe_exec import leave

SIZE, WIDTH, M, STEPS = 8, 32, 4, 2
SCHEDULES = {
    "GPipe": "in order",
    "1F1B": "in order",
    "LoopedBFS": "looped",
    "Interleaved1F1B": "looped",
    "InterleavedZeroBubble": "in order",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}


class Timed(PipelineStage):
    """Notes when its methods were called, on the clock that the profiler has."""

    def __init__(self, index: int, num_stages: int) -> None:
        torch.manual_seed(index)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        inputs, outputs = (torch.zeros(SIZE, WIDTH, requires_grad=grad) for grad in (index > 0, True))
        super().__init__(layers, index, num_stages, torch.device("cpu"), input_args=inputs, output_args=outputs)
        self.noted: list[tuple[str, float, float]] = []

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        return self._note("F", fwd_chunk_id, super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        kind, call = "B" if full_backward else "I", super().backward_one_chunk
        return self._note(kind, bwd_chunk_id, call, bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        return self._note("W", bwd_chunk_id, super().backward_weight_one_chunk, bwd_chunk_id, last_backward)

    def _note(self, kind, microbatch, call, *args, **kwargs):
        start = time.time()
        result = call(*args, **kwargs)
        self.noted.append((f"{self.stage_index}{kind}{microbatch}", start, time.time()))
        return result


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    K, rank, folder = dist.get_world_size(), dist.get_rank(), Path(sys.argv[1])
    for name, placement in SCHEDULES.items():
        held = {"in order": [rank], "looped": [rank, rank + K], "v": [rank, 2 * K - 1 - rank]}[placement]
        stages = [Timed(index, K * len(held)) for index in held]
        kind = get_schedule_class(name)
        schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, M, loss_fn=nn.MSELoss())
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        given = (torch.ones(M * SIZE, WIDTH),) if stages[0].is_first else ()
        target = torch.zeros(M * SIZE, WIDTH) if any(stage.is_last for stage in stages) else None

        def step(schedule=schedule, optimizer=optimizer, given=given, target=target) -> None:
            schedule.step(*given, target=target, return_outputs=False)
            optimizer.step()

        step()
        for stage in stages:
            stage.noted.clear()
        with profile(activities=[ProfilerActivity.CPU], with_stack=name == "1F1B") as profiler:
            for _ in range(STEPS):
                step()
        (folder / name).mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / name / f"rank{rank}.json"))
        noted = sorted((entry for stage in stages for entry in stage.noted), key=lambda entry: entry[1])
        (folder / f"{name}.rank{rank}.noted").write_text(json.dumps(noted))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
