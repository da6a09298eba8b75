"""Any module: split into layers, and run as stages with the gradients of the whole."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from own_modules import MODULES, UNet, images, made  # noqa: E402
from processes import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpipe_exec import split  # noqa: E402
from gpipe_exec.layers import WorkloadError, load_workload  # noqa: E402
from gpipe_exec.measure.timing import skips_of  # noqa: E402
from gpipe_exec.modules.splitting import SplitError  # noqa: E402

TESTS = Path(__file__).parent


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stages_of_a_module_have_the_losses_gradients_and_names_of_the_whole(num_ranks):
    printed = run_ranks(num_ranks, "modules.py")
    assert printed.split("\n")[0] == "modules are exact"


def test_ranks_hold_what_was_predicted_within_2_percent_also_where_tensors_are_handed_on():
    assert "memory is as predicted" in run_ranks(2, "memory.py")


@pytest.mark.parametrize("name", MODULES)
def test_layers_are_found_and_hold_the_state_under_its_own_names(name):
    module = made(name)
    layers = split(module, images(2)[0])
    assert len(layers) == {"unet": 8, "resnet": 18, "vit": 7}[name]
    held = {key.partition(".")[2]: tensor for key, tensor in layers.state_dict(keep_vars=True).items()}
    state = module.state_dict(keep_vars=True)
    assert held.keys() == state.keys()
    assert all(held[key] is state[key] for key in state)


def test_what_layers_hand_on_to_later_ones_is_found():
    layers = split(UNet(), images(2)[0].float())
    widths, side = (4, 6), 8
    skips = [(level, 5 - level, 4 * 2 * width * (side >> level) ** 2) for level, width in enumerate(widths)]
    assert skips_of(layers, images(2)[0].float()) == skips

    class Masked(nn.Module):
        def forward(self, value):
            x, mask = value
            return x * mask, mask

    x = torch.ones(3, 4)
    assert skips_of(nn.Sequential(Masked(), Masked(), Masked()), (x, x.clone())) == [(-1, 2, 48)]


def test_modes_reach_the_submodules_that_were_not_entered():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    module, x = Dropping(), torch.ones(3, 4)
    module.blocks[1].eval()
    layers = split(module, x)
    assert [layers[i].training for i in range(3)] == [True] * 3
    assert not module.blocks[1][1].training  # as it was
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert torch.equal(layers(x), expected)
    layers.eval()
    assert torch.equal(layers(x), module(x))


def test_arguments_may_come_by_name_and_outputs_nested():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, left, scale=2.0, *, right, flag=False):
            sizes = left.size()
            for block in self.blocks:
                left = block(left) * scale
            return {"sum": left + right, "flat": left.view(sizes[0], -1)}

    inputs = {"right": torch.ones(3, 4), "left": torch.arange(12.0).view(3, 4)}
    module = Two()
    found = split(module, inputs)(inputs)
    assert all(torch.equal(found[key], value) for key, value in module(**inputs).items())


def test_what_cannot_be_split_is_refused_with_the_reason():
    x = images(2)[0].float()
    with pytest.raises(SplitError, match=r"UNet has no submodule 'middel' to cut before, did you mean 'middle'\?"):
        split(UNet(), x, ["middel"])
    with pytest.raises(SplitError, match=re.escape("no nn.ModuleList or nn.Sequential of equal blocks")):
        split(nn.Linear(3, 3), torch.ones(2, 3))
    with pytest.raises(SplitError, match="does not call down itself"):
        split(UNet(), x, ["down"])

    class Training(UNet):
        def forward(self, image):
            return functional.dropout(super().forward(image), training=self.training)

    with pytest.raises(SplitError, match="neither asks whether it is training"):
        split(Training(), x)

    class Counting(UNet):
        calls = 0

        def forward(self, image):
            self.calls += 1
            return super().forward(image) * self.calls

    with pytest.raises(SplitError, match="does not compute the same in layers for 2 samples"):
        split(Counting(), x)


def test_a_scenario_may_name_any_module():
    assert len(load_workload("own_modules:unet", TESTS).layers) == 8
    assert len(load_workload("own_modules:unet_in_three", TESTS).layers) == 3
    with pytest.raises(WorkloadError, match="the forward of Undecided cannot be traced"):
        load_workload("own_modules:undecided", TESTS)
