"""Lines of a server's log."""

import io
import json
import logging

import pytest

from jaxinfer.serve.logs import configure


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    before, level = root.handlers, root.level
    yield
    root.handlers = before
    root.setLevel(level)


def logged(form: str, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure(form, level, stream)
    return logging.getLogger("jaxinfer.serve.test"), stream


def test_json_has_one_object_a_line_with_the_extra_fields():
    logger, stream = logged("json")
    logger.warning("engine %s", "dead", extra={"restarts": 2, "model": "demo"})
    logger.info("zwei\nZeilen ü")
    first, second = map(json.loads, stream.getvalue().splitlines())
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
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line["error_id"] == "17"
    assert line["traceback"].endswith("KeyError: 'a'")


def test_text_has_one_line_whatever_the_message_holds():
    logger, stream = logged("text")
    logger.info("a\nb\r", extra={"name_of_it": "x\ny"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("info    jaxinfer.serve.test: a\\nb\\r name_of_it='x\\ny'")


def test_the_level_holds():
    logger, stream = logged("text", "error")
    logger.warning("no")
    assert stream.getvalue() == ""
    logger.error("yes")
    assert "yes" in stream.getvalue()


def test_libraries_are_heard_when_something_is_wrong():
    _, stream = logged("text")
    logging.getLogger("uvicorn.error").info("started")
    assert stream.getvalue() == ""
    logging.getLogger("uvicorn.error").error("failed")
    assert "failed" in stream.getvalue()
    _, stream = logged("text", "error")
    logging.getLogger("uvicorn.error").warning("not so bad")
    assert stream.getvalue() == ""
