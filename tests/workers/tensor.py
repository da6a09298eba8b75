"""Under torchrun: training with tensor groups equals one process on the whole batch, in float64, or is refused.

Every process runs the reference itself and compares its own part; what differs is raised, and the run fails.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from plans import scenario

from gpipe_exec import Pipeline, leave, read_model
from gpipe_exec.devices.groups import start_processes
from gpipe_exec.layers import build_workload
from gpipe_sim.make.making import make_plan

GPT = {"kind": "transformer", "layers": 3, "hidden": 16, "heads": 4, "vocab": 26, "sequence": 6}
TIED = GPT | {"tied": True, "positions": "sinusoidal", "attention": "flash"}
LLAMA = GPT | {"kv_heads": 2, "positions": "rotary", "gated": True, "norm": "rms", "bias": "qkv"}
DEVICE = {"memory": "16 GiB", "compute": "1 TFLOP/s", "bandwidth": "1 GB/s"}
BATCH, STEPS = 8, 2
CPU = torch.device("cpu")


def plan_of(model, dtype="fp64", precision="pure", **choices):
    data = {"name": "test", "model": {"attention": "classic"} | model, "batch": BATCH, "dtype": dtype}
    data |= {"precision": precision, "cluster": {"device": DEVICE, "link": "nvlink3"}}
    return make_plan(scenario(data | {"plan": {"tensor": 2, "microbatches": 2, "checkpoint": "never"} | choices}))


def whole_model(plan):
    workload = build_workload(plan.scenario)
    return workload, *workload.sample(BATCH)


def reference(plan, clip):
    """Losses, norms and gradients of each step, and the state afterwards."""
    workload, inputs, targets = whole_model(plan)
    model = workload.layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        history.append((loss.detach(), norm, gradients))
    return history, model.state_dict(), workload.loss(model(inputs), targets), model(inputs)


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def share(plan, tensor):
    _, replica = plan.place_of(dist.get_rank())
    return tensor[replica * plan.samples : (replica + 1) * plan.samples]


def whole_gradients(pipe):
    """Of this process's layers, by the whole model's names."""
    of = {}
    for name, parameter in pipe.module.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            of[pipe._called(name)] = pipe._slices.whole(parameter, parameter.grad)
    return of


def check(plan, clip=0.1):
    history, state, evaluated, predicted = reference(plan, clip)
    workload, inputs, targets = whole_model(plan)
    inputs, targets = share(plan, inputs), share(plan, targets)
    pipe = Pipeline(workload.layers, plan, workload.loss, device=CPU)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for loss, norm, gradients in history:
        optimizer.zero_grad()
        close(pipe.step(inputs, targets), loss, "loss")
        if plan.shard == "none":
            for name, gradient in whole_gradients(pipe).items():
                close(gradient, gradients[name], name)
        close(pipe.clip_grad_norm_(clip), norm.double(), "norm")
        optimizer.step()
    found = pipe.state_dict()
    assert bool(found) == (dist.get_rank() == 0)
    assert not found or list(found) == list(state)
    for name, tensor in found.items():
        close(tensor, state[name], f"{name} afterwards")
    close(pipe.evaluate(inputs, targets), evaluated.detach(), "evaluation")
    output = pipe.predict(inputs)
    if output is not None:
        close(output, share(plan, predicted.detach()), "prediction")
    return pipe, optimizer, state


def check_checkpoint(plan, other, folder):
    """What one plan writes another reads, and goes on as one process would."""
    workload, inputs, targets = whole_model(plan)
    inputs, targets = share(plan, inputs), share(plan, targets)
    pipe, optimizer, state = check(plan)
    pipe.save(folder, optimizer, 1)
    for name, tensor in read_model(folder).items():
        close(tensor, state[name], f"{name} in the checkpoint")
    optimizer.zero_grad()
    loss = pipe.step(inputs, targets)
    optimizer.step()
    after = pipe.evaluate(inputs, targets)
    pipe.close()
    workload, inputs, targets = whole_model(other)
    inputs, targets = share(other, inputs), share(other, targets)
    torch.manual_seed(99)
    pipe = Pipeline(build_workload(other.scenario, seed=5).layers, other, workload.loss, device=CPU)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    assert pipe.load(folder, optimizer) == {"step": 1}
    optimizer.zero_grad()
    close(pipe.step(inputs, targets), loss, "the loss that follows")
    optimizer.step()
    close(pipe.evaluate(inputs, targets), after, "after that")
    pipe.load_state_dict(state)
    close(pipe.evaluate(inputs, targets), check_state(other, state), "a state that was loaded")
    pipe.close()


def check_state(plan, state):
    workload, inputs, targets = whole_model(plan)
    workload.layers.load_state_dict(state)
    return workload.loss(workload.layers(inputs), targets).detach()


def check_accumulation(plan):
    """Two steps of half the weight are their mean, also where replicas sum them once."""
    workload, inputs, targets = whole_model(plan)
    workload.loss(workload.layers(inputs), targets).backward()
    expected = {name: p.grad for name, p in workload.layers.named_parameters(remove_duplicate=False)}
    workload, inputs, targets = whole_model(plan)
    pipe = Pipeline(workload.layers, plan, workload.loss, device=CPU)
    given = share(plan, inputs), share(plan, targets)
    pipe.step(*given, weight=0.25)
    with pipe.no_sync():
        pipe.step(*given, weight=0.25)
    pipe.step(*given, weight=0.5)
    for name, gradient in whole_gradients(pipe).items():
        close(gradient, expected[name], f"{name}, of three steps")
    pipe.close()


def check_mixed(plan):
    """Slices in fp32 with copies of 16 bits to compute with: gradients are those of float64 up to their rounding."""
    exact = plan_of(GPT, stages=1)
    workload, inputs, targets = whole_model(exact)
    workload.loss(workload.layers(inputs), targets).backward()
    expected = {name: p.grad.flatten() for name, p in workload.layers.named_parameters()}
    torch.manual_seed(0)
    pipe = Pipeline(build_workload(plan.scenario).layers, plan, build_workload(plan.scenario).loss, device=CPU)
    pipe.step(share(plan, inputs), share(plan, targets))
    for name, gradient in whole_gradients(pipe).items():
        assert gradient.dtype == torch.float32
        of_this, of_that = gradient.flatten().double(), expected[name]
        error = (of_this - of_that).norm() / of_that.norm()
        assert error < 0.05, f"{name} is off by {float(error):.1%}"
    pipe.close()


SCHEDULES = (
    {"schedule": "gpipe", "checkpoint": "except_last"},
    {"schedule": "1f1b", "checkpoint": "always", "recompute_unit": "attention"},
    {"schedule": "1f1b", "checkpoint": "always", "recompute_unit": "layer"},
    {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"schedule": "zb_h1", "checkpoint": "always"},
)


def main() -> None:
    start_processes(CPU, timedelta(minutes=5))
    torch.set_num_threads(1)
    K, D = (int(argument) for argument in sys.argv[1:3])
    T = dist.get_world_size() // (K * D)
    folder = Path(gettempdir()) / f"tensor-{os.environ['MASTER_PORT']}"
    count = 0
    for model in (GPT, LLAMA, TIED):
        for choices in SCHEDULES:
            v = choices.get("stages_per_rank", 1)
            if model["layers"] + 3 < K * v or (model is TIED and choices.get("recompute_unit") == "attention"):
                continue
            split = count % 3 != 2
            shape = {"stages": K * v, "replicas": D, "tensor": T, "sequence_split": split}
            check(plan_of(model, **shape | choices))[0].close()
            count += 1
    shape = {"stages": K, "replicas": D, "tensor": T}
    for cut, split in (([1, 5], True), ([5, 1], True), ([1, 5], False)):
        if K == 2 and D == 1:  # right behind the embedding, whose output a collective makes, and before the head
            check(plan_of(LLAMA, **shape | {"balance": cut, "sequence_split": split}))[0].close()
            count += 1
    check_accumulation(plan_of(GPT, **shape))
    for dtype in ("bf16", "fp16"):
        check_mixed(plan_of(GPT, dtype, "mixed", **shape))
    check_checkpoint(plan_of(LLAMA, **shape), plan_of(LLAMA, **shape | {"sequence_split": False}), folder / "a")
    if D > 1:
        for shard in ("optimizer", "parameters"):
            check(plan_of(GPT, shard=shard, **shape))[0].close()
            count += 1
        other = shape | {"replicas": 1, "stages": K * D}
        check_checkpoint(plan_of(TIED, shard="parameters", **shape), plan_of(TIED, **other), folder / "b")
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{count} plans are exact")
    leave()


if __name__ == "__main__":
    main()
