"""Frames between processes arrive unchanged; peers without the key or with malformed frames are disconnected."""

import contextlib
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest

from jaxinfer.parallel import frames
from jaxinfer.parallel.frames import Channel, ChannelError, Frame

KEY = b"sixteen bytes or more"


@contextlib.contextmanager
def pair():
    """Yield two connected sockets of the kind used between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calling = socket.create_connection(listening.getsockname())
        called, _ = listening.accept()
    with calling, called:
        yield calling, called


@contextlib.contextmanager
def channels():
    with pair() as (calling, called):
        yield Channel(calling), Channel(called)


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.arange(6, dtype=np.int32).reshape(2, 3), np.array([True, False, True]), np.float32([[1.5]])),
        (np.array(7, np.int32), np.zeros((0, 4), np.float32), np.zeros(3, np.uint32), np.full((2, 2), 255, np.uint8)),
        (np.arange(2_000_000, dtype=np.int64)[::2],),
    ],
)
def test_what_comes_is_what_went(arrays):
    with channels() as (one, other):
        sending = threading.Thread(target=one.send, args=(Frame("copy", {"slot": 3, "names": ["a"]}, arrays),))
        sending.start()
        frame = other.receive()
        sending.join()
    assert (frame.kind, frame.values) == ("copy", {"slot": 3, "names": ["a"]})
    assert len(frame.arrays) == len(arrays)
    for got, want in zip(frame.arrays, arrays, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got, want)


def test_frames_of_several_threads_do_not_mix():
    with channels() as (one, other):
        body = np.arange(50_000, dtype=np.int32)

        def send(number: int) -> None:
            for _ in range(20):
                one.send(Frame(str(number), {}, (body + number,)))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            frame = other.receive()
            assert frame.arrays[0][0] == int(frame.kind)
            assert frame.arrays[0][-1] == int(frame.kind) + len(body) - 1
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.zeros(1, np.complex64)])
def test_no_other_array_is_sent(array):
    with pytest.raises(ValueError, match="a frame holds no arrays of"):
        Frame("copy", {}, (array,)).parts()


def test_what_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "MAX_BODY", 100)
    with pytest.raises(ValueError, match="beyond"):
        Frame("copy", {}, (np.zeros(101, np.bool_),)).parts()


def raw(header: object, body: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!II", *(sizes or (len(text), len(body)))) + text + body


@pytest.mark.parametrize(
    "sent",
    [
        raw(b"", sizes=(frames.MAX_HEADER + 1, 0)),
        raw(b"", sizes=(2, frames.MAX_BODY + 1)),
        raw(b"no json"),
        raw(b"[" * 100_000),
        raw(b"\xff\xfe"),
        raw({"kind": "copy"}),
        raw(["copy", {}]),
        raw(["copy", [], []]),
        raw([3, {}, []]),
        raw(["copy", {}, [["int32", [2]]]]),
        raw(["copy", {}, [["int32", [1]]]], b"12345678"),
        raw(["copy", {}, [["int32", [-1]]]], b"1234"),
        raw(["copy", {}, [["int32", [1 << 62]]]], b"1234"),
        raw(["copy", {}, [["int32", ["1"]]]], b"1234"),
        raw(["copy", {}, [["object", [1]]]], b"12345678"),
        raw(["copy", {}, [["int32", [[1]]]]], b"1234"),
        raw(["copy", {}, [[["int32"], [1]]]], b"1234"),
        raw(["copy", {}, []])[:-1],
        raw(["copy", {}, [["int32", [2]]]], b"1234", sizes=(31, 8)),
        b"\x00",
        b"",
    ],
)
def test_what_is_no_frame_ends_the_connection(sent):
    with pair() as (calling, called):
        calling.sendall(sent)
        calling.close()
        with pytest.raises(ChannelError):
            Channel(called).receive()


@pytest.mark.parametrize(("limit", "sent"), [("HEADER", ["copy", {"x": "y" * 99}, []]), ("BODY", ["copy", {}, []])])
def test_what_is_over_the_limit_is_not_read(monkeypatch, limit, sent):
    monkeypatch.setattr(frames, f"MAX_{limit}", 50)
    with pair() as (calling, called):
        calling.sendall(raw(sent, b"z" * 51))
        with pytest.raises(ChannelError, match="beyond"):
            Channel(called).receive()


def greeted(sides) -> list[object]:
    """Run both sides in threads; return the result or error of each."""
    found: list[object] = [None, None]

    def run(place: int) -> None:
        try:
            found[place] = sides[place]()
        except ChannelError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_those_who_know_the_key_talk():
    with pair() as (calling, called):
        one, other = greeted([lambda: frames.call(calling, KEY), lambda: frames.greet(called, KEY)])
        assert isinstance(one, Channel)
        assert isinstance(other, Channel)
        one.send(Frame("hello"))
        assert other.receive().kind == "hello"


def test_a_wrong_key_ends_the_connection():
    with pair() as (calling, called):
        one, other = greeted([lambda: frames.call(calling, b"x" * 20), lambda: frames.greet(called, KEY)])
        assert isinstance(one, ChannelError)
        assert str(other) == "it does not know the group's key"
        assert called.fileno() == -1


def test_who_pretends_to_lead_is_found_out():
    """A fake leader cannot reuse the caller's proof: its own has another form."""
    with pair() as (calling, called):

        def pretend() -> None:
            called.sendall(frames._GREETING + b"n" * 32)
            got = called.recv(64, socket.MSG_WAITALL)
            called.sendall(got[32:])

        one, _ = greeted([lambda: frames.call(calling, KEY), pretend])
        assert str(one) == "it does not know the group's key"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 64])
def test_a_stranger_does_not_stay(monkeypatch, sent):
    monkeypatch.setattr(frames, "HANDSHAKE_SECONDS", 0.3)
    with pair() as (calling, called):
        calling.sendall(sent)
        start = time.monotonic()
        with pytest.raises(ChannelError):
            frames.greet(called, KEY)
        assert time.monotonic() - start < 60


def test_one_who_drips_is_cut_off(monkeypatch):
    monkeypatch.setattr(frames, "HANDSHAKE_SECONDS", 0.5)
    with pair() as (calling, called):
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    calling.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        start = time.monotonic()
        with pytest.raises(ChannelError):
            frames.greet(called, KEY)
        assert time.monotonic() - start < 60
        stop.set()
        dripping.join()
