"""URLs that parsers stumble over: refused with a name, fetched from nowhere. Names resolve in this process alone."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.media.fetch import Fetcher, UrlPolicy
from tests.media.test_fetch import OPEN, PUBLIC, Unreachable, names, redirector, server
from tests.support.servers import running_server

ODD = [
    "https://xn--/",
    "https://xn--a/",
    "https://xn--zzzzzzzz99999/",
    "https://" + "a" * 64 + ".example/",
    "https://-a.example/",
    "https://\u2488/",
    "https://a\u200bb.example/",
    "https://\ud800/",
    "https://[::1/",
    "https://[v1.x]/",
    "https://a.example:99999/",
    "https://a.example:-1/",
    "https:///x",
    "https:",
    "//",
    "",
]
LETTERS = st.sampled_from("https://@[]:.%?#\\ \t\n\x00-xn0aé\u2488\u200d\uff0e\ud800")


async def fetch(url: str, connector: object, policy: UrlPolicy = OPEN) -> bytes:
    fetcher = Fetcher(policy, resolver=names(a=[PUBLIC]), connector=connector)  # type: ignore[arg-type]
    try:
        return await fetcher.fetch(url, field="url", max_bytes=1000, seconds=60)
    finally:
        await fetcher.close()


@pytest.mark.parametrize("url", ODD)
@pytest.mark.parametrize("policy", [OPEN, UrlPolicy("allowlist", frozenset({"a.example"}))], ids=["public", "listed"])
async def test_odd_urls_are_refused(url: str, policy: UrlPolicy) -> None:
    connector = Unreachable()
    with pytest.raises(InputError) as refused:
        await fetch(url, connector, policy)
    assert refused.value.field == "url" and connector.asked == []


@pytest.mark.parametrize("target", ["https://xn--/", "//xn--a/", "https://[::1/", "https:"])
async def test_odd_redirects_are_refused(target: str) -> None:
    async with server(redirector(target, 1)) as loopback:
        with pytest.raises(InputError):
            await fetch("http://a.example/", loopback)
    assert loopback.asked == [(PUBLIC, 80)]


@settings(deadline=None)
@given(rest=st.text(LETTERS, max_size=20))
async def test_no_url_does_more_than_be_refused(rest: str) -> None:
    with pytest.raises(InputError):
        await fetch(f"https://{rest}", Unreachable())


def test_the_answer_names_the_url() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://xn--/"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    with running_server(media_urls="public") as running:
        refused = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert "not a valid URL" in refused.json()["error"]["message"]
