"""A model with a fault: `GPIPE_FAULT=kill:1:B:2` makes rank 1 kill itself at the third backward of its third step.

Ranks are two, of two layers each; micro-batches four; nothing is recomputed, so that a step has four forwards and four
backwards. Every kind of fault happens in the process itself, at an action of our choice, and never twice. With `*` for
a rank all have it. When it happens is noted in the file `GPIPE_FAULT_NOTE`, if there is one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, MICROBATCHES, STEP = 16, 4, 2


def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)


def _pause() -> None:
    """Stand still until someone else lets it go on, two seconds after it has been seen to stand still."""
    moves = f"grep -q '^State:.[^T]' /proc/{os.getpid()}/status"
    subprocess.Popen(["sh", "-c", f"while {moves}; do sleep 0.05; done; sleep 2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": _pause,
    "sleep": lambda: time.sleep(1000),
    "leave": lambda: os._exit(0),
    "status": lambda: os._exit(3),
    "exit": lambda: sys.exit(0),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "surrogate": lambda: (_ for _ in ()).throw(ValueError("half of a \ud800 pair")),
    "raise": lambda: (_ for _ in ()).throw(ZeroDivisionError("the loss has no bottom")),
    "starve": lambda: torch.empty(2**60, dtype=torch.uint8),
}


class Fault(nn.Module):
    """Counts its forwards and backwards, and has the fault at one of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        kind, faulty, action, microbatch = os.environ.get("GPIPE_FAULT", "none:0:F:0").split(":")
        self.happen = FAULTS[kind] if faulty in (str(rank), "*") and kind in FAULTS else None
        self.action, self.when = action, STEP * MICROBATCHES + int(microbatch)
        self.counts = {"F": 0, "B": 0}
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count("F")
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.count("B"))
        return out

    def count(self, action: str) -> None:
        if self.happen and action == self.action and self.counts[action] == self.when:
            if note := os.environ.get("GPIPE_FAULT_NOTE"):
                Path(note).write_text(repr(time.time()))
            self.happen()
        self.counts[action] += 1


def model():
    layers = nn.Sequential(Fault(0), nn.Linear(WIDTH, WIDTH), Fault(1), nn.Linear(WIDTH, WIDTH))
    return layers, sample, nn.functional.mse_loss
