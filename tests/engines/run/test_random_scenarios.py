"""Random days of a small cluster: two prompt engines, two completion engines, a store, and engines that are lost."""

import dataclasses

import pytest
from engine_world import Rank, World
from shoal.engines.config import Role
from shoal.engines.core.plan import LoadTarget
from shoal.engines.core.request import EngineRequest
from shoal.engines.model.decoder import Model

GRAIN = 16
KEEP = 24
STEPS_MAX = 600


class Day(World):
    """Requests flow from prompt to completion engines; whatever is saved may be hit by a later prompt."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__(model, KEEP, GRAIN, seed)
        self.sources = [self.fresh(Role.PROMPT) for _ in range(2)]
        self.targets = [self.fresh(Role.COMPLETION) for _ in range(2)]
        self.grains: dict[tuple[int, ...], bytes] = {}
        self.anchors: dict[tuple[int, ...], bytes] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.attempts: dict[str, EngineRequest] = {}
        self.said: dict[str, list[int]] = {}
        self.hits = self.losses = 0

    def fresh(self, role: Role) -> Rank:
        return self.rank(role, saves=True, step_tokens_max=self.dice.choice([17, 30, 64]))

    def arrive(self, name: str) -> None:
        """A new conversation, or one that repeats the beginning of an earlier one."""
        request = self.request(name, self.dice.randrange(20, 110), self.sampling(self.dice.randrange(2, 24)))
        if self.requests and self.dice.random() < 0.5:
            earlier = self.requests[self.dice.choice(sorted(self.requests))]
            ids = (*earlier.token_ids, *request.token_ids[:40])
            request = dataclasses.replace(request, token_ids=ids, prompt_len=len(ids))
        self.requests[name], self.said[name] = request, []
        self.send(name)

    def send(self, name: str) -> None:
        """Prefill what is known of a request so far, from the furthest legal anchor in the store."""
        request = self.requests[name]
        ids = (*request.token_ids, *self.said[name])
        furthest = request.prompt_len - KEEP
        legal = [a for a in range(GRAIN, furthest + 1, GRAIN) if ids[:a] in self.anchors]
        hit = max((a for a in legal if all(ids[:g] in self.grains for g in range(GRAIN, a + 1, GRAIN))), default=0)
        wanted = {max(0, furthest) // GRAIN * GRAIN, len(ids) // GRAIN * GRAIN}
        checkpoints = tuple(sorted(a for a in wanted if a > hit))
        attempt = dataclasses.replace(request, token_ids=ids, hit_tokens=hit, checkpoints=checkpoints)
        self.attempts[name] = attempt
        source = self.dice.choice(self.sources)
        self.submit(source, attempt)
        self.hits += hit > 0

    def whole(self, name: str) -> tuple[int, ...]:
        return (*self.requests[name].token_ids, *self.said[name])

    def advance(self, rank: Rank) -> None:
        """One step: load hits that fit, compute, note tokens, save."""
        for name in rank.engine.loads_wanted():
            ids, hit = self.attempts[name].token_ids, self.attempts[name].hit_tokens
            grains = [self.grains[ids[:g]] for g in range(GRAIN, hit + 1, GRAIN)]
            answer = rank.engine.load_hit(name, grains, self.anchors[ids[:hit]])
            if not isinstance(answer, LoadTarget):
                break
        output = rank.step()
        for name, tokens in rank.tokens.items():
            self.said[name] += tokens
            rank.first[name] += len(tokens)
        rank.tokens.clear()
        for grain in output.grains:
            self.grains[self.whole(grain.request_id)[: (grain.index + 1) * GRAIN]] = grain.payload
        for anchor in output.anchors:
            self.anchors[self.whole(anchor.request_id)[: anchor.tokens]] = anchor.payload

    def lose(self) -> None:
        """A completion engine dies; a fresh one takes its place and its requests are prefilled again."""
        index = self.dice.randrange(2)
        lost = sorted(set(self.targets[index].first) - set(self.targets[index].finished))
        self.targets[index] = self.fresh(Role.COMPLETION)
        self.losses += len(lost)
        for name in lost:
            self.send(name)

    def is_over(self) -> bool:
        return all(len(said) == self.requests[name].sampling.max_tokens for name, said in self.said.items())


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_the_plain_loops(narrow: Model, seed: int) -> None:
    day = Day(narrow, seed)
    for step in range(STEPS_MAX):
        if step < 40 and step % 5 == 0:
            day.arrive(f"r{step}")
        if step in (15, 30, 45):
            day.lose()
        source, target = day.dice.choice(day.sources), day.dice.choice(day.targets)
        if source.engine.has_work:
            day.advance(source)
        for name in sorted(source.prompts):
            day.hand_off(source, target, name)
            del source.prompts[name]
        if target.engine.has_work:
            day.advance(target)
        if step > 45 and day.is_over():
            break
    assert day.is_over(), {name: len(said) for name, said in day.said.items()}
    assert day.hits > 0, "nothing was reused: the scenario does not test what it says"
    assert day.losses > 0, "nothing was lost: the scenario does not test what it says"
    for name, request in day.requests.items():
        day.check(request, day.said[name])
    for rank in (*day.sources, *day.targets):
        rank.run()
        capacity = rank.engine.capacity()
        assert capacity.blocks_free == capacity.blocks_count, "blocks leaked"
