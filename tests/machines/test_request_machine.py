"""Random programs of losses, repeats, delays and departures against the request machine."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.cluster.core import messages as m
from shoal.cluster.core.state import State

from tests.machines.request_world import POLICY, World, start

GROUPS = ("prefill/0", "prefill/1", "decode/0", "decode/1", "encode/0", "encode/1")
VERBS = ("call",) * 6 + ("event",) * 9 + ("repeat", "repeat", "lose", "wait", "late", "drop", "fail", "gone")
PROGRAM = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 1000)), min_size=25, max_size=120)


def play(world: World, program: list[tuple[str, int]]) -> None:
    """Faults: any order between messages, repeats, lost answers to calls that acted, lost groups, time."""
    for verb, number in program:
        if verb == "call" and world.calls:
            world.arrive(world.calls.pop(number % len(world.calls)))
        elif verb == "event" and world.events:
            world.receive(world.events.pop(number % len(world.events)))
        elif verb == "repeat" and world.events:
            world.receive(world.events[number % len(world.events)])
        elif verb == "drop" and world.events and world.may_be_lost(number % len(world.events)):
            world.events.pop(number % len(world.events))
        elif verb == "fail":
            n, name = world.machine.attempt, GROUPS[number % 4]
            kinds = (
                m.FetchFailed(n, world.ref(name), "gone"),
                m.HandoffFailed(n, world.ref(name), "checksum"),
                m.EmbeddingLost(n, world.ref(name), 0),
            )
            world.on(kinds[number % 3])
        elif verb == "lose":
            world.lose(GROUPS[number % len(GROUPS)])
        elif verb == "wait":
            world.advance(number * 5_000)
        elif verb == "late":  # time passes and nobody has told the machine yet
            world.now_us += number * 5_000
        elif verb == "gone" and number % 10 == 0:
            world.on(m.ClientGone())


@settings(max_examples=250, deadline=None)
@given(program=PROGRAM, matched=st.sampled_from((0, 8, 24, 64)), images=st.integers(0, 2), rooms=st.integers(0, 3))
def test_each_request_ends_once_and_leaves_nothing(program, matched, images, rooms):
    """Whatever happens, tokens are contiguous, the request ends exactly once, and nobody holds anything for it."""
    world = start(matched=matched, images=images)
    world.rooms_refused = rooms
    play(world, program)
    world.run()
    assert world.machine.state is State.ENDED
    # A hold whose answer was lost is ended by its own time.
    world.now_us += 100_000_000
    world.publish()
    world.check_nothing_left()
    finish = world.finishes[0]
    if finish.finish is not None:
        assert finish.finish.output_tokens == len(world.emitted) == 6
    assert finish.finish is None or finish.failure is None


@settings(max_examples=80, deadline=None)
@given(program=PROGRAM)
def test_normal_deployment_uses_the_same_machine(program):
    world = start(replace(POLICY, normal=True), images=1)
    play(world, program)
    world.run()
    world.now_us += 100_000_000
    world.publish()
    world.check_nothing_left()
    assert all(s.target is None and s.ticket is None for s in world.submits)
    assert not any(isinstance(e, m.Reserve | m.ChooseDecode) for e in world.effects)


@settings(max_examples=80, deadline=None)
@given(program=PROGRAM)
def test_two_runs_of_one_program_are_equal(program):
    """No hidden clock, no hash order: effects and timeline repeat exactly."""
    stories = []
    for _ in range(2):
        world = start(matched=24, images=2)
        play(world, program)
        world.run()
        stories.append((world.machine.timeline(), [type(e) for e in world.effects]))
    assert stories[0] == stories[1]
