"""The check's distinction of activations from weights of the same size."""

import dataclasses

from tests.tools.test_check_programs import make_step, with_line
from tools.check_programs.rules import moved_arrays

TABLE = """\
%rows (p0: bf16[4,8]) -> bf16[4,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %gathered = bf16[4,8]{1,0} gather(%p0)
  ROOT %converted = f32[4,8]{1,0} convert(%gathered)
}

"""


def test_what_is_made_of_a_tables_rows_is_an_activation():
    """This holds even if a weight has the same size; a weight with one row per token is not taken for one."""
    line = "%embedded = f32[4,8]{1,0} fusion(%w1), kind=kLoop, calls=%rows"
    step = make_step(tokens=4, module=with_line(line, TABLE))
    assert moved_arrays(step) == []
    assert [one.name for one in moved_arrays(dataclasses.replace(step, tokens=8))] == ["embedded"]
    other = dataclasses.replace(step, module=with_line(line, TABLE.replace("gather(", "slice(")))
    assert [one.name for one in moved_arrays(other)] == ["embedded"]


def test_logits_are_no_weights_of_as_many_numbers():
    step = make_step(tokens=4, logits=8, module=with_line("%sunk = f32[4,8]{1,0} copy(%w1)"))
    assert moved_arrays(step) == []
    assert [one.name for one in moved_arrays(dataclasses.replace(step, logits=16))] == ["sunk"]


def test_a_recurrence_may_hold_two_more_of_the_widest_in_float32():
    step = make_step()
    recurrent = dataclasses.replace(step, states=True)
    assert recurrent.ceiling - step.ceiling == 2 * 2 * step.tokens * step.widest
