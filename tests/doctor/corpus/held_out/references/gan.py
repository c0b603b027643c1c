"""The discriminator's first step with both ranks' points in one batch."""

import torch


def gradient(script, load):
    net = load(script.discriminator())
    net_g = script.generator()
    real, z = map(torch.cat, zip(script.ring(0, 0), script.ring(0, 1), strict=True))
    with torch.no_grad():
        fake = net_g(z)
    script.d_loss(net(real), net(fake)).backward()
    return net
