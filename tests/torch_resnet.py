"""Residual networks and VGG as torch modules, written from the papers in torchvision's order, to compare with."""

import torch
from torch import nn


class Basic(nn.Module):
    expansion = 1

    def __init__(self, before, width, stride, groups, per_group):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(before, width, stride)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, before, width, stride, groups, per_group):
        super().__init__()
        inner, out = width * per_group // 64 * groups, width * 4
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(before, out, stride)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def shortcut(before, out, stride):
    if stride == 1 and before == out:
        return None
    return nn.Sequential(nn.Conv2d(before, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    def __init__(self, block, depths, groups=1, per_group=64, autocast=None):
        super().__init__()
        self.autocast = autocast
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for stage, (depth, width) in enumerate(zip(depths, (64, 128, 256, 512), strict=True)):
            blocks = []
            for number in range(depth):
                blocks.append(block(before, width, 2 if stage and not number else 1, groups, per_group))
                before = width * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, 1000)

    def logits(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x):
        if self.autocast is None:
            return self.logits(x)
        with torch.autocast("cuda", self.autocast):
            return self.logits(x)


class VGG(nn.Module):
    def __init__(self, depths):
        super().__init__()
        layers, before = [], 3
        for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


NETWORKS = {
    "resnet18": lambda **more: ResNet(Basic, (2, 2, 2, 2), **more),
    "resnet34": lambda **more: ResNet(Basic, (3, 4, 6, 3), **more),
    "resnet50": lambda **more: ResNet(Bottleneck, (3, 4, 6, 3), **more),
    "resnet101": lambda **more: ResNet(Bottleneck, (3, 4, 23, 3), **more),
    "resnet152": lambda **more: ResNet(Bottleneck, (3, 8, 36, 3), **more),
    "resnext50_32x4d": lambda **more: ResNet(Bottleneck, (3, 4, 6, 3), groups=32, per_group=4, **more),
    "vgg16": lambda: VGG((2, 2, 3, 3, 3)),
}
