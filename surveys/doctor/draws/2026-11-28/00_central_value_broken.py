"""PPO-style training with a central value network on several GPUs.

Every rank simulates its own environments. Gradients of both networks are averaged over the
ranks by hand.
"""

import torch
import torch.distributed as dist
from torch import nn

NUM_ENVS = 32
OBS, STATE, ACTIONS = 6, 10, 4
STEPS = 5
SEED = 42


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 16), nn.ELU(), nn.Linear(16, ACTIONS))

    def forward(self, obs):
        return torch.log_softmax(self.net(obs), dim=-1)


class CentralValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATE, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, state):
        return self.net(state).squeeze(-1)


def build_models():
    return [CentralValue(), Actor()]


def play(rank, step):
    """One rollout: observations, global states, actions, returns."""
    g = torch.Generator().manual_seed(SEED * 1000 + rank * 100 + step)
    state = torch.randn(NUM_ENVS, STATE, generator=g) + 0.5 * rank
    obs = state[:, :OBS]
    actions = torch.randint(ACTIONS, (NUM_ENVS,), generator=g)
    returns = state.sum(-1) + torch.randn(NUM_ENVS, generator=g)
    return obs, state, actions, returns


def average_gradients(model, world_size):
    grads = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(grads, op=dist.ReduceOp.SUM)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(grads[offset : offset + p.numel()].view_as(p) / world_size)
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)  # every rank explores differently

    value_net, actor = build_models()
    for p in actor.parameters():
        dist.broadcast(p.data, src=0)
    value_optimizer = torch.optim.Adam(value_net.parameters(), lr=1e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)

    for step in range(STEPS):
        obs, state, actions, returns = play(rank, step)
        with torch.no_grad():
            advantages = returns - value_net(state)

        value_loss = (returns - value_net(state)).pow(2).mean()
        value_optimizer.zero_grad()
        value_loss.backward()
        average_gradients(value_net, world_size)

        log_prob = actor(obs).gather(1, actions[:, None]).squeeze(1)
        actor_loss = -(log_prob * advantages).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        average_gradients(actor, world_size)

        value_optimizer.step()
        actor_optimizer.step()
        if rank == 0:
            print(f"step {step}: value loss {value_loss.item():.4f}, actor {actor_loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
