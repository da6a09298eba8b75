"""One step on torchtitan's own split and schedule, as an exported plan sets them; gradients compared with one process.

Started by torchrun with the exported file. The decoder is ours, with the names of torchtitan's modules: its models need
triton, which needs a GPU.
"""

import os
import runpy
import sys
from copy import deepcopy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _pipeline_module_split

WIDTH, VOCABULARY = 16, 50


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Decoder(nn.Module):
    """Like torchtitan's, it tolerates that modules are missing."""

    def __init__(self, layers):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(layers)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


def loss_of(output, target):
    """A sum, as torchtitan's: it divides by all tokens of the step itself. With it, what it reports beside the loss."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), {}


def main(exported):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    config = SimpleNamespace(parallelism=ParallelismConfig(), training=TrainingConfig(), activation_checkpoint="unset")
    runpy.run_path(exported)["apply_plan"](config)
    assert config.activation_checkpoint is None or isinstance(config.activation_checkpoint, FullAC.Config)
    parallelism, training = config.parallelism, config.training
    parts = parallelism.module_fqns_per_model_part
    model = Decoder(sum(name.startswith("layers.") for part in parts for name in part))
    whole = deepcopy(model)
    mesh = init_device_mesh("cpu", (parallelism.pipeline_parallel_degree,), mesh_dim_names=("pp",))
    stages, models = _pipeline_module_split(
        model, mesh, parallelism.pipeline_parallel_schedule, torch.device("cpu"), parts
    )
    schedule = _build_pipeline_schedule(
        parallelism=parallelism, local_batch_size=training.local_batch_size, stages=stages, loss_fn=loss_of
    )
    tokens = torch.randint(VOCABULARY, (training.local_batch_size, training.seq_len + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    schedule.step(*([inputs] if first else []), target=targets if last else None, losses=[] if last else None)

    loss_of(whole(inputs), targets)[0].backward()
    expected = dict(whole.named_parameters())
    for part in models:
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-9)
    print(f"rank {dist.get_rank()}: {sum(1 for part in models for _ in part.parameters())} gradients agree", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # some threads of torch's would still end slowly


if __name__ == "__main__":
    main(sys.argv[1])
