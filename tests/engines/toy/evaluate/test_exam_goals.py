"""Goals are marked as their rule says, and nothing is marked that was not measured."""

from shoal.engines.toy.evaluate import goals
from shoal.engines.toy.evaluate.goals import GOALS, SAMPLED, accuracy_key, calibration_key, marks
from shoal.engines.toy.evaluate.losses import Loss
from shoal.engines.toy.evaluate.papers import PAPERS


def test_a_floor_is_met_from_its_bound_on_and_a_ceiling_up_to_it():
    copying, calibration = accuracy_key("copying"), calibration_key(SAMPLED)
    found = {m.goal.key: m.is_met for m in marks({copying: 0.97, calibration: 0.05})}
    assert found == {copying: True, calibration: True}
    found = {m.goal.key: m.is_met for m in marks({copying: 0.969, calibration: 0.051})}
    assert found == {copying: False, calibration: False}


def test_only_what_was_measured_is_marked():
    assert marks({}) == ()
    assert marks({accuracy_key("chat"): 0.1}) == ()


def test_every_goal_belongs_to_a_figure_of_some_paper_loss_or_draft():
    names = [paper.name for paper in PAPERS]
    keys = {goals.accuracy_key(n) for n in names} | {goals.validity_key(n) for n in names}
    keys |= {goals.drop_key(loss) for paper in PAPERS for loss in paper.losses}
    keys |= {rule(c) for rule in (goals.length_key, goals.calibration_key) for c in (goals.GREEDY, goals.SAMPLED)}
    assert {goal.key for goal in GOALS} <= keys
    assert len({goal.key for goal in GOALS}) == len(GOALS)


def test_every_loss_is_tried_on_one_paper():
    assert sorted(loss for paper in PAPERS for loss in paper.losses) == sorted(Loss)
