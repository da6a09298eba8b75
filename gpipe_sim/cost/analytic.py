"""Costs: from what a scenario describes to a profile, read if it names one, analytic otherwise.

seconds                    .-'   roofline: launch + max(FLOPs / compute, bytes / bandwidth)
   |                  .-'
   |             .-'
   |       ___.-'        <- flat while the weights' own traffic dominates
   |______/
   +--------------------- samples in the micro-batch
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.limits import shortened
from gpipe_sim.cost.collectives import sliced_collectives_s, sliced_layers, tensor_group
from gpipe_sim.cost.profile import Profile, column, is_file, load_profile
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.scenario.schema import Layers, ProfileModel, Scenario, Transformer


def build_profile(scenario: Scenario, sizes: Iterable[int]) -> Profile:
    """The scenario's profile: read if it names one, otherwise analytic and exact at the given micro-batch sizes."""
    known_sizes = tuple(sorted({*sizes, scenario.plan.share(scenario.batch)}))
    if scenario.profile:
        return _read_for(scenario, scenario.profile)
    if isinstance(scenario.model, Transformer):
        return _transformer_profile(scenario, scenario.model, known_sizes)
    if isinstance(scenario.model, Layers):
        return _layers_profile(scenario, scenario.model, known_sizes)
    raise scenario.error("profile", "is missing: a python model needs a measured profile")


def _read_for(scenario: Scenario, path: Path) -> Profile:
    """Read the profile that the scenario names, and check that it belongs to the model that it describes."""
    is_all = isinstance(scenario.model, ProfileModel)
    name = "model.path" if is_all else "profile"
    if not is_file(path):
        raise scenario.error(name, f"there is no file {shortened(path)}")
    profile = load_profile(path)
    expected = scenario.model.num_layers
    if expected is not None and expected != profile.num_layers:
        raise scenario.error(name, f"{path} has {profile.num_layers} layers, but the model has {expected}")
    if profile.dtype != scenario.dtype and (not is_all or "dtype" in scenario.document.data):
        raise scenario.error(name, f"{path} was made with {profile.dtype}, but the scenario says {scenario.dtype}")
    said = scenario.document.data.get("precision", "pure")
    if profile.precision not in (None, scenario.precision) or (said != "pure" and profile.dtype in ("fp32", "fp64")):
        found = profile.precision or profile.dtype
        raise scenario.error(
            name, f"{path} was made with {found}, but the scenario's precision is {scenario.precision}"
        )
    if profile.tensor != scenario.plan.tensor:
        measured = f"{path} was measured with {profile.tensor}, and what other slices of its layers cost is not known"
        raise scenario.error("plan.tensor", f"found {scenario.plan.tensor}, expected {profile.tensor}: {measured}")
    split = scenario.plan.sequence_split
    if profile.tensor > 1 and profile.sequence_split not in (None, split):
        message = f"found {str(split).lower()}, expected {str(not split).lower()}, with which {path} was measured"
        raise scenario.error("plan.sequence_split", message)
    return profile


def _transformer_profile(scenario: Scenario, model: Transformer, sizes: tuple[int, ...]) -> Profile:
    """Roofline times: launches + max(FLOPs / attained compute, bytes / bandwidth); a backward is twice a forward.
    Where the device has a ``memory_efficiency``, products and the rest take their time one after the other, since
    products hide the traffic of their weights, not what norms, activations and softmax read and write:

        forward    launches + max(FLOPs / attained compute, weights / bandwidth) + 2 saved / attained bandwidth
        backward   twice each, but 3 saved: what was saved is read, and a gradient of it written and read

    Of a tensor group it is what a rank does, and each pass takes the group's collectives longer; of a split backward
    they are in I. What attention alone would take again is the roofline of scores and weighted sum.

    A split backward's halves add up to the whole: W has the share of its FLOPs that products with weights have. While
    I runs, what it keeps takes the place of what was saved.

    Traffic is the weights once per call (a lookup reads only the rows it needs, but its gradient is dense) and, per
    sample, every tensor that remains written once and read once. The optimizer reads and writes weights and state and
    reads gradients, at the memory's bandwidth.
    """
    device, plan = scenario.cluster.device, scenario.plan
    sliced = sliced_layers(model, scenario.dtype, plan.tensor, sequence=plan.sequence_split)
    layers, group = [one.layer for one in sliced], tensor_group(scenario.cluster, plan.tensor)
    n = np.array(sizes, dtype=float)
    per_parameter = bytes_per_parameter(scenario.optimizer, scenario.dtype, scenario.precision)
    parameters = np.array([layer.parameters for layer in layers], dtype=float)
    attained = device.compute[scenario.dtype] * device.efficiency
    launch = column(layer.kernels * device.launch for layer in layers)
    work = column(layer.flops for layer in layers) * n / attained
    saved = column(layer.saved_bytes for layer in layers) * n
    weights = parameters[:, None] * per_parameter.weight
    read = weights * column(layer.reads_all_weights for layer in layers)
    collectives = np.array([sliced_collectives_s(one, n, group) for one in sliced])
    attention_bytes = column(layer.attention_bytes for layer in layers) * n
    attention_work = column(layer.attention_flops for layer in layers) * n / attained
    if device.memory_efficiency is None:
        forward = launch + np.maximum(work, (read + 2 * saved) / device.bandwidth)
        backward = 2 * launch + 2 * np.maximum(work, (weights + 2 * saved) / device.bandwidth)
        attention = np.maximum(attention_work, 2 * attention_bytes / device.bandwidth)
    else:
        moved = device.bandwidth * device.memory_efficiency
        forward = launch + np.maximum(work, read / device.bandwidth) + 2 * saved / moved
        backward = 2 * launch + 2 * np.maximum(work, weights / device.bandwidth) + 3 * saved / moved
        attention = attention_work + 2 * attention_bytes / moved
    backward_weights = backward * column(layer.weights_share for layer in layers)
    kept = column(layer.kept_bytes for layer in layers) * n
    workspace = column(layer.workspace_bytes for layer in layers) * n
    gradients = parameters[:, None] * per_parameter.gradient
    added_at_once = scenario.precision == "mixed_fp32_gradients"  # to what is there, by the kernel that makes them
    adding = workspace - gradients if added_at_once else workspace
    instead = np.zeros_like(parameters)[:, None]
    if added_at_once:
        instead = _instead_of_gradients(parameters * per_parameter.weight)
    update_bytes = 2 * per_parameter.weight + per_parameter.gradient + 2 * per_parameter.optimizer
    return Profile(
        source="analytic",
        device=device.name,
        dtype=scenario.dtype,
        names=tuple(layer.name for layer in layers),
        sizes=sizes,
        table={
            "forward_s": forward + collectives,
            "backward_s": backward + collectives,
            "saved_bytes": saved,
            "output_bytes": column(layer.output_bytes for layer in layers) * n,
            "workspace_no_grad_bytes": workspace,
            "workspace_forward_bytes": np.zeros_like(workspace),
            "workspace_backward_bytes": workspace + instead,
            "workspace_accumulate_bytes": adding + instead,
            "backward_inputs_s": backward - backward_weights + collectives,
            "backward_weights_s": backward_weights,
            "kept_bytes": kept,
            "workspace_inputs_bytes": workspace + np.maximum(kept - saved, 0.0),
            "workspace_weights_bytes": np.zeros_like(workspace),
            "workspace_weights_accumulate_bytes": np.zeros_like(workspace),
            "tensor_s": collectives,
            "attention_s": np.where(attention_bytes > 0, attention, 0.0),
            "attention_bytes": attention_bytes,
        },
        tensor=plan.tensor,
        sequence_split=plan.sequence_split if plan.tensor > 1 else None,
        parameter_bytes=parameters * per_parameter.weight,
        optimizer_s=parameters * update_bytes / device.bandwidth,
        input_bytes=8.0 * model.sequence,  # token numbers as int64
    )


def _instead_of_gradients(weights: Array) -> Array:
    """What kernels that add gradients up in fp32 hand to autograd in their stead: tensors as large as the weights, in
    their dtype. Those of a block are used by all blocks and never freed (Transformer Engine's `get_dummy_wgrad`), so
    that the norm and the head find them too; the head's is there while its gradients are made (Megatron-LM). That a
    rank may have the head and no block is neglected.
    """
    block = weights[1]
    found = np.full(len(weights), block)
    found[0], found[-1] = 0.0, block + weights[-1]
    column_of_it: Array = found[:, None]
    return column_of_it


def _layers_profile(scenario: Scenario, model: Layers, sizes: tuple[int, ...]) -> Profile:
    """The costs as they were written: overhead per call plus seconds per sample; no update time.

    Split where every layer says how much of its backward is for the weights.
    """
    layers = [(spec, index) for spec in model.layers for index in range(spec.repeat)]
    n = np.array(sizes, dtype=float)
    overhead = column(spec.overhead for spec, _ in layers)
    backward = column(spec.backward_seconds for spec, _ in layers)
    saved = column(spec.saved_bytes for spec, _ in layers) * n
    nothing = np.zeros((len(layers), len(sizes)))
    weights = [spec.weights_seconds for spec, _ in layers if spec.weights_seconds is not None]
    halves = {}
    if len(weights) == len(layers):
        kept = column(spec.kept_bytes for spec, _ in layers) * n
        halves = {
            "backward_inputs_s": overhead + (backward - column(weights)) * n,
            "backward_weights_s": overhead + column(weights) * n,
            "kept_bytes": kept,
            "workspace_inputs_bytes": np.maximum(kept - saved, 0.0),
            "workspace_weights_bytes": nothing,
            "workspace_weights_accumulate_bytes": nothing,
        }
    return Profile(
        source="analytic",
        device=scenario.cluster.device.name,
        dtype=scenario.dtype,
        names=tuple(f"{spec.name}.{index}" if spec.repeat > 1 else spec.name for spec, index in layers),
        sizes=sizes,
        table={
            "forward_s": overhead + column(spec.forward for spec, _ in layers) * n,
            "backward_s": overhead + backward * n,
            "saved_bytes": saved,
            "output_bytes": column(spec.output for spec, _ in layers) * n,
            "workspace_no_grad_bytes": nothing,
            "workspace_forward_bytes": nothing,
            "workspace_backward_bytes": nothing,
            "workspace_accumulate_bytes": nothing,
        }
        | halves,
        parameter_bytes=np.array([spec.parameters for spec, _ in layers]),
        optimizer_s=np.zeros(len(layers)),
    )
