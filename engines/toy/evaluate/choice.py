"""How tokens are chosen while drafting and verifying: greedily, or by the rejection rule at temperature 1."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Choice(Protocol):
    """A rule for n of the sequences, named by their numbers `live` int64 [n]."""

    def token(self, logits: Tensor, live: Tensor) -> Tensor:
        """Tokens int64 [n] drawn from logits [n, V]."""
        ...

    def judge(self, drafts: Tensor, proposed: Tensor, target: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """How many leading drafts int64 [n, k] are accepted, int64 [n], and the token after them, int64 [n].

        proposed [n, k, V] are the logits that each draft was drawn from, target [n, k + 1, V] the model's own after
        the golden token and after each draft.
        """
        ...


class Greedy:
    """The largest logit; a draft is accepted while it is the model's own choice."""

    def token(self, logits: Tensor, live: Tensor) -> Tensor:
        """The lowest id among the largest logits."""
        return logits.argmax(-1)

    def judge(self, drafts: Tensor, proposed: Tensor, target: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Accept while equal; the token after them is the model's choice there."""
        chosen = target.argmax(-1)
        accepted = leading(drafts == chosen[:, :-1])
        return accepted, chosen.gather(1, accepted.unsqueeze(1)).squeeze(1)


class Sampled:
    """Temperature 1 without filters; each sequence has its own stream of random numbers.

    Accepting with probability min(1, p_target / p_draft) and, at the first rejection, drawing from the normalised
    positive part of p_target - p_draft gives exactly the distribution of the model alone (DSpark verification).
    """

    def __init__(self, seeds: Sequence[Sequence[int]]) -> None:
        """One entropy tuple for each sequence."""
        self._dice = [np.random.Generator(np.random.PCG64(list(seed))) for seed in seeds]

    def token(self, logits: Tensor, live: Tensor) -> Tensor:
        """A draw from the softmax."""
        return draw(torch.softmax(logits.double(), -1), self._uniform(live, 1)[:, 0])

    def judge(self, drafts: Tensor, proposed: Tensor, target: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """The rejection rule; when all are accepted the last token is drawn from the last target row."""
        count = drafts.shape[1]
        p_draft, p_target = torch.softmax(proposed.double(), -1), torch.softmax(target.double(), -1)
        at = drafts.unsqueeze(-1)
        ratio = p_target[:, :-1].gather(2, at).squeeze(2) / p_draft.gather(2, at).squeeze(2)
        uniform = self._uniform(live, count + 1)
        accepted = leading(uniform[:, :count] < ratio)
        # Past the last draft nothing was proposed, so there the rest is the target itself.
        proposal = torch.cat((p_draft, torch.zeros_like(p_draft[:, :1])), dim=1)
        rows = torch.arange(len(drafts))
        rest = (p_target[rows, accepted] - proposal[rows, accepted]).clamp_min(0.0)
        return accepted, draw(rest, uniform[:, count])

    def _uniform(self, live: Tensor, count: int) -> Tensor:
        return torch.from_numpy(np.stack([self._dice[i].random(count) for i in live.tolist()]))


def leading(flags: Tensor) -> Tensor:
    """How many flags bool [n, k] are true before the first false one, int64 [n]."""
    return flags.to(torch.int64).cumprod(1).sum(1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Ids int64 [n] by non-negative weights [n, V], which need not add up to 1, at places uniform [n] in [0, 1)."""
    sums = weights.cumsum(-1)
    places = torch.searchsorted(sums, (uniform * sums[:, -1]).unsqueeze(1), right=True)
    return places.squeeze(1).clamp_max(weights.shape[-1] - 1)
