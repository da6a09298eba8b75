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

from gpipe_sim.limits import shortened
from gpipe_sim.model import bytes_per_parameter, transformer_layers
from gpipe_sim.profile import Profile, column, is_file, load_profile
from gpipe_sim.scenario import Layers, ProfileModel, Scenario, Transformer


def build_profile(scenario: Scenario, sizes: Iterable[int]) -> Profile:
    """The scenario's profile: read if it names one, otherwise analytic and exact at the given micro-batch sizes."""
    known_sizes = tuple(sorted({*sizes, scenario.batch}))
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
    return profile


def _transformer_profile(scenario: Scenario, model: Transformer, sizes: tuple[int, ...]) -> Profile:
    """Roofline times: launches + max(FLOPs / attained compute, bytes / bandwidth); a backward is twice a forward.

    Traffic is the weights once per call (a lookup reads only the rows it needs, but its gradient is dense) and, per
    sample, every tensor that remains written once and read once. The optimizer reads and writes weights and state and
    reads gradients, at the memory's bandwidth.
    """
    device, layers = scenario.cluster.device, transformer_layers(model, scenario.dtype)
    n = np.array(sizes, dtype=float)
    per_parameter = bytes_per_parameter(scenario.optimizer, scenario.dtype)
    parameters = np.array([layer.parameters for layer in layers], dtype=float)
    attained = device.compute[scenario.dtype] * device.efficiency
    launch = column(layer.kernels * device.launch for layer in layers)
    work = column(layer.flops for layer in layers) * n / attained
    saved = column(layer.saved_bytes for layer in layers) * n
    weights = parameters[:, None] * per_parameter.weight
    read = weights * column(layer.reads_all_weights for layer in layers)
    forward = launch + np.maximum(work, (read + 2 * saved) / device.bandwidth)
    backward = 2 * launch + 2 * np.maximum(work, (weights + 2 * saved) / device.bandwidth)
    workspace = column(layer.workspace_bytes for layer in layers) * n
    update_bytes = 2 * per_parameter.weight + per_parameter.gradient + 2 * per_parameter.optimizer
    return Profile(
        source="analytic",
        device=device.name,
        dtype=scenario.dtype,
        names=tuple(layer.name for layer in layers),
        sizes=sizes,
        table={
            "forward_s": forward,
            "backward_s": backward,
            "saved_bytes": saved,
            "output_bytes": column(layer.output_bytes for layer in layers) * n,
            "workspace_no_grad_bytes": workspace,
            "workspace_forward_bytes": np.zeros_like(workspace),
            "workspace_backward_bytes": workspace,
            "workspace_accumulate_bytes": workspace,
        },
        parameter_bytes=parameters * per_parameter.weight,
        optimizer_s=parameters * update_bytes / device.bandwidth,
        input_bytes=8.0 * model.sequence,  # token numbers as int64
    )


def _layers_profile(scenario: Scenario, model: Layers, sizes: tuple[int, ...]) -> Profile:
    """The costs as they were written: overhead per call plus seconds per sample; no update time."""
    layers = [(spec, index) for spec in model.layers for index in range(spec.repeat)]
    n = np.array(sizes, dtype=float)
    overhead = column(spec.overhead for spec, _ in layers)
    backward = column(2 * spec.forward if spec.backward is None else spec.backward for spec, _ in layers)
    nothing = np.zeros((len(layers), len(sizes)))
    return Profile(
        source="analytic",
        device=scenario.cluster.device.name,
        dtype=scenario.dtype,
        names=tuple(f"{spec.name}.{index}" if spec.repeat > 1 else spec.name for spec, index in layers),
        sizes=sizes,
        table={
            "forward_s": overhead + column(spec.forward for spec, _ in layers) * n,
            "backward_s": overhead + backward * n,
            "saved_bytes": column(spec.output if spec.saved is None else spec.saved for spec, _ in layers) * n,
            "output_bytes": column(spec.output for spec, _ in layers) * n,
            "workspace_no_grad_bytes": nothing,
            "workspace_forward_bytes": nothing,
            "workspace_backward_bytes": nothing,
            "workspace_accumulate_bytes": nothing,
        },
        parameter_bytes=np.array([spec.parameters for spec, _ in layers]),
        optimizer_s=np.zeros(len(layers)),
    )
