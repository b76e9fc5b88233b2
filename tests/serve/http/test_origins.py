"""Tests of CORS: only pages of allowed origins may read responses."""

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.settings import ServeConfigError, make_config
from tests.serve.http.support import run, serving

PAGE = "https://chat.example.com"
ASKED = {"prompt": "Hi", "max_tokens": 1}


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-request-id",
    }


def test_a_page_of_an_allowed_origin_may_ask_with_its_key(tmp_path):
    """The preflight request has no key; errors are readable by the page, too."""
    key = new_key()
    (tmp_path / "keys.yaml").write_text(key_entry(key, "alice", ["infer"]))

    async def test():
        async with serving(keys=tmp_path / "keys.yaml", allowed_origins=(PAGE,)) as running, running.http() as client:
            first = await client.options("/v1/completions", headers=preflight(PAGE))
            assert first.status_code == 200
            assert first.headers["access-control-allow-origin"] == PAGE
            assert "POST" in first.headers["access-control-allow-methods"]
            allowed = first.headers["access-control-allow-headers"].lower()
            assert all(name in allowed for name in ("authorization", "content-type", "x-request-id"))
            assert "access-control-allow-credentials" not in first.headers
            for headers, status in (({"authorization": f"Bearer {key}"}, 200), ({}, 401)):
                answer = await client.post("/v1/completions", json=ASKED, headers={"origin": PAGE, **headers})
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "x-request-id" in answer.headers["access-control-expose-headers"]

    run(test)


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [((), PAGE, None), ((PAGE,), "https://evil.example.com", None), (("*",), "https://anybody.example", "*")],
)
def test_other_pages_may_not(allowed, origin, answer):
    async def test():
        async with serving(allowed_origins=allowed) as running, running.http() as client:
            first = await client.options("/v1/completions", headers=preflight(origin))
            assert (first.status_code == 200) is (answer is not None)
            then = await client.post("/v1/completions", json=ASKED, headers={"origin": origin})
            for each in (first, then):
                assert each.headers.get("access-control-allow-origin") == answer

    run(test)


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://a b", "", "**"])
def test_what_is_no_origin_is_refused_by_name(origin):
    with pytest.raises(
        ServeConfigError, match=r"^allowed_origins = .*must be an origin, as https://chat\.example\.com"
    ):
        make_config({"model": "demo", "allowed_origins": [origin]})
