"""Tables, figures, and source code in chapters; running and checking chapters."""

from labkit.lazy import offer

__getattr__, __all__ = offer(
    __name__,
    {
        "labkit.tables": ["bound", "table", "bitwise_difference"],
        "cells": ["checker", "source", "untouched"],
    },
)
