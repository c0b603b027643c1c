"""A small image captioner, and padded captions of different lengths.

It has the structure of the captioner in the thread "Gradient accumulation gives different results
compared to full batch": a vision transformer encodes the picture, and a GPT-2 attends to its
patches. It trains in a second on a laptop, from seeded weights instead of downloaded ones. There is
no dropout and no batch norm, so a caption's loss does not depend on the rest of its batch.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, PIXELS, PATCH = 3, 8, 4
WIDTH, HEADS, LAYERS = 32, 2, 2
LONGEST = 12
VOCABULARY = 40
START = VOCABULARY  # the decoder reads it first and never predicts it
NAMES = 24  # tokens that name things; the others are filler, in a fixed order
PADDING = -100  # what torch's cross-entropy ignores by default

Tail = Literal["easy", "hard"]


class Captions(NamedTuple):
    """B pictures, each with a caption of up to 12 tokens, padded to 12.

    pixels: float32 (B, 3, 8, 8).
    tokens: int64 (B, 12), the decoder's input: START, then all tokens but the last.
    targets: int64 (B, 12), what it has to predict: the tokens, then PADDING.
    """

    pixels: Tensor
    tokens: Tensor
    targets: Tensor


class Captioner(nn.Module):
    """Logits of the next token, (B, T, 40), from pixels (B, 3, 8, 8) and tokens (B, T).

    About 50,000 parameters, float32.
    """

    def __init__(self) -> None:
        super().__init__()
        patches = (PIXELS // PATCH) ** 2
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.patch_positions = nn.Parameter(torch.empty(patches, WIDTH))
        self.encoder = Block(causal=False, looks_at_picture=False)
        self.picture_norm = nn.LayerNorm(WIDTH)
        self.embedding = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.token_positions = nn.Parameter(torch.empty(LONGEST, WIDTH))
        self.decoder = nn.ModuleList(
            Block(causal=True, looks_at_picture=True) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        picture = self.patches(pixels).flatten(2).transpose(1, 2) + self.patch_positions
        picture = self.picture_norm(self.encoder(picture))
        x = self.embedding(tokens) + self.token_positions[: tokens.shape[1]]
        for block in self.decoder:
            x = block(x, picture)
        return self.norm(x) @ self.embedding.weight[:VOCABULARY].T


class Block(nn.Module):
    """Self-attention, cross-attention if wanted, MLP: each with layer norm and residual."""

    def __init__(self, causal: bool, looks_at_picture: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        if looks_at_picture:
            self.picture_norm, self.picture_attention = nn.LayerNorm(WIDTH), Attention(causal=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, picture: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        if picture is not None:
            x = x + self.picture_attention(self.picture_norm(x), picture)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Multi-head attention of `x` (B, T, 32) over `seen` (B, S, 32)."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_and_value = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        key, value = self.key_and_value(seen).chunk(2, dim=-1)
        parts = self.query(x), key, value
        by_head = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(*by_head, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


def draw_captions(
    captions: int, seed: int, tail: Tail = "easy", lengths: Sequence[int] | None = None
) -> Captions:
    """`captions` pictures with captions; the same arguments give the same data on any machine.

    A picture shows the first name of its caption. The tail decides whether short or long captions
    have the higher loss per token.

    - "easy": two names, then filler in an order that can be learned. Short captions are harder.
    - "hard": one token of filler, then names to the end. Long captions are harder.

    Lengths are random, 2 to 12, unless given.

    Raises ValueError for another tail, or for lengths that are not `captions` numbers of 1 to 12.
    """
    if tail not in get_args(Tail):
        raise ValueError(f"tail must be 'easy' or 'hard', got {tail!r}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, LONGEST + 1, (captions,), generator=generator)
    size = drawn if lengths is None else torch.tensor(lengths)
    if size.shape != (captions,) or size.min() < 1 or size.max() > LONGEST:
        raise ValueError(f"lengths must be {captions} numbers of 1 to {LONGEST}, got {lengths}")
    said = torch.randint(NAMES, (captions, LONGEST), generator=generator)
    if tail == "easy":
        said[:, 2:] = NAMES + torch.arange(LONGEST - 2)
    else:
        said[:, 0] = NAMES
    # A picture for each name, the same whatever the seed; what is seen of it is blurred by noise.
    looks = torch.randn(
        VOCABULARY, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0)
    )
    noise = torch.randn(captions, CHANNELS, PIXELS, PIXELS, generator=generator)
    shown = said[:, 0] if tail == "easy" else said[:, 1]
    start = torch.full((captions, 1), START)
    targets = said.masked_fill(torch.arange(LONGEST) >= size[:, None], PADDING)
    return Captions(looks[shown] + noise, torch.cat([start, said[:, :-1]], dim=1), targets)


def micro_batches(captions: Captions, size: int) -> list[Captions]:
    """Cut a batch into micro-batches of `size` captions, in order; the last may be smaller."""
    return [Captions(*parts) for parts in zip(*(t.split(size) for t in captions), strict=True)]


def to_device(captions: Captions, device: torch.device) -> Captions:
    """The same captions on `device`."""
    return Captions(*(tensor.to(device) for tensor in captions))


def joined(parts: Sequence[Captions]) -> Captions:
    """The parts as one batch, in order."""
    return Captions(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def count_tokens(captions: Captions) -> int:
    """How many tokens the captions have in all, without padding."""
    return int((captions.targets != PADDING).sum())


def seeded_captioner(seed: int = 0) -> Captioner:
    """The same random weights on every process."""
    torch.manual_seed(seed)
    return Captioner()


def trained_captioner(tail: Tail = "easy", seed: int = 0, steps: int = 60) -> Captioner:
    """A captioner that has learned a little, like the thread's: `steps` steps of Adam.

    About a second. Trained in float64 and then rounded to float32, so that its weights do not
    depend on the processor.
    """
    model = seeded_captioner(seed).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        pixels, tokens, targets = draw_captions(64, seed=1000 + step, tail=tail)
        optimizer.zero_grad()
        scores = model(pixels.double(), tokens)
        F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()  # or the last step's gradient would be added to the caller's
    return model.float()
