"""Tests of the OpenAPI page: this server provides all of its resources."""

import re

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.http.app import FILES
from tests.serve.http.support import run, serving


def test_the_page_has_nothing_from_elsewhere():
    async def test():
        async with serving() as running, running.http() as client:
            page = await client.get("/docs")
            assert page.status_code == 200
            named = re.findall(r"(?:src|href)=\"([^\"]+)\"|url: '([^']+)'", page.text)
            addresses = ["".join(pair) for pair in named]
            assert len(addresses) == 4
            assert not re.search(r"https?:|//[a-z]", page.text)
            assert "default-src 'self'" in page.headers["content-security-policy"]
            for address in addresses:
                answer = await client.get(f"/{address}")
                assert answer.status_code == 200
                kind = FILES.get(address.rpartition("/")[2], "application/json")
                assert answer.headers["content-type"].startswith(kind)
                assert len(answer.content) > 500

    run(test)


@pytest.mark.parametrize("name", ["x", "../door.py", "..%2f..%2f..%2fpyproject.toml", "main.py", ""])
def test_nothing_else_is_served_below_it(name):
    async def test():
        async with serving() as running, running.http() as client:
            assert (await client.get(f"/docs/{name}", follow_redirects=False)).status_code in (307, 404)

    run(test)


def test_its_files_need_a_key_as_the_page_does(tmp_path):
    (tmp_path / "keys.yaml").write_text(key_entry(new_key(), "alice", ["infer"]))

    async def test():
        async with serving(keys=tmp_path / "keys.yaml") as running, running.http() as client:
            for path in ("/docs", *(f"/docs/{name}" for name in FILES)):
                assert (await client.get(path)).status_code == 401

    run(test)
