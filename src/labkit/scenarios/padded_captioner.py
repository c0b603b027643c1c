"""A small image captioner and captions of different lengths, padded.

It has the shape of the captioner in the thread "Gradient accumulation gives different results
compared to full batch": a vision transformer, and a GPT-2 that attends to its patches. It is small
enough to train in a second on a laptop. The thread's own weights (a CLIP encoder and gpt2) would
need a download; these are random, from a seed.

The decoder has GPT-2's parts: learned positions, layer norm before each part, four-fold GELU
layers, an output layer tied to the embedding, and weights of standard deviation 0.02. It has no
dropout and no batch norm, so a caption's loss does not depend on the rest of its batch.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, PIXELS, PATCH = 3, 8, 4
WIDTH, HEADS, LAYERS = 32, 2, 2
LONGEST = 12
WORDS = 40
START = WORDS  # read first by the decoder, and never said
NAMES = 24  # words that name things; those after them are filler, said in a fixed order
PADDING = -100  # what torch's cross-entropy ignores by default

Tail = Literal["easy", "hard"]


class Captions(NamedTuple):
    """B images, each with a caption of up to 12 tokens, padded to 12.

    pixels: float32 (B, 3, 8, 8). tokens: int64 (B, 12), the decoder's input: START, then all
    tokens but the last. targets: int64 (B, 12), the tokens to predict, then PADDING.
    """

    pixels: Tensor
    tokens: Tensor
    targets: Tensor


class Captioner(nn.Module):
    """Scores of the next token, (B, T, 40), from pixels (B, 3, 8, 8) and tokens (B, T).

    About 50 000 parameters, float32.
    """

    def __init__(self) -> None:
        super().__init__()
        patches = (PIXELS // PATCH) ** 2
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.patch_positions = nn.Parameter(torch.empty(patches, WIDTH))
        self.encoder = Block(causal=False, looks_at_picture=False)
        self.picture_norm = nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.word_positions = nn.Parameter(torch.empty(LONGEST, WIDTH))
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
        x = self.words(tokens) + self.word_positions[: tokens.shape[1]]
        for block in self.decoder:
            x = block(x, picture)
        return self.norm(x) @ self.words.weight[:WORDS].T


class Block(nn.Module):
    """Layer norm, part, residual: self-attention, cross-attention to the image if wanted, MLP."""

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
    """Each position of `x` (B, T, 32) attends to the positions of `seen` (B, S, 32)."""

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
    """`captions` images with captions; the same arguments give the same data on any machine.

    A caption begins with names; the image shows the first one. The tail decides whether short or
    long captions have the higher loss per token. With an "easy" tail, two names are followed by
    filler in a fixed order, which can be learned, so short captions have the higher loss. With a
    "hard" tail, one filler token is followed by names, so long captions do. Lengths are 2 to 12,
    at random, unless given.

    Raises ValueError for any other tail, or unless `lengths` are `captions` numbers from 1 to 12.
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
    looks = torch.randn(WORDS, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(captions, CHANNELS, PIXELS, PIXELS, generator=generator)
    shown = said[:, 0] if tail == "easy" else said[:, 1]
    start = torch.full((captions, 1), START)
    targets = said.masked_fill(torch.arange(LONGEST) >= size[:, None], PADDING)
    return Captions(looks[shown] + noise, torch.cat([start, said[:, :-1]], dim=1), targets)


def micro_batches(captions: Captions, size: int) -> list[Captions]:
    """Split a batch into parts of `size` captions, in order; the last may be smaller."""
    return [Captions(*parts) for parts in zip(*(t.split(size) for t in captions), strict=True)]


def joined(parts: Sequence[Captions]) -> Captions:
    """The parts as one batch, in order."""
    return Captions(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def count_words(captions: Captions) -> int:
    """The number of tokens in all captions, without padding."""
    return int((captions.targets != PADDING).sum())


def seeded_captioner(seed: int = 0) -> Captioner:
    """A captioner with the same random weights on every process."""
    torch.manual_seed(seed)
    return Captioner()


def trained_captioner(tail: Tail = "easy", seed: int = 0, steps: int = 60) -> Captioner:
    """A captioner after `steps` steps of Adam: it has learned a little, like the thread's model.

    Takes about a second. Training runs in float64 and the result is rounded to float32, so the
    weights do not depend on the processor.
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


def loss_of_knowing_nothing() -> float:
    """ln 40: the loss per token of a model that finds all tokens equally likely."""
    return math.log(WORDS)
