"""Under torchrun, or in one process: what people do when they train, each equal to one process on the whole batch."""

import itertools
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from plans import layers as layer_costs
from plans import plan as make
from torch import nn

from gpipe_exec import Pipeline, leave, read_model

BATCH, LENGTH, WIDTH, VOCAB, NUM_LAYERS = 10, 5, 6, 7, 8
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2))


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plan_of(M: int = 4, **choices):
    v = choices.get("stages_per_rank", 1)
    costs = layer_costs([1.0] * NUM_LAYERS, [2.0] * NUM_LAYERS, weights=[1.0] * NUM_LAYERS)
    return make(costs, M, **{"batch": BATCH, "stages": num_ranks() * v} | choices)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS - 2)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB)).double()


def batch(seed: int, samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of different lengths: what follows the end has the label -100."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (samples, LENGTH), generator=generator)
    targets = torch.randint(VOCAB, (samples, LENGTH), generator=generator)
    ends = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    return tokens, targets.masked_fill(torch.arange(LENGTH) >= ends, -100)


def mean_over_tokens(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def over_tokens(logits, targets):
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def by_sample(logits, targets):
    """A plain mean: every sample counts alike."""
    return (logits * (targets + 200)[..., None]).square().mean()


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def one_process(loss, *batches, weight: float = 1.0):
    """The whole model with the gradients of these batches, and their losses."""
    whole = model()
    losses = [loss(whole(inputs), targets) for inputs, targets in batches]
    (sum(losses) * weight).backward()
    return whole, [one.detach() for one in losses]


def same_gradients(pipe: Pipeline, whole: nn.Module, what: str) -> None:
    expected = dict(whole.named_parameters())
    for name, parameter in pipe.module.named_parameters():
        close(parameter.grad, expected[name].grad, f"gradient of {name}, {what}")


def check_padding() -> None:
    """Sums and counts: losses and gradients of the whole batch, in every schedule, and added to those there."""
    first, second = batch(1), batch(2)
    whole, (loss_1, loss_2) = one_process(mean_over_tokens, first, second)
    for (schedule, v), (mode, M) in itertools.product(SCHEDULES, (("never", 4), ("always", 4), ("always", 1))):
        what = f"{schedule}, {mode}, M={M}"
        pipe = Pipeline(model(), plan_of(M, schedule=schedule, stages_per_rank=v, checkpoint=mode), over_tokens)
        close(pipe.evaluate(*first), loss_1, f"evaluation, {what}")
        close(pipe.step(*first), loss_1, f"loss, {what}")
        close(pipe.step(*second), loss_2, f"second loss, {what}")
        same_gradients(pipe, whole, what)
        pipe.close()


def check_update_sees_the_divided_gradients() -> None:
    whole, _ = one_process(mean_over_tokens, batch(1))
    pipe = Pipeline(model(), plan_of(), over_tokens)
    pipe.step(*batch(1), lambda: same_gradients(pipe, whole, "at the update"))
    pipe.close()


def check_smaller_batches() -> None:
    """The last batch of an epoch, in step and evaluation, whatever the other ranks are given."""
    for (schedule, v), samples in zip(SCHEDULES, (1, 2, 7, 1, 7), strict=True):
        what = f"{schedule}, {samples} samples"
        pipe = Pipeline(model(), plan_of(schedule=schedule, stages_per_rank=v, checkpoint="except_last"), over_tokens)
        for size, seed in ((BATCH, 1), (samples, 2), (BATCH, 3), (samples, 4)):
            whole, (loss,) = one_process(mean_over_tokens, batch(seed, size))
            inputs, targets = batch(seed, size)
            given = inputs if pipe.is_first else None, targets if pipe.is_last else None
            pipe.module.zero_grad()
            close(pipe.step(*given), loss, f"loss, {what}")
            same_gradients(pipe, whole, what)
            close(pipe.evaluate(*given), loss, f"evaluation, {what}")
        pipe.close()


def check_clipping() -> None:
    """By the norm of all stages' gradients, as torch's own clips those of one process."""
    for norm_type in (2.0, 1.0, float("inf")):
        whole, _ = one_process(mean_over_tokens, batch(1))
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type)
        pipe = Pipeline(model(), plan_of(), over_tokens)
        pipe.step(*batch(1))
        close(pipe.clip_grad_norm_(0.05, norm_type), norm, "norm")
        same_gradients(pipe, whole, "clipped")
        pipe.close()


def check_accumulation_and_groups() -> None:
    """The mean of several steps; and groups that are the same on all ranks, whoever holds their parameters."""
    for loss, mean in ((over_tokens, mean_over_tokens), (by_sample, by_sample)):
        whole, losses = one_process(mean, batch(1), batch(2), batch(3, 4), weight=1 / 3)
        pipe = Pipeline(model(), plan_of(schedule="1f1b", checkpoint="always"), loss)
        for given, expected in zip((batch(1), batch(2), batch(3, 4)), losses, strict=True):
            close(pipe.step(*given, weight=1 / 3), expected, "loss of a part")
        same_gradients(pipe, whole, "accumulated")
        groups = pipe.parameter_groups(lambda name, p: {"weight_decay": 0.0 if p.dim() == 1 else 0.1})
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert sum(len(group["params"]) for group in groups) == len(pipe.parameters())
        torch.optim.AdamW(groups).step()
        pipe.close()


def tied_model() -> nn.Sequential:
    """Embedding and head share a weight, and so do two blocks in the middle."""
    layers = model()
    layers[-1].weight = layers[0].weight
    layers[5][0].weight = layers[2][0].weight
    return layers


def check_tied_weights() -> None:
    """Three steps and accumulation, clipping and evaluation: copies stay equal, and equal to one process."""
    for (schedule, v), loss in itertools.product(SCHEDULES, (over_tokens, by_sample)):
        whole = tied_model()
        reference = torch.optim.Adam(whole.parameters(), lr=0.1)
        pipe = Pipeline(tied_model(), plan_of(schedule=schedule, stages_per_rank=v, checkpoint="always"), loss)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        mean = mean_over_tokens if loss is over_tokens else loss
        for step in range(3):
            for part in range(2):
                expected = mean(whole(batch(step + part)[0]), batch(step + part)[1])
                expected.backward()
                close(pipe.step(*batch(step + part)), expected.detach(), "loss with tied weights")
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            close(pipe.clip_grad_norm_(1.0), expected, "norm with tied weights")
            names = dict(whole.named_parameters(remove_duplicate=False))
            for name, parameter in pipe.module.named_parameters():
                close(parameter.grad, names[name].grad, f"gradient of {name}, tied, {schedule}")
            reference.step(), reference.zero_grad(), optimizer.step(), optimizer.zero_grad()
        state = pipe.state_dict()
        assert (len(state) > 0) == (pipe.rank == 0)
        for name, tensor in state.items():
            close(tensor, names[name].detach(), f"{name}, tied, {schedule}")
        pipe.close()


def check_predictions() -> None:
    """Outputs on the last rank, in the order of the samples."""
    for samples in (BATCH, 3):
        inputs, _ = batch(1, samples)
        pipe = Pipeline(model(), plan_of(), over_tokens)
        found = pipe.predict(inputs if pipe.is_first else None)
        if pipe.is_last:
            close(found, model()(inputs).detach(), "prediction")
        else:
            assert found is None
        pipe.close()


def check_checkpoints() -> None:
    """What one plan wrote, being written aside, another reads: model, optimizer and position; and one process."""
    folders = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    for wait in (True, False):
        folder, losses = Path(folders[0], str(wait)), []
        for choices in ({"schedule": "1f1b"}, {"schedule": "zb_v", "stages_per_rank": 2, "checkpoint": "always"}):
            pipe = Pipeline(tied_model(), plan_of(**choices), over_tokens)
            groups = pipe.parameter_groups(lambda name, p: {"weight_decay": 0.0 if p.dim() == 1 else 0.1})
            optimizer = torch.optim.AdamW(groups, lr=0.1 if not losses else 0.9)
            position = pipe.load(folder, optimizer)
            assert position == ({"step": 2, "epoch": 1} if losses else None)
            assert optimizer.param_groups[0]["lr"] == 0.1
            for step in range(position["step"] if position else 0, 4):
                if step == 2 and not position:
                    pipe.save(folder, optimizer, step, {"epoch": 1}, wait=wait)
                loss = pipe.step(*batch(step))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
            pipe.close()
        close(losses[1], losses[0], "loss of a run that went on under another plan")
        state = read_model(folder)
        assert state.keys() == tied_model().state_dict().keys()
        tied_model().load_state_dict(state)


CHECKS = (
    check_checkpoints,
    check_padding,
    check_update_sees_the_divided_gradients,
    check_smaller_batches,
    check_clipping,
    check_accumulation_and_groups,
    check_tied_weights,
    check_predictions,
)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for check in CHECKS:
        check()
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("training is exact")
    leave()


if __name__ == "__main__":
    main()
