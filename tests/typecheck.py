"""The run-time checker of the suite: all signatures of the packages, array shapes included (addopts in pyproject)."""

import beartype

# As in Python's own typing rules (PEP 484), an int will do where a float is asked for.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
