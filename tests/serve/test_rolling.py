"""A rolling upgrade behind haproxy, in the configuration of docs/deploying.md, loses nothing."""

import pytest

from tests.serve import rolling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(rolling.HAPROXY is None, reason="haproxy is not installed"),
]


def test_no_request_is_lost_while_both_servers_are_started_again(tmp_path):
    with rolling.fleet(tmp_path) as fleet:
        ended = rolling.roll(fleet, 500)
    assert ended["whole"] >= 500
    assert ended.keys() == {"whole"}, ended
