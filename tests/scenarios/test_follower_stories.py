"""Stories of an answer that begins from another one's prompt: forked, refused, released, too late."""

from shoal.balancers.reports import GroupRef
from shoal.cluster.core import messages as m
from shoal.cluster.core.following import FollowerMachine
from shoal.cluster.core.state import State
from shoal.engines.core.request import Branch, FinishEvent, FinishReason, TokensEvent

from tests.machines.request_world import POLICY, World, job, start, token_at

DECODE = GroupRef("decode/0", 1)
FORKED = m.Forked(1, DECODE)


def following(**changes):
    world = World(FollowerMachine(job(images=0, **changes), POLICY))
    world.on(m.Begin())
    return world


def forked():
    world = following()
    world.held.add((DECODE, "r/1"))
    world.on(FORKED)
    return world


def tokens(first, end, attempt=1):
    return m.Tokens(attempt, DECODE, TokensEvent(f"r/{attempt}", first, tuple(map(token_at, range(first, end)))))


def test_a_forked_answer_asks_for_nothing_and_is_emitted():
    world = forked()
    world.on(tokens(0, 6))
    world.receive(m.Ended(1, DECODE, FinishEvent("r/1", FinishReason.LENGTH, 6)))
    assert len(world.emitted) == 6
    assert world.finishes[0].cached_tokens == 40
    assert not world.calls
    world.check_nothing_left()


def test_its_engine_dies_and_it_is_computed_on_elsewhere():
    world = forked()
    world.on(tokens(0, 2))
    world.lose("decode/0")
    world.run()
    assert [(s.attempt, len(s.request.token_ids)) for s in world.submits] == [(2, 42)]
    assert world.submits[0].target.name == "decode/1"
    assert len(world.emitted) == 6
    world.check_nothing_left()


def test_refused_or_released_it_is_a_request_of_its_own():
    for event in (m.NotForked(1, DECODE, "no slot"), m.LeaderGone()):
        world = following()
        world.on(event)
        world.run()
        assert len(world.emitted) == 6
        assert (world.submits[0].attempt, world.submits[0].request.branches) == (2, ())
        world.check_nothing_left()


def test_a_fork_that_comes_too_late_is_given_back():
    world = following()
    world.on(m.LeaderGone())
    world.run(until=m.Submitted)
    world.on(m.Forked(1, GroupRef("decode/1", 7)))
    assert m.Abort(GroupRef("decode/1", 7), "r/1", "begun too late") in world.effects
    world.run()
    assert len(world.emitted) == 6
    world.on(m.Forked(1, GroupRef("decode/1", 8)))
    assert world.effects[-1].group.epoch == 8
    world.check_nothing_left()


def test_told_twice_is_told_once():
    world = forked()
    world.on(FORKED)
    world.on(m.LeaderGone())
    assert not any(isinstance(e, m.Abort) for e in world.effects)
    world.on(m.ClientGone())
    assert [e for e in world.effects if isinstance(e, m.Abort)] == [m.Abort(DECODE, "r/1", "client gone")]
    world.check_nothing_left()


def test_nobody_forks_it_before_its_deadline():
    world = following(deadline_us=2_000_000)
    world.run()
    assert world.now_us == 2_000_000
    assert world.finishes[0].failure.status == 504
    world.check_nothing_left()


def test_a_client_leaves_before_the_fork():
    world = following()
    world.on(m.ClientGone())
    assert world.machine.state is State.ENDED
    world.on(FORKED)
    assert world.effects[-1] == m.Abort(DECODE, "r/1", "begun too late")
    world.check_nothing_left()


def test_a_leader_takes_its_branches_along_until_it_has_a_token():
    branch = Branch("r2/1", 8)
    world = start(images=0, branches=(branch,)).run(until=m.Tokens)
    world.events.clear()
    world.lose("prefill/0")
    world.run(until=m.Admitted)
    assert [s.request.branches for s in world.submits] == [(branch,), (branch,)]
    assert not any(isinstance(e, m.ReleaseFollowers) for e in world.effects)
    world.events.clear()
    world.lose(world.submits[1].group.name)
    assert any(isinstance(e, m.ReleaseFollowers) for e in world.effects)
    world.run()
    assert world.submits[2].request.branches == ()
    assert world.effects[-1] == m.ReleaseFollowers()
    world.check_nothing_left()
