"""Stands for diffusers: an encoder of images without weights."""
