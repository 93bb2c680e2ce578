"""deploy/ray on this machine: two replicas on the CPU, loopback only, the real server in each."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers.footprint import children
from tests.support.endless import ENDLESS_TOKENS, endless_checkpoint
from tests.support.miniature import talker
from tests.support.processes import ROOT
from tests.support.ray_serve import ENVIRONMENT as RAY_ENVIRONMENT
from tests.support.ray_serve import ray_serve
from tests.support.sse import sse_events
from tests.support.victims import TEXT, Listener, SocketListener, chat, endless, image_part, long_speech, speech
from tests.support.waiting import GENEROUS, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:::ray")]

ENVIRONMENT = {**RAY_ENVIRONMENT, "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1", "HF_HUB_OFFLINE": "1"}
RUNNING = "reprise_requests_running"
SCALED = {"min_replicas": 1, "max_replicas": 2, "work_per_replica": 3, "upscale_delay": 0, "downscale_delay": 3}
IDLE = 1008
DRAIN_SECONDS = 120
"""Of a replica. Ray may count a request on that was cancelled, and then waits for so long."""
LONG = 1000
"""Tokens of a stream that outlasts many beats of a gauge on a fast machine, and ends in time on a slow one."""
IMPATIENT = httpx.Timeout(2 * GENEROUS, read=2)
"""Of a client that leaves, with the first bytes or before."""
SPOKEN, ANSWERED = "reprise_audio_generated_seconds_total", "reprise_generated_tokens_total"
HITS, MISSES = "reprise_encoder_cache_hits_total", "reprise_encoder_cache_misses_total"


@dataclass(frozen=True)
class Cluster:
    """url: of Ray Serve's proxy, as clients see it."""

    url: str
    settings: dict[str, Any]

    def deploy(self, **arguments: Any) -> None:
        from ray import serve

        from deploy.ray.app import build

        given = {"gpus": 0, "cpus": 1, "settings": self.settings, **arguments}
        serve.run(build(given), name="reprise", route_prefix="/")

    def replicas(self) -> list[str]:
        """Addresses."""
        listed = httpx.get(f"{self.url}/metrics/targets", timeout=GENEROUS).raise_for_status()
        return [group["targets"][0] for group in listed.json()]

    def metric(self, name: str) -> dict[str, float]:
        """By replica, summed over labels."""
        return {address: self.scrape(address, name) for address in self.replicas()}

    def scrape(self, address: str, name: str) -> float:
        lines = httpx.get(f"http://{address}/metrics", timeout=GENEROUS).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def ask(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=chat(**fields), timeout=2 * GENEROUS)

    def listen(self, body: dict[str, Any]) -> Listener:
        path = "/v1/chat/completions" if "messages" in body else "/v1/audio/speech"
        return Listener(self, path, body)  # type: ignore[arg-type]  # all it wants is the URL

    def open(self, body: dict[str, Any]) -> contextlib.AbstractContextManager[httpx.Response]:
        """A stream that nobody reads."""
        return httpx.stream("POST", f"{self.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)

    def wait_idle(self) -> None:
        wait(lambda: not any(self.metric(RUNNING).values()), GENEROUS, "no request runs")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        with ray_cluster() as made:
            made.deploy(min_replicas=2, max_replicas=2)
            yield made


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Everything that Ray starts has ended afterwards."""
    before = set(children(os.getpid()))
    started: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name, ray_serve(Path(name)) as url:
        settings = {
            "model": [str(endless_checkpoint(Path(name))), str(talker())],
            "kv_cache_tokens": ENDLESS_TOKENS,
            "device": "cpu",
            "max_running": 8,
            "drain_timeout": DRAIN_SECONDS,
            "write_timeout": 10 * GENEROUS,  # streams are not read while Ray scales
            "voices_dir": f"{name}/voices",
        }
        try:
            yield Cluster(url, settings)
        finally:
            started = set(children(os.getpid())) - before
    assert len(started) > 5
    for pid in started:
        wait(lambda pid=pid: not Path(f"/proc/{pid}").exists(), DRAIN_SECONDS + GENEROUS, f"process {pid} has ended")


def before_the_picture(turn: int, seed: int) -> dict[str, Any]:
    """A question whose picture comes behind a text of its own: its embedding can be cached, its prefix cannot."""
    content = [{"type": "text", "text": f"Number {turn}."}, image_part(seed=seed)]
    return {"messages": [{"role": "user", "content": content}]}


def test_a_picture_goes_where_it_was_seen(cluster: Cluster) -> None:
    pictures = 0
    while pictures < 4 or min(cluster.metric(MISSES).values()) < 2:
        for turn in range(3):
            assert cluster.ask(tokens=4, **before_the_picture(turn, seed=pictures)).status_code == 200
        pictures += 1
        assert pictures < 30, "one replica gets all pictures"
    hits, misses = cluster.metric(HITS), cluster.metric(MISSES)
    assert sum(misses.values()) == pictures and len(misses) == 2
    assert hits == {address: 2 * seen for address, seen in misses.items()}


def said(stream: bytes) -> str:
    """The text of a streamed answer, which ends as it should."""
    *chunks, end = [event.removeprefix("data: ") for event in sse_events(stream.decode())]
    assert end == "[DONE]" and len(chunks) > 1
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in json.loads(chunk)["choices"])


def test_streams_and_errors_pass_as_they_are(cluster: Cluster) -> None:
    streamed, spoken, told = (
        cluster.listen(body)
        for body in (chat(stream=True, tokens=40), speech(), speech(stream_format="sse", response_format="pcm"))
    )
    talk = SocketListener(cluster, TEXT, max_len=12)  # type: ignore[arg-type]
    for listener in (streamed, spoken, told, talk):
        listener.join(2 * GENEROUS)
    assert [listener.status for listener in (streamed, spoken, told)] == [200] * 3
    assert said(streamed.data) == cluster.ask(tokens=40).json()["choices"][0]["message"]["content"]
    assert len(spoken.data) > 10_000 and b"speech.audio.done" in told.data
    assert "session.done" in talk.types() and talk.num_bytes > 10_000 and talk.code == IDLE
    answer = cluster.ask(temperature=9)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
    named = httpx.get(f"{cluster.url}/v1/models", headers={"x-request-id": "mine"})
    assert named.headers.get_list("x-request-id") == ["mine"] and len(named.headers.get_list("date")) == 1
    assert httpx.get(f"{cluster.url}/metrics").status_code == 404
    assert httpx.get(f"{cluster.url}/ready").json()["status"] == "ready"


def test_work_ends_when_its_client_leaves(cluster: Cluster) -> None:
    for body in (endless(), long_speech(), {**endless(), "stream": False}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/audio/speech"
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", cluster.url + path, json=body, timeout=IMPATIENT) as response,
        ):
            next(response.iter_bytes())
        cluster.wait_idle()


@pytest.fixture(scope="module")
def updated(cluster: Cluster) -> list[Listener]:
    """Streams on every replica while all were replaced. From then on the cluster scales."""
    before = set(cluster.replicas())
    streams: list[Listener] = []
    while not all(cluster.metric(RUNNING).values()):
        streams.append(cluster.listen(chat("Go on.", image_part(seed=len(streams)), tokens=LONG, stream=True)))
        assert len(streams) < 16 and streams[-1].begun.wait(GENEROUS)
    update = threading.Thread(target=cluster.deploy, kwargs=SCALED)
    update.start()
    while update.is_alive():
        answer = cluster.ask(tokens=4)
        assert answer.status_code == 200, answer.text
        time.sleep(0.5)
    assert not before & set(cluster.replicas()), "the update replaced no replica"
    return streams


def test_an_update_lets_streams_end(updated: list[Listener]) -> None:
    for stream in updated:
        stream.join(10 * GENEROUS)
        assert stream.status == 200 and not stream.cut and stream.data.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in stream.data


def test_replicas_come_and_go_with_the_work(cluster: Cluster, updated: list[Listener]) -> None:
    """And one that is given back works on until its last client has gone."""
    wait(lambda: len(cluster.replicas()) == 1, 4 * GENEROUS, "an idle replica is given back")
    (old,) = cluster.replicas()
    with contextlib.ExitStack() as long, contextlib.ExitStack() as short:
        streams = [long.enter_context(cluster.open(long_speech())).iter_raw()]
        for _ in range(2 * SCALED["work_per_replica"]):
            short.enter_context(cluster.open(long_speech()))
        wait(lambda: len(cluster.replicas()) == 2, 4 * GENEROUS, "a replica is added")
        both = set(cluster.replicas())
        (new,) = both - {old}

        def answers() -> bool:
            """Whether the front knows it. What it asks meanwhile is answered by the old one, and done."""
            assert cluster.ask(tokens=1).status_code == 200
            return cluster.scrape(new, ANSWERED) > 0

        wait(answers, 4 * GENEROUS, "the new replica answers")
        streams.append(long.enter_context(cluster.open(long_speech())).iter_raw())
        wait(lambda: cluster.scrape(new, SPOKEN) > 0, 4 * GENEROUS, "the new replica speaks")
        short.close()
        wait(lambda: len(cluster.replicas()) == 1, 4 * GENEROUS, "a replica is given back")
        (gone,) = both - set(cluster.replicas())
        made = cluster.scrape(gone, SPOKEN)

        def speaks_on() -> bool:
            """What fills the buffers between is read."""
            return all(next(stream) for stream in streams) and cluster.scrape(gone, SPOKEN) > made

        wait(speaks_on, GENEROUS, "the replica speaks on")
    wait(lambda: not reachable(gone), GENEROUS, "the replica has ended")


def reachable(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health").status_code == 200
    except httpx.TransportError:
        return False
