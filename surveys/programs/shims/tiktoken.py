"""Stands for tiktoken: one token per character."""


class _Encoding:
    def encode(self, text: str) -> list[int]:
        return [ord(character) % 60 for character in text]


def get_encoding(name: str) -> _Encoding:
    """An encoding, whatever its name."""
    return _Encoding()
