"""Stands for rustbpe, which trains tokenizers: nothing is trained here."""
