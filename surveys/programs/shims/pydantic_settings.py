"""Stands for pydantic-settings: reads no environment."""

from pydantic import BaseModel as BaseSettings

__all__ = ["BaseSettings"]
