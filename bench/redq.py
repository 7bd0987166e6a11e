"""Time one update of REDQ against a list of networks, and against its bare matrix products.

    python bench/redq.py [--updates 20] [--rounds 9] [--threads 1]

Hopper's sizes (11 numbers seen, 3 moved), [256, 256], batch 256, M = 2, policy every 20 updates.
"""

import argparse
import statistics
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from products import all_of, redq_products
from timing import Work, alternate, fill_randomly
from torch import Tensor, nn

from rlbook.redq import REDQ
from rlbook.replay import Batch
from rlbook.sac import sac_target, squashed_sample

INPUTS, ACTIONS, HIDDEN, BATCH, SUBSET, DELAY, STORED = 11, 3, 256, 256, 2, 20, 5_000


class HopperSizes(gym.Env[np.ndarray, np.ndarray]):
    """Nothing but the spaces of Hopper, so that MuJoCo is not needed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (INPUTS,))
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,))


gym.register("HopperSizes-v0", HopperSizes, disable_env_checker=True)


def make_agent(num_critics: int) -> REDQ:
    """An agent with random transitions to learn from."""
    keywords: dict[str, Any] = {"hidden": (HIDDEN, HIDDEN), "batch_size": BATCH}
    agent = REDQ("HopperSizes-v0", num_critics=num_critics, policy_delay=DELAY, **keywords)
    agent.replay.add(fill_randomly(np.zeros(STORED, agent.replay.rows.dtype)))
    return agent


def update_agent(agent: REDQ, updates: int) -> None:
    """Make updates as the loop does."""
    for _ in range(updates):
        agent.update(agent.sample())
        agent.updates += 1


def make_network(outputs: int, inputs: int = INPUTS) -> nn.Sequential:
    """One network of the plain kind."""
    middle = [nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*middle, nn.Linear(HIDDEN, outputs))


class ListOfNetworks:
    """REDQ as one writes it first: a list of critics, each with its own optimiser."""

    def __init__(self, agent: REDQ, skip: bool) -> None:
        count = agent.config.num_critics
        self.agent, self.skip, self.updates = agent, skip, 0
        self.actor = make_network(2 * ACTIONS)
        self.critics = [make_network(1, INPUTS + ACTIONS) for _ in range(count)]
        self.targets = [make_network(1, INPUTS + ACTIONS) for _ in range(count)]
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.policy_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4)
        self.optimizers = [torch.optim.Adam(c.parameters(), lr=3e-4) for c in self.critics]

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions."""
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        return squashed_sample(mean, log_std.clamp(-20, 2), torch.randn_like(mean))

    def update(self, batch: Batch) -> None:
        """Make one update."""
        subset = torch.randperm(len(self.critics))[:SUBSET].tolist()
        with torch.no_grad():
            action, log_prob = self.sample(batch.next_obs)
            x = torch.cat([batch.next_obs, action], dim=1)
            if self.skip:
                next_q = torch.cat([self.targets[i](x) for i in subset], dim=1)
            else:
                next_q = torch.cat([target(x) for target in self.targets], dim=1)[:, subset]
            ends, alpha = batch.terminated, self.log_alpha.exp()
            y = sac_target(batch.reward, batch.discount, ends, next_q, log_prob, alpha)
        x = torch.cat([batch.obs, batch.action], dim=1)
        losses = [(critic(x).squeeze(1) - y).square().mean() for critic in self.critics]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.updates += 1
        if self.updates % DELAY == 0:
            self.update_policy(batch)
        with torch.no_grad():
            for target, critic in zip(self.targets, self.critics, strict=True):
                for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                    slow.mul_(0.995).add_(fast, alpha=0.005)

    def update_policy(self, batch: Batch) -> None:
        """Make one update of policy and temperature."""
        action, log_prob = self.sample(batch.obs)
        x = torch.cat([batch.obs, action], dim=1)
        q = torch.cat([critic(x) for critic in self.critics], dim=1).mean(dim=1)
        self.policy_optimizer.zero_grad()
        (self.log_alpha.detach().exp() * log_prob - q).mean().backward()
        self.policy_optimizer.step()
        self.alpha_optimizer.zero_grad()
        (-self.log_alpha * (log_prob.detach() - ACTIONS).mean()).backward()
        self.alpha_optimizer.step()

    def run(self, updates: int) -> None:
        """Make updates."""
        for _ in range(updates):
            self.update(self.agent.sample())


def bare_products(agent: REDQ, updates: int) -> Work:
    """Return the matrix products of updates, and nothing else."""
    sizes = agent.model, INPUTS, BATCH, SUBSET
    critic, both = (all_of(redq_products(*sizes, policy)) for policy in (False, True))

    def run() -> None:
        for update in range(1, updates + 1):
            (both if update % DELAY == 0 else critic)()

    return run


def main() -> None:
    """Print medians, ratios, and how the cost grows with the ensemble."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20, help="updates of one round")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # as `learn` does, and for all alike
    agent, count = make_agent(10), options.updates
    plain, skipping = ListOfNetworks(agent, skip=False), ListOfNetworks(agent, skip=True)
    bare = bare_products(make_agent(10), count)
    times = alternate(
        {
            "rlbook": lambda: update_agent(agent, count),
            "list of networks": lambda: plain.run(count),
            "list, subset only": lambda: skipping.run(count),
            "bare products": bare,
        },
        options.rounds,
    )
    own = times["rlbook"]
    for name, values in times.items():
        median = 1e3 * statistics.median(values) / count
        ratio = statistics.median(b / a for a, b in zip(own, values, strict=True))
        print(f"{name:>18}: {median:6.2f} ms, {ratio:.2f} times rlbook's")
    over = statistics.median(a / b for a, b in zip(own, times["bare products"], strict=True))
    print(
        f"REDQ update, N = 10, [{HIDDEN}, {HIDDEN}], batch {BATCH}, {options.threads} thread(s): "
        f"{over:.2f} times its bare matrix products"
    )
    agents = {size: make_agent(size) for size in (2, 5, 10, 20)}
    works = {str(n): (lambda a=a: update_agent(a, count)) for n, a in agents.items()}
    growth = alternate(works, max(3, options.rounds // 2))
    for name, values in growth.items():
        median = 1e3 * statistics.median(values) / count
        print(f"{'N = ' + name:>18}: {median:6.2f} ms, {median / int(name):.2f} ms a critic")


if __name__ == "__main__":
    main()
