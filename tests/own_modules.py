"""Modules as people write them, small: none is an nn.Sequential of layers."""

import torch
from torch import nn
from torch.nn import functional


class Convs(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x):
        return functional.gelu(self.second(functional.gelu(self.first(x))))


class UNet(nn.Module):
    """Down, across and up again, with a skip from each level of the way down to that of the way up."""

    def __init__(self, widths=(4, 6, 8)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Convs(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = Convs(widths[-1], widths[-1])
        back = tuple(reversed(widths))
        self.up = nn.ModuleList(Convs(2 * a, b) for a, b in zip(back, (*back[1:], back[-1]), strict=True))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, image):
        x, skips = image, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        changes = stride > 1 or inputs != outputs
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if changes else nn.Identity()

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50's 16 blocks (He et al., arXiv 1512.03385, Table 1), narrow."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for level, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width << level, 2 if level and not index else 1))
                inputs = 4 * (width << level)
            setattr(self, f"layer{level + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class VisionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A class token and positions are parameters of the module itself, the first used again behind the blocks."""

    def __init__(self, width: int = 8, depth: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.ModuleList(VisionBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)
        self.register_buffer("scale", torch.tensor(0.5))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x, names=None):
        samples = x.shape[0]
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(samples, -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.scale + self.cls_token
        return self.head(x[:, 0].reshape(samples, -1))


def images(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    picture = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return picture, torch.randint(5, (samples,), generator=generator)


def squared(output, targets):
    return (output.flatten(1).sum(1) - targets).square().mean()


MODULES = {
    "unet": (UNet, squared),
    "resnet": (ResNet50, functional.cross_entropy),
    "vit": (VisionTransformer, functional.cross_entropy),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODULES[name][0]().double()


def unet():
    """As a scenario names it."""
    module = made("unet").float()
    return module, lambda n: (images(n)[0].float(), images(n)[1]), squared


def unet_in_three():
    return (*unet(), ["middle", "up.1"])


def undecided():
    """Decides by a value outside of its blocks: it cannot be traced."""

    class Undecided(UNet):
        def forward(self, image):
            return super().forward(image if image.sum() > 0 else -image)

    return Undecided(), lambda n: (images(n)[0].float(), images(n)[1]), squared
