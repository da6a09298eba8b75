"""Megatron-core's configurations and models, built from exported flags as Megatron-LM's own start does.

Started by torchrun with a JSON file: `flags` as the shell hands them on, and `parameters`, how many each stage of the
plan has. Only what needs no GPU: its rotary embedding asks for one when it computes, so no step is made.
"""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

OF_TRAINING = {"micro_batch_size", "global_batch_size"}
"""What Megatron-LM keeps for its own loop."""


def read(flags):
    """Name -> its values, numbers as numbers; True where there is none."""
    found = {}
    for flag in flags:
        if flag.startswith("--"):
            values = found[flag[2:].replace("-", "_")] = []
        else:
            try:
                values.append(json.loads(flag))
            except ValueError:
                values.append(flag)
    return {name: values[0] if len(values) == 1 else values or True for name, values in found.items()}


def main(path):
    told = json.loads(Path(path).read_text())
    given = read(told["flags"])
    taken = set(OF_TRAINING)

    def take(name, default=None):
        taken.add(name)
        return given.get(name, default)

    def configured(kind, **more):
        """A configuration of the flags that are its fields, by name."""
        own = {field.name for field in fields(kind)} & given.keys()
        taken.update(own)
        return kind(**{name: given[name] for name in own} | more)

    more = {
        "recompute_modules": [take("recompute_modules")] if "recompute_modules" in given else None,
        "attention_backend": AttnBackend[take("attention_backend", "auto")],
        "gated_linear_unit": bool(take("swiglu")),
        "add_bias_linear": not take("disable_bias_linear"),
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    if take("swiglu"):
        more["activation_func"] = torch.nn.functional.silu
    if stages := take("num_virtual_stages_per_pipeline_rank"):
        more["virtual_pipeline_model_parallel_size"] = stages
    if group := take("microbatch_group_size_per_virtual_pipeline_stage"):
        more["microbatch_group_size_per_vp_stage"] = group
    assert bool(take("group_query_attention")) == ("num_query_groups" in given)
    config = configured(TransformerConfig, **more)
    optimizer = configured(OptimizerConfig)
    assert (optimizer.bf16, optimizer.use_distributed_optimizer) == (
        "bf16" in given,
        "use_distributed_optimizer" in given,
    )
    in_fp32, in_bf16 = take("accumulate_allreduce_grads_in_fp32"), take("grad_reduce_in_bf16")
    assert not (in_fp32 and in_bf16)
    assert bool(in_fp32 or in_bf16) == config.bf16, "otherwise it would be fp32, whatever the plan says"
    configured(DistributedDataParallelConfig, grad_reduce_in_fp32=bool(in_fp32))

    dist.init_process_group("gloo")
    K, T = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size or 1
    parallel_state.initialize_model_parallel(
        T, K, virtual_pipeline_model_parallel_size=v if v > 1 else None, create_gloo_process_groups=True
    )
    config.sequence_parallel = False  # its norms without Apex do not know it, and it changes no parameter
    rank = parallel_state.get_pipeline_model_parallel_rank()
    for held in range(v):
        stage = held * K + rank
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            vocab_size=take("vocab_size"),
            max_sequence_length=take("max_position_embeddings"),
            position_embedding_type=take("position_embedding_type"),
            share_embeddings_and_output_weights=not take("untie_embeddings_and_output_weights"),
            pre_process=stage == 0,
            post_process=stage == K * v - 1,
            vp_stage=held if v > 1 else None,
        )
        count = torch.tensor(float(sum(value.numel() for value in model.parameters())))
        dist.all_reduce(count, group=parallel_state.get_tensor_model_parallel_group())
        alike = sum(value.numel() for value in model.parameters() if not getattr(value, "tensor_model_parallel", False))
        found = int(count) - (T - 1) * alike  # norms, and biases that are not sliced, are held by each
        assert found == told["parameters"][stage], f"stage {stage} has {found}, planned {told['parameters'][stage]}"
    take("seq_length")
    assert taken >= given.keys(), f"nobody takes {given.keys() - taken}"
    print("parameters agree", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
