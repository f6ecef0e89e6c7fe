"""The controller's decisions: starts, losses, back-off, crash loops, draining, adoption, and views that only grow."""

from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.balancers.reports import GroupRef
from shoal.cluster.core import membership as mb

CONFIG = mb.MembershipConfig(
    lost_after_us=3_000, start_timeout_us=10_000, drain_timeout_us=20_000, backoff_us=100, backoff_max_us=400,
    restarts_max=3, restarts_window_us=50_000,
)  # fmt: skip
D0 = GroupRef("decode/0", 1)


def of(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def ready() -> mb.Membership:
    core = mb.Membership(CONFIG)
    core.on(mb.Desire("decode", 2), 0)
    core.on(mb.Started(D0), 10)
    core.on(mb.Started(GroupRef("decode/1", 1)), 10)
    return core


def test_wanted_members_are_started_and_published():
    core = mb.Membership(CONFIG)
    effects = core.on(mb.Desire("decode", 2), 0)
    assert [e.group for e in of(effects, mb.Start)] == [D0, GroupRef("decode/1", 1)]
    assert not core.health().good
    assert core.health().reasons == ("decode: 0 of 2 ready",)
    core.on(mb.Started(D0), 5)
    core.on(mb.Started(GroupRef("decode/1", 1)), 5)
    assert core.health().good
    assert core.view().ready("decode") == (D0, GroupRef("decode/1", 1))


def test_a_death_stops_tells_and_starts_the_next_life_after_a_pause():
    core = ready()
    effects = core.on(mb.Died(D0, "killed"), 1_000)
    assert of(effects, mb.Stop)[0].group == D0
    assert of(effects, mb.Lost)[0].reason == "killed"
    assert not of(effects, mb.Start)
    assert mb.WakeAt(1_100) in effects
    again = core.on(mb.Tick(), 1_100)
    assert of(again, mb.Start)[0].group == GroupRef("decode/0", 2)


def test_silence_is_a_loss_and_a_word_is_life():
    core = ready()
    core.on(mb.Heartbeat(D0), 2_500)
    effects = core.on(mb.Tick(), 3_010)
    assert [e.group.name for e in of(effects, mb.Lost)] == ["decode/1"]
    assert of(effects, mb.Lost)[0].reason == "silent for 0.003 s"


def test_words_of_an_earlier_life_change_nothing():
    core = ready()
    core.on(mb.Died(D0, "x"), 100)
    core.on(mb.Tick(), 200)
    before = core.view()
    for event in (mb.Started(D0), mb.Heartbeat(D0), mb.Died(D0, "again"), mb.Drained(D0)):
        assert not of(core.on(event, 201), mb.Lost)
    assert core.view() == before


def test_back_off_grows_and_a_crash_loop_ends_with_bad_health():
    core, now_us, pauses = ready(), 1_000, []
    for epoch in range(1, 5):
        effects = core.on(mb.Died(GroupRef("decode/0", epoch), "no weights"), now_us)
        wake_us = of(effects, mb.WakeAt)[0].at_us
        core.on(mb.Heartbeat(GroupRef("decode/1", 1)), now_us)
        if epoch < 4:
            pauses.append(wake_us - now_us)
            now_us = wake_us
            core.on(mb.Tick(), now_us)
    assert pauses == [100, 200, 400]
    assert "decode/0 is failed after repeated losses: no weights" in core.health().reasons
    assert not any(
        of(core.on(mb.Heartbeat(GroupRef("decode/1", 1)), t), mb.Start) for t in range(now_us, 50_000, 2_000)
    )
    assert of(core.on(mb.Tick(), now_us + 50_000), mb.Start)  # a quiet window has passed


def test_a_start_that_takes_too_long_is_a_loss():
    core = mb.Membership(CONFIG)
    core.on(mb.Desire("decode", 1), 0)
    assert of(core.on(mb.Tick(), 10_000), mb.Lost)[0].reason == "not ready within 0.01 s"


def test_drained_member_is_replaced_while_it_is_wanted():
    core = ready()
    effects = core.on(mb.Drain("decode/0"), 100)
    assert of(effects, mb.StartDraining) == [mb.StartDraining(D0)]
    assert core.view().ready("decode") == (GroupRef("decode/1", 1),)
    assert D0 in core.view().alive()
    effects = core.on(mb.Drained(D0), 500)
    assert of(effects, mb.Stop)
    assert of(effects, mb.Start)[0].group == GroupRef("decode/0", 2)


def test_a_drain_has_an_end():
    core = ready()
    core.on(mb.Drain("decode/0"), 100)
    core.on(mb.Heartbeat(GroupRef("decode/1", 1)), 20_000)
    effects = core.on(mb.Tick(), 20_100)
    assert "still busy after draining" in of(effects, mb.Stop)[0].reason


def test_fewer_wanted_drains_the_last():
    core = ready()
    effects = core.on(mb.Desire("decode", 1), 100)
    assert [e.group.name for e in of(effects, mb.StartDraining)] == ["decode/1"]
    effects = core.on(mb.Drained(GroupRef("decode/1", 1)), 200)
    assert not of(effects, mb.Start)
    assert core.health().good


def test_a_restarted_controller_adopts_what_runs():
    core = mb.Membership(CONFIG, first_epoch=100)
    core.on(mb.Found(GroupRef("decode/0", 7), "decode"), 0)
    effects = core.on(mb.Desire("decode", 2), 0)
    assert [e.group for e in of(effects, mb.Start)] == [GroupRef("decode/1", 100)]
    assert core.view().ready("decode") == (GroupRef("decode/0", 7),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 4_000)), max_size=60))
def test_epochs_and_views_only_grow(program):
    core, now_us, number, epochs = mb.Membership(CONFIG), 0, 1, {"decode/0": 1, "decode/1": 1}
    core_events = [core.on(mb.Desire("decode", 2), 0)]
    for verb, index, step_us in program:
        now_us += step_us
        group = GroupRef(f"decode/{index}", epochs.get(f"decode/{index}", 1))
        event = [
            mb.Started(group), mb.Heartbeat(group), mb.Died(group, "x"), mb.Drain(group.name), mb.Drained(group),
            mb.Desire("decode", index), mb.Tick(),
        ][verb]  # fmt: skip
        core_events.append(core.on(event, now_us))
        for effect in core_events[-1]:
            if isinstance(effect, mb.Start):
                assert effect.group.epoch > epochs.get(effect.group.name, 0)
                epochs[effect.group.name] = effect.group.epoch
            elif isinstance(effect, mb.Publish):
                assert effect.view.number == number + 1
                number = effect.view.number
            elif isinstance(effect, mb.WakeAt):
                assert effect.at_us > now_us
    wanted = core.desired["decode"]
    for _ in range(400):  # without faults everything wanted comes up
        now_us += 1_000
        core.on(mb.Tick(), now_us)
        for member in core.view().members:
            if member.state is mb.MemberState.STARTING:
                core.on(mb.Started(member.group), now_us)
            elif member.state is mb.MemberState.DRAINING:
                core.on(mb.Drained(member.group), now_us)
            else:
                core.on(mb.Heartbeat(member.group), now_us)
    assert core.health().good
    assert len(core.view().ready("decode")) == wanted


def starts(effects) -> list[tuple[str, int]]:
    return [(effect.group.name, effect.group.epoch) for effect in of(effects, mb.Start)]


def two_groups() -> mb.Membership:
    """Two groups of two ranks, ready."""
    core = mb.Membership(CONFIG)
    for name, epoch in starts(core.on(mb.Desire("decode", 4, ranks=2), 0)):
        core.on(mb.Started(GroupRef(name, epoch)), 10)
    assert core.health().good
    return core


def test_a_group_lives_and_dies_whole():
    core = two_groups()
    effects = core.on(mb.Died(GroupRef("decode/3", 1), "killed"), 1_000)
    assert [e.group.name for e in of(effects, mb.Stop)] == ["decode/3", "decode/2"]
    assert [e.reason for e in of(effects, mb.Lost)] == ["killed", "its group lost decode/3: killed"]
    assert core.view().ready("decode") == (GroupRef("decode/0", 1), GroupRef("decode/1", 1))
    assert core.on(mb.Died(GroupRef("decode/2", 1), "connection closed"), 1_001)[:-1] == ()
    assert starts(core.on(mb.Tick(), 1_100)) == [("decode/2", 2), ("decode/3", 2)]


def test_a_rank_that_does_not_start_takes_its_group_with_it():
    core = mb.Membership(CONFIG)
    core.on(mb.Desire("decode", 2, ranks=2), 0)
    core.on(mb.Started(D0), 5)
    effects = core.on(mb.Tick(), 10_001)
    assert {e.group.name for e in of(effects, mb.Stop)} == {"decode/0", "decode/1"}
    assert starts(core.on(mb.Tick(), 10_101)) == [("decode/0", 2), ("decode/1", 2)]


def test_ranks_drain_together_and_go_when_all_are_empty():
    core = two_groups()
    effects = core.on(mb.Drain("decode/0"), 100)
    assert [e.group.name for e in of(effects, mb.StartDraining)] == ["decode/0", "decode/1"]
    assert not of(core.on(mb.Drained(GroupRef("decode/0", 1)), 200), mb.Stop)  # its mate may need it for a step
    effects = core.on(mb.Drained(GroupRef("decode/1", 1)), 300)
    assert [e.group.name for e in of(effects, mb.Stop)] == ["decode/1", "decode/0"]
    assert starts(effects) == [("decode/0", 2), ("decode/1", 2)]


def test_half_a_group_found_by_a_restarted_controller_is_replaced():
    core = mb.Membership(CONFIG, first_epoch=100)
    core.on(mb.Found(GroupRef("decode/0", 7), "decode"), 0)
    core.on(mb.Found(GroupRef("decode/2", 7), "decode"), 0)
    core.on(mb.Found(GroupRef("decode/3", 7), "decode"), 0)
    effects = core.on(mb.Desire("decode", 4, ranks=2), 0)
    assert [(e.group.name, e.reason) for e in of(effects, mb.Stop)] == [("decode/0", "its group has no decode/1")]
    assert not of(effects, mb.Start)
    assert starts(core.on(mb.Tick(), 100)) == [("decode/0", 100), ("decode/1", 100)]
    assert core.view().ready("decode") == (GroupRef("decode/2", 7), GroupRef("decode/3", 7))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 4_000)), max_size=60))
def test_ranks_of_a_group_never_live_apart(program):
    """Whatever happens, all living ranks of a group have one epoch, and all come up again."""
    core, now_us = mb.Membership(CONFIG), 0
    core.on(mb.Desire("decode", 6, ranks=3), 0)
    for verb, index, step_us in program:
        now_us += step_us
        epoch = {m.group.name: m.group.epoch for m in core.view().members}.get(f"decode/{index}", 1)
        group = GroupRef(f"decode/{index}", epoch)
        event = [
            mb.Started(group), mb.Heartbeat(group), mb.Died(group, "x"), mb.Drain(group.name), mb.Drained(group),
            mb.Desire("decode", index // 3 * 3, ranks=3), mb.Tick(),
        ][verb]  # fmt: skip
        for effect in core.on(event, now_us):
            assert not isinstance(effect, mb.WakeAt) or effect.at_us > now_us
        ended = (mb.MemberState.LOST, mb.MemberState.FAILED)
        for first in (0, 3):
            ranks = [m for m in core.view().members if first <= int(m.group.name[7:]) < first + 3]
            alive = [m for m in ranks if m.state not in ended]
            assert len(alive) in (0, 3), ranks
            assert len({m.group.epoch for m in alive}) <= 1, ranks
    wanted = core.desired["decode"]
    for _ in range(400):
        now_us += 1_000
        core.on(mb.Tick(), now_us)
        for member in core.view().members:
            if member.state is mb.MemberState.STARTING:
                core.on(mb.Started(member.group), now_us)
            elif member.state is mb.MemberState.DRAINING:
                core.on(mb.Drained(member.group), now_us)
            else:
                core.on(mb.Heartbeat(member.group), now_us)
    assert core.health().good
    assert len(core.view().ready("decode")) == wanted
