"""Stands for sentencepiece, which training imports and does not use."""

SentencePieceProcessor = object
