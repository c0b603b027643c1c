"""PPO on two actors: each rank whitens the advantages with its own mean and standard deviation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_ENVS, NUM_STEPS, MINIBATCHES, EPOCHS, UPDATES = 4, 16, 2, 2, 3
GAMMA, LAMBDA, CLIP, VF_COEF, ENT_COEF = 0.99, 0.95, 0.2, 0.5, 0.01


class PointMass:
    """NUM_ENVS points that are to stay near a goal; each rank has its own goals."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.goal = torch.randn(NUM_ENVS, 2, generator=self.g) * (1 + seed)
        self.x = torch.zeros(NUM_ENVS, 2)

    def observe(self):
        return torch.cat([self.x, self.goal], 1)

    def step(self, action):
        self.x = (
            self.x + 0.3 * action.clamp(-1, 1) + 0.05 * torch.randn(NUM_ENVS, 2, generator=self.g)
        )
        return self.observe(), -(self.x - self.goal).norm(dim=1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor_mean = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = probs.sample()
        return (
            action,
            probs.log_prob(action).sum(1),
            probs.entropy().sum(1),
            self.critic(x).squeeze(1),
        )


@torch.no_grad()
def rollout(agent, env, obs):
    steps = []
    for _ in range(NUM_STEPS):
        action, logprob, _, value = agent(obs)
        following, reward = env.step(action)
        steps.append((obs, action, logprob, value, reward))
        obs = following
    observations, actions, logprobs, values, rewards = (torch.stack(t) for t in zip(*steps))
    next_value, advantages, last = agent(obs)[3], torch.zeros_like(rewards), 0.0
    for t in reversed(range(NUM_STEPS)):
        delta = (
            rewards[t] + GAMMA * (next_value if t == NUM_STEPS - 1 else values[t + 1]) - values[t]
        )
        advantages[t] = last = delta + GAMMA * LAMBDA * last
    batch = (observations, actions, logprobs, advantages, advantages + values)
    return [t.flatten(0, 1) for t in batch], obs


def ppo_loss(agent, obs, action, old_logprob, advantage, returns):
    _, logprob, entropy, value = agent(obs, action)
    ratio = (logprob - old_logprob).exp()
    pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    return pg_loss - ENT_COEF * entropy.mean() + VF_COEF * 0.5 * ((value - returns) ** 2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    torch.manual_seed(1 + rank)
    env = PointMass(seed=rank)
    obs = env.observe()
    for update in range(UPDATES):
        (observations, actions, logprobs, advantages, returns), obs = rollout(
            agent.module, env, obs
        )
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for epoch in range(EPOCHS):
            for index in torch.randperm(NUM_ENVS * NUM_STEPS).chunk(MINIBATCHES):
                rows = (t[index] for t in (observations, actions, logprobs, advantages, returns))
                loss = ppo_loss(agent, *rows)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
