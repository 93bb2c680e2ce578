"""The page at /: what is served, with which headers, to whom. What it does in a browser is in tests/page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx
import pytest

from service.api.http.page import HEADERS, TYPES, read_sources
from service.metrics.metrics import PREFIX, SPECS
from service.metrics.page import WATCHED
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

ADDRESS = re.compile(r"(?:https?:|wss?:)?//[\w.-]+\.\w+|@import|\burl\(")
NAMESPACE = '"http://www.w3.org/2000/svg"'
"""The one address in the files: a name that nothing is loaded from."""
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
IMPORT = re.compile(r'^import [^;]*?"([^"]+)";', re.M)
WORKLET = re.compile(r'addModule\("page/([^"]+)"\)')


class Document(HTMLParser):
    """Elements and attributes of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    @property
    def loaded(self) -> list[str]:
        """Paths of scripts, styles and pictures, relative to the document."""
        links = [attributes["href"] for tag, attributes in self.elements if tag == "link"]
        return links + self.values("src")


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Document:
    return Document(httpx.get(f"{server.url}/").text)


def test_every_file_is_served_with_its_type_and_policy(server: RunningServer, document: Document) -> None:
    front = httpx.get(f"{server.url}/")
    assert front.status_code == 200 and front.headers["content-type"] == "text/html; charset=utf-8"
    for name in read_sources().keys() - {"index.html"}:
        response = httpx.get(f"{server.url}/page/{name}")
        assert response.status_code == 200 and response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert HEADERS.items() <= dict(response.headers).items()
    assert HEADERS.items() <= dict(front.headers).items()
    assert httpx.get(f"{server.url}/page/__init__.py").status_code == 404


def test_the_policy_admits_this_server_alone(document: Document) -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in HEADERS["content-security-policy"]
    inline = {name for _, attributes in document.elements for name in attributes if name.startswith("on")}
    assert not inline and not document.values("style") and "style" not in {tag for tag, _ in document.elements}
    assert all(attributes.get("src") for tag, attributes in document.elements if tag == "script")


def test_no_file_names_another_host() -> None:
    sources = read_sources()
    assert {"index.html", "main.js", "base.css", "icon.svg"} <= sources.keys()
    for name, data in sources.items():
        text = data.decode().replace(NAMESPACE, "")
        assert not ADDRESS.search(text), name
        assert not MARKUP.search(text), name


def test_all_that_is_loaded_exists_and_all_that_exists_is_loaded(document: Document) -> None:
    sources = read_sources()
    pending = {path.rpartition("/")[2] for path in document.loaded}
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        reached.add(name)
        if name.endswith(".js"):
            imported = IMPORT.findall(sources[name].decode())
            assert all(path.startswith("./") for path in imported), name
            worklets = WORKLET.findall(sources[name].decode())
            pending |= {*worklets, *(path.removeprefix("./") for path in imported)} - reached
    assert reached == sources.keys() - {"index.html"}


def test_ids_are_unique_labels_lead_to_fields_and_scripts_to_ids(document: Document) -> None:
    ids = document.values("id")
    assert len(ids) == len(set(ids))
    assert set(document.values("for")) | set(document.values("aria-labelledby")) <= set(ids)
    wanted = {id for data in read_sources().values() for id in re.findall(r'byId\("([^"]+)"\)', data.decode())}
    assert wanted <= set(ids)
    fields = {
        attributes["id"]: attributes for tag, attributes in document.elements if tag in ("input", "textarea", "select")
    }
    wrapped = {"aloud", "consent", "hands-free"}  # inside their labels
    unlabelled = {id for id, attributes in fields.items() if "hidden" not in attributes} - {*document.values("for")}
    assert unlabelled - wrapped <= set()


def test_files_are_asked_for_again_and_not_sent_again(server: RunningServer, document: Document) -> None:
    for path in ("", document.loaded[0]):
        front = httpx.get(f"{server.url}/{path}")
        assert front.headers["cache-control"] == "no-cache"
        again = httpx.get(f"{server.url}/{path}", headers={"if-none-match": f'"other", {front.headers["etag"]}'})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == front.headers["etag"]
        assert httpx.get(f"{server.url}/{path}", headers={"if-none-match": '"other"'}).status_code == 200
    assert httpx.head(f"{server.url}/").status_code == 200


def test_it_loads_without_a_key(server: RunningServer) -> None:
    with running_server(api_key=("the-key",)) as guarded:
        document = Document(httpx.get(f"{guarded.url}/").text)
        assert all(httpx.get(urljoin(f"{guarded.url}/", path)).status_code == 200 for path in document.loaded)
    assert httpx.post(f"{server.url}/", headers={"origin": "http://foreign.example"}).status_code == 403
    assert httpx.post(f"{server.url}/").status_code == 405


def test_it_can_be_left_out() -> None:
    with running_server(page=False) as running:
        assert httpx.get(f"{running.url}/").status_code == 404
        assert httpx.get(f"{running.url}/v1/models").status_code == 200


def test_requests_from_before_the_page_was_opened_are_counted() -> None:
    with running_server() as server:
        url = f"{server.url}/metrics/history"
        wait(lambda: len(httpx.get(url).json()) > 0, GENEROUS, "the first reading, at the start")
        (first, *_) = httpx.get(url).json()
        assert first["age"] >= 0 and f"{PREFIX}_requests_running" in first["metrics"]
        named = set(re.findall(rf"^{PREFIX}_(\w+)", first["metrics"], re.MULTILINE))
        assert named <= set(WATCHED), "no others"


def test_all_that_the_page_draws_is_kept() -> None:
    watch = (ROOT / "service/page/watch.js").read_text()
    plots = watch[watch.index("const PLOTS") : watch.index("let readings")]
    drawn = {spec.name for spec in SPECS if f'"{spec.name}"' in plots}
    kept = {name.removesuffix("_bucket") for name in WATCHED}
    assert drawn and drawn <= kept and kept <= {spec.name for spec in SPECS}
