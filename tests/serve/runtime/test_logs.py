"""Tests of the lines of a server's log."""

import json
import logging

import pytest

from jaxinfer.serve.runtime import logs
from jaxinfer.serve.runtime.logs import configure


class Written:
    """A sink that stores the written data."""

    def __init__(self) -> None:
        self._data = b""

    def write(self, data: bytes) -> None:
        self._data += data

    @property
    def text(self) -> str:
        logs.drain()
        return self._data.decode()


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = before
    root.setLevel(level)


def logged(form: str, level: str = "info") -> tuple[logging.Logger, Written]:
    written = Written()
    configure(form, level, written.write)
    return logging.getLogger("jaxinfer.serve.test"), written


def test_json_has_one_object_a_line_with_the_extra_fields():
    logger, stream = logged("json")
    logger.warning("engine %s", "dead", extra={"restarts": 2, "model": "demo"})
    logger.info("zwei\nZeilen ü")
    first, second = map(json.loads, stream.text.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "jaxinfer.serve.test",
        "message": "engine dead",
        "restarts": 2,
        "model": "demo",
    }
    assert second["message"] == "zwei\nZeilen ü"


def test_json_holds_the_traceback():
    logger, stream = logged("json")
    try:
        raise KeyError("a")
    except KeyError:
        logger.exception("failed", extra={"error_id": "17"})
    (line,) = map(json.loads, stream.text.splitlines())
    assert line["error_id"] == "17"
    assert line["traceback"].endswith("KeyError: 'a'")


def test_text_has_one_line_whatever_the_message_holds():
    logger, stream = logged("text")
    logger.info("a\nb\r", extra={"name_of_it": "x\ny"})
    (line,) = stream.text.splitlines()
    assert line.endswith("info    jaxinfer.serve.test: a\\nb\\r name_of_it='x\\ny'")


def test_the_level_holds():
    logger, stream = logged("text", "error")
    logger.warning("no")
    assert stream.text == ""
    logger.error("yes")
    assert "yes" in stream.text


def test_libraries_are_heard_when_something_is_wrong():
    _, stream = logged("text")
    logging.getLogger("uvicorn.error").info("started")
    assert stream.text == ""
    logging.getLogger("uvicorn.error").error("failed")
    assert "failed" in stream.text
    _, stream = logged("text", "error")
    logging.getLogger("uvicorn.error").warning("not so bad")
    assert stream.text == ""


def test_long_messages_and_tracebacks_are_cut():
    logger, stream = logged("json")
    try:
        raise ValueError("x" * 10**6)
    except ValueError:
        logger.exception("y" * 10**6)
    (line,) = map(json.loads, stream.text.splitlines())
    assert line["message"] == "y" * 8192 + "…"
    assert line["traceback"] == "x" * 16384


def test_a_template_that_does_not_fit_is_a_line_all_the_same():
    logger, stream = logged("json")
    logger.warning("%d of %d", 1)
    (line,) = map(json.loads, stream.text.splitlines())
    assert line["message"] == "'%d of %d' does not fit its arguments"


def test_what_is_said_to_who_started_it_is_a_line_as_it_is(capsys):
    logs.say("error: early")
    assert capsys.readouterr().err == "error: early\n"
    logger, stream = logged("json")
    logger.info("a")
    logs.say("error: late")
    assert stream.text.splitlines()[1] == "error: late"
