"""A network of two layers."""

from torch import nn


def resnet18(**given: object) -> nn.Module:
    """A convolution and a classifier for 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(8, 10)),
    )
