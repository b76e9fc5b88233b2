"""The run-time type checker of the suite: all signatures of the packages, with array shapes (addopts in pyproject)."""

import beartype

# As in Python's typing rules (PEP 484), an int is accepted where a float is expected.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
