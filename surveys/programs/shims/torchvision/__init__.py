"""Stands for torchvision: tiny networks, made-up images, and no augmentation."""

from torchvision import datasets, models, transforms

__all__ = ["datasets", "models", "transforms"]
