"""Vision in plain torch: a residual network of bottlenecks (He et al. 2015, the stride on the 3x3 convolution)."""

import torch.nn.functional as F
from torch import Tensor, nn

RESNET_50 = (3, 4, 6, 3)


def normed(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(n_out),
    )


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow, self.middle = normed(n_in, width, 1), normed(width, width, 3, stride)
        self.wide = normed(width, 4 * width, 1)
        same = stride == 1 and n_in == 4 * width
        self.shortcut = nn.Identity() if same else normed(n_in, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.wide(F.relu(self.middle(F.relu(self.narrow(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Sequential):
    """From images (batch, 3, height, width) to logits (batch, classes); `depths` are the bottlenecks of its stages."""

    def __init__(self, depths: tuple[int, ...] = RESNET_50, classes: int = 1000) -> None:
        blocks, n_in = [], 64
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(n_in, 64 << stage, 2 if stage and not number else 1))
                n_in = 256 << stage
        stem = nn.Sequential(normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        super().__init__(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes))
