"""A branch that only rare samples use, and the reading of DDP's error about it."""

import torch

from labkit.scenarios.rare_samples import rare_samples
from labkit.scenarios.two_branches import TwoBranches, headline


def test_a_batch_without_a_rare_sample_gives_the_right_branch_no_gradient():
    inputs, model = rare_samples(rare_inputs=True).inputs, TwoBranches()
    model(inputs[:8]).sum().backward()
    lacking = [name for name, p in model.named_parameters() if p.grad is None]
    assert lacking == ["right.weight", "right.bias"]
    model(inputs[8:]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_each_sample_has_the_same_output_in_every_batch():
    inputs, model = rare_samples(rare_inputs=True).inputs, TwoBranches()
    apart = torch.cat([model(sample[None]) for sample in inputs])
    torch.testing.assert_close(model(inputs), apart)


def test_the_headline_has_the_first_sentence_and_the_names_in_order():
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates much.\n"
        "Parameters which did not receive grad for rank 0: right.weight, right.bias\n"
        "Parameter indices which did not receive grad for rank 0: 4 5"
    )
    assert headline(RuntimeError(text)) == (
        "Expected to have finished reduction\nrank 0 lacks right.bias, right.weight"
    )
    assert headline(RuntimeError("Something else. More.")) == "Something else"
