"""Process groups with threads as processes: admission, termination, and delivery of all calls."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from jaxinfer.parallel import frames
from jaxinfer.parallel import group as groups
from jaxinfer.parallel.frames import Channel, Frame
from jaxinfer.parallel.group import Group, GroupError, Membership, join, lead

KEY = b"sixteen bytes or more"
SOON = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Ends:
    """Records why each process ended."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self._changed = threading.Condition()

    def of(self, number: int):
        def end(reason: str, hangs: bool) -> None:
            assert hangs == ("hangs" in reason)
            with self._changed:
                self.reasons.setdefault(number, reason)
                self._changed.notify_all()

        return end

    def wait(self, count: int) -> dict[int, str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reasons) >= count, SOON), self.reasons
            return dict(self.reasons)


def membership(number: int, port: int, total: int = 2, timeout: float = 10.0, **settings) -> Membership:
    return Membership(
        num_processes=total,
        process_id=number,
        address=f"127.0.0.1:{port}",
        key=KEY,
        timeout=timeout,
        settings={"page_size": 64, **settings},
    )


def gathered(total: int, ends: Ends, timeout: float = 10.0) -> list[Group]:
    port, found = free_port(), dict[int, Group]()

    def run(number: int) -> None:
        meet = lead if number == 0 else join
        found[number] = meet(membership(number, port, total, timeout), ends.of(number), lambda: None)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(total)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return [found[number] for number in range(total)]


@contextlib.contextmanager
def group_of(total: int = 2, timeout: float = 10.0):
    ends = Ends()
    members = gathered(total, ends, timeout)
    try:
        yield members, ends
    finally:
        for member in members:
            member.over("the test is over")


def answer(member: Group, count: int) -> list[Frame]:
    """Take ``count`` calls and finish each."""
    taken = []
    for frame in member.calls():
        member.launched()
        taken.append(frame)
        if len(taken) == count:
            return taken
    return taken


# ---- a healthy group


def test_all_get_all_calls_in_order():
    with group_of(3) as (members, ends):
        assert len({member.coordinator for member in members}) == 1
        for number in range(50):
            members[0].call("copy", {"number": number}, [np.array([number], np.int32)])
            members[0].launched()
        for member in members[1:]:
            taken = answer(member, 50)
            assert [frame.values["number"] for frame in taken] == list(range(50))
            assert [int(frame.arrays[0][0]) for frame in taken] == list(range(50))
        assert not ends.reasons


def test_a_call_reaches_those_that_take_part_alone():
    """The group does not wait for processes that received fewer calls."""
    with group_of(3, timeout=1.0) as (members, ends):
        for number, processes in enumerate(([0, 2], [1], None)):
            members[0].call("copy", {"number": number}, [], processes)
        for _ in range(2):  # number of calls for process 0
            members[0].launched()
        for place, numbers in ((1, [1, 2]), (2, [0, 2])):
            assert [frame.values["number"] for frame in answer(members[place], 2)] == numbers
        time.sleep(1.5)
        assert not ends.reasons


def test_results_that_process_0_waits_for_are_sent_in_order():
    with group_of(3) as (members, _):
        for number in (3, 4):
            members[2].launched({"a": np.arange(number, dtype=np.int32), "b": np.float32([0.5])}, wanted=True)
        members[2].launched(np.arange(9))
        for number in (3, 4):
            got = members[0].answer(2)
            np.testing.assert_array_equal(got[0], np.arange(number))
            np.testing.assert_array_equal(got[1], np.float32([0.5]))


def test_they_agree_on_the_least():
    with group_of(3) as (members, _):
        found = [0, 0, 0]

        def ask(place: int, number: int) -> None:
            found[place] = members[place].least(number)

        threads = [threading.Thread(target=ask, args=each) for each in enumerate((40, 17, 23))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert found == [17, 17, 17]


def test_the_latest_report_of_each_is_kept():
    with group_of(3) as (members, _):
        assert members[0].reports() == []
        for value in range(3):
            members[2].report({"value": value})
        members[1].report({"value": 7})
        for _ in range(int(SOON / 0.01)):
            if members[0].reports() == [{"value": 7}, {"value": 2}]:
                return
            threading.Event().wait(0.01)
        raise AssertionError(members[0].reports())


def test_the_first_waits_until_all_have_compiled():
    with group_of() as (members, _):
        waiting = threading.Thread(target=members[0].ready)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        members[1].ready()
        waiting.join(SOON)
        assert not waiting.is_alive()


def test_a_group_without_work_lives():
    with group_of(timeout=1.0) as (members, ends):
        members[0].call("copy", {}, [])
        members[0].launched()
        answer(members[1], 1)
        time.sleep(2.5)
        assert not ends.reasons


# ---- termination


def test_whoever_goes_ends_all():
    with group_of(3) as (members, ends):
        members[2].over("killed")
        reasons = ends.wait(3)
    assert reasons[0].startswith("process 2 is gone")
    assert reasons[1].startswith("process 0 is gone")


def test_a_process_that_does_not_finish_a_call_ends_the_group():
    """Heartbeats continue; only the unfinished call reveals the hang."""
    with group_of(timeout=1.0) as (members, ends):
        for _ in range(3):
            members[0].call("decode", {}, [])
            members[0].launched()
        answer(members[1], 2)
        reasons = ends.wait(2)
    assert reasons[0] == "process 1 hangs: no call was finished in 1 s, the last was decode"
    assert reasons[1].startswith("process 0 is gone")


def test_whoever_keeps_the_others_waiting_is_named():
    """No process has a result: the collective waits for the process that has not made the call."""

    class Waits:
        def block_until_ready(self) -> None:
            threading.Event().wait()

    with group_of(3, timeout=1.0) as (members, ends):
        members[0].call("decode", {}, [])
        members[0].launched(Waits())
        members[1].launched(Waits())
        assert ends.wait(3)[0].startswith("process 2 hangs: no call was finished in 1 s")


def test_of_calls_of_some_it_is_one_of_those_that_is_named():
    with group_of(3, timeout=1.0) as (members, ends):
        for _ in range(3):
            members[0].call("copy", {}, [], [1])
        answer(members[1], 3)
        members[0].call("decode", {}, [], [2])
        assert ends.wait(3)[0].startswith("process 2 hangs: no call was finished in 1 s")


def test_slow_is_not_stuck():
    with group_of(timeout=2.0) as (members, ends):
        for _ in range(6):
            members[0].call("decode", {}, [])
            members[0].launched()
        for _ in range(6):
            time.sleep(0.5)
            answer(members[1], 1)
        assert not ends.reasons


def test_a_first_process_whose_device_hangs_ends_the_group():
    with group_of(timeout=1.0) as (members, ends):
        members[0].call("decode", {}, [])
        answer(members[1], 1)
        assert ends.wait(2)[0].startswith("process 0 hangs: no call was finished in 1 s")


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_ends_the_group(monkeypatch, silent):
    beat = Group._beat

    def beat_or_not(self: Group) -> None:
        if self.membership.process_id != silent:
            beat(self)

    monkeypatch.setattr(Group, "_beat", beat_or_not)
    with group_of(timeout=1.0) as (_, ends):
        assert ends.wait(2)[1 - silent] == f"process {silent} hangs: it said nothing for 1 s"


def test_a_program_that_fails_ends_the_group():
    class Broken:
        def block_until_ready(self) -> None:
            raise RuntimeError("a device is gone")

    with group_of() as (members, ends):
        members[1].launched(Broken())
        reasons = ends.wait(2)
    assert reasons[1] == "a program failed: a device is gone"


# ---- admission


def asking(member: Membership) -> Channel:
    """Return the channel of a caller that knows the key and has sent its "join" frame."""
    channel = frames.call(_connected(member), member.key)
    channel._socket.settimeout(SOON)
    channel.send(Frame("join", {"process_id": member.process_id, "settings": dict(member.settings)}))
    return channel


def _connected(member: Membership) -> socket.socket:
    deadline = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection(member.place)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextlib.contextmanager
def leading(port: int):
    """Run a leader that waits for process 1; join at the end if it has not."""
    found: list[Group] = []
    thread = threading.Thread(target=lambda: found.append(lead(membership(0, port), Ends().of(0), lambda: None)))
    thread.start()
    try:
        yield found, thread
    finally:
        if thread.is_alive():
            join(membership(1, port), Ends().of(1), lambda: None)
        thread.join(SOON)
        for group in found:
            group.over("the test is over")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"page_size": 32}, "page_size = 32 of process 1 must be 64, as in process 0"),
        ({"speculative": "ngram"}, "speculative = ngram of process 1 must be None, as in process 0"),
    ],
)
def test_other_settings_are_refused(changed, sentence):
    port = free_port()
    with leading(port) as (found, _):
        with pytest.raises(GroupError, match=sentence):
            join(membership(1, port, **changed), Ends().of(1), lambda: None)
        assert not found


def test_another_number_is_refused():
    port = free_port()
    with leading(port), pytest.raises(GroupError, match="process_id = 5 must be from 1 to 1"):
        join(membership(5, port, total=9), Ends().of(1), lambda: None)


@pytest.mark.parametrize(
    "said",
    [
        Frame("decode"),
        Frame("join"),
        Frame("join", {"process_id": "1", "settings": {"page_size": 64}}),
        Frame("join", {"process_id": 1, "settings": [1]}),
        Frame("join", {"process_id": None, "settings": {"page_size": 64}}),
    ],
)
def test_who_does_not_say_who_it_is_is_refused(said):
    port = free_port()
    with leading(port) as (found, _):
        channel = frames.call(_connected(membership(1, port)), KEY)
        channel.send(said)
        while (answered := channel.receive()).kind == "beat":
            pass
        assert answered.kind == "refused"
        assert not found


def test_strangers_do_not_disturb():
    """Neither peers that send garbage, nor silent ones, nor those with another key disturb it."""
    port = free_port()
    with leading(port) as (found, thread), contextlib.ExitStack() as stay:
        first = stay.enter_context(_connected(membership(0, port)))
        first.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        for _ in range(4):
            stay.enter_context(_connected(membership(0, port)))
        with pytest.raises(frames.ChannelError):
            frames.call(_connected(membership(0, port)), b"x" * 20)
        assert not found
        other = join(membership(1, port), Ends().of(1), lambda: None)
        thread.join(SOON)
        assert found
        other.over("the test is over")


def test_one_that_was_started_again_takes_its_place():
    port, found = free_port(), list[Group]()
    first_of_three = membership(0, port, 3)
    thread = threading.Thread(target=lambda: found.append(lead(first_of_three, Ends().of(0), lambda: None)))
    thread.start()
    before = asking(membership(1, port, 3))
    assert before.receive().kind == "beat"  # its join was accepted
    after = asking(membership(1, port, 3))
    with pytest.raises(frames.ChannelError):
        list(iter(before.receive, None))
    third = join(membership(2, port, 3), Ends().of(2), lambda: None)
    thread.join(SOON)
    while (frame := after.receive()).kind == "beat":
        pass
    assert frame.kind == "begin"
    for group in (*found, third):
        group.over("the test is over")
    after.close()


def test_one_that_goes_before_the_group_is_whole_is_waited_for_again():
    port, total = free_port(), 3
    found: list[Group] = []

    def run() -> None:
        found.append(lead(membership(0, port, total), Ends().of(0), lambda: None))

    thread = threading.Thread(target=run)
    thread.start()
    gone = asking(membership(1, port, total))
    assert gone.receive().kind == "beat"
    gone.close()
    time.sleep(3 * groups.TICK_SECONDS)
    others: list[Group] = []
    late = [
        threading.Thread(target=lambda n=n: others.append(join(membership(n, port, total), Ends().of(n), lambda: None)))
        for n in (2, 1)
    ]
    late[0].start()
    thread.join(3 * groups.TICK_SECONDS)
    assert not found, "process 1 is missing again"
    late[1].start()
    for each in (thread, *late):
        each.join(SOON)
    assert len(found) == 1
    assert len(others) == 2
    for group in (*found, *others):
        group.over("the test is over")


def test_nobody_gets_in_once_the_group_is_whole():
    with group_of() as (members, _), pytest.raises(OSError, match="refused"):
        socket.create_connection(members[0].membership.place, timeout=SOON)


def test_an_address_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GroupError, match=f"coordinator_address = 127.0.0.1:{port} cannot be listened on"):
            lead(membership(0, port), Ends().of(0), lambda: None)
