"""Downloads that break, disks that are full, hubs that refuse: what arrived stays, and one line says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from models.interfaces.errors import CheckpointError
from service.hub import locate
from service.hub.download import obtain
from tests.hub.conftest import published_files
from tests.support.loopback_hub import TOKEN, Fault, LoopbackHub, Repository

WEIGHTS = "model.safetensors"


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def fetch(revision: str | None = None, lines: Lines | None = None) -> Path:
    return obtain("owner/name", revision, "published", lines if lines is not None else Lines())


def refusal(model: str = "owner/name") -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    line = str(caught.value)
    assert "\n" not in line
    return line


def assert_whole(directory: Path) -> None:
    for name, data in published_files().items():
        assert (directory / name).read_bytes() == data, name


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./modles/sees", "./modles/sees: neither a directory nor a hub id (OWNER/NAME)"),
        ("models/sies", "HF_HUB_OFFLINE is set; there is no directory models/sies"),
        ("owner/name", "owner/name: missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE is set"),
        ("{here}/modles/sees", "{here}/modles/sees: neither a directory nor a hub id (OWNER/NAME)"),
        ("a/b/c", "a/b/c: neither a directory nor a hub id (OWNER/NAME)"),
        ("models", "models: no config.json; there are models in it: models/sees"),
        ("hub", "hub: no config.json; there are models in it: hub/snapshots/123"),
    ],
)
def test_a_mistyped_path_is_told_from_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub, cache: Path, model: str, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for directory in ("models/sees", "hub/snapshots/123"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        locate(model.format(here=tmp_path))
    assert str(caught.value).endswith(says.format(here=tmp_path, cache=constants.HF_HUB_CACHE)), caught.value


def test_a_download_and_what_is_said_of_it(hub: LoopbackHub, cache: Path) -> None:
    lines = Lines()
    directory = fetch(lines=lines)
    assert_whole(directory)
    assert directory.name == "c" * 40
    assert any(line == f"owner/name: downloading 874.9 kB in 1 file to {cache}" for line in lines)
    hub.asked.clear()
    lines.clear()
    assert fetch(lines=lines) == directory
    assert hub.fetched() == [] and lines == []


def test_revisions_are_pinned_and_remembered(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/name"].revisions["v2"] = "e" * 40
    found = locate("owner/name@v2")
    assert found.revision == found.directory.name == "e" * 40 and found.source == "owner/name"
    hub.asked.clear()
    assert locate("owner/name@" + "e" * 40).directory == found.directory
    assert hub.asked == [], "a commit that is there needs no hub"
    assert "has no revision 'v3'" in refusal("owner/name@v3")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("owner/name@v2").directory == found.directory
    assert "HF_HUB_OFFLINE is set" in refusal("owner/name@main")
    assert hub.asked == [] or all(asked.path.endswith("v3") for asked in hub.asked)


def test_a_broken_transfer_is_tried_again(hub: LoopbackHub) -> None:
    hub.faults[WEIGHTS].extend([Fault(cut=300_000), Fault(cut=200_000)])
    assert_whole(fetch())


def test_a_file_that_is_not_as_long_as_listed_is_refused(hub: LoopbackHub) -> None:
    hub.faults[WEIGHTS].append(Fault(body=published_files()[WEIGHTS][:-1]))
    assert refusal().startswith("owner/name: the download failed (")
    assert_whole(fetch())


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        (429, "limits the rate of requests (429): wait a while, or set HF_TOKEN"),
        (500, "fails (500 Internal Server Error): try again later"),
        (503, "fails (503 Service Unavailable): try again later"),
        (403, "forbids it (403): HF_TOKEN must be of an account that may read "),
    ],
)
def test_refusals_are_called_what_they_are(hub: LoopbackHub, status: int, cure: str) -> None:
    hub.forever[""] = Fault(status=status)
    assert f"owner/name: {hub.url} {cure}" in refusal()


def test_gated_repositories(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/name"].access = "gated"
    page = f"{hub.url}/owner/name"
    assert f"HF_TOKEN is not set: accept its licence at {page} and set HF_TOKEN to a token" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert f"{hub.url} does not accept HF_TOKEN (401): it is wrong or has expired" in refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_whole(fetch())
    assert {asked.token for asked in hub.asked[-3:]} == {f"Bearer {TOKEN}"}


def test_private_and_absent_repositories(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/name"].access = "private"
    assert f"not found at {hub.url}/owner/name, or private: check the name; for a private one set HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_whole(fetch())
    with pytest.raises(CheckpointError, match=r"not found at .*/owner/absent"):
        locate("owner/absent")


def test_an_unreachable_hub(hub: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "http://127.0.0.1:9"
    reachable = hub.url
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    line = refusal()
    assert f"{nobody} cannot be reached (" in line and f"the cache {cache} has no copy" in line
    monkeypatch.setattr(constants, "ENDPOINT", reachable)
    directory = fetch()
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    lines = Lines()
    assert fetch(lines=lines) == directory
    assert [line for line in lines if line.startswith("owner/name: the copy in the cache is used, commit cccccccccccc")]


def test_a_copy_stays_in_use_until_the_next_one_is_whole(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch()
    hub.repositories["owner/name"].commit = "d" * 40
    hub.repositories["owner/name"].files[WEIGHTS] += b"longer"
    hub.forever[WEIGHTS] = Fault(cut=0)
    assert "cannot be reached (" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == first


def test_space_is_compared_before_fetching(hub: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.hub.download.free_bytes", lambda path: 200_000)
    assert refusal() == (
        f"owner/name: needs 874.9 kB, 200.0 kB free in {cache}: free some space, or set HF_HOME to a directory on "
        "another disk"
    )
    assert WEIGHTS not in hub.fetched()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_unwritable_cache(hub: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(cache))

    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", refuse)
        line = refusal()
    assert f"cannot use the cache {cache} ({os.strerror(number)}): set HF_HOME" in line
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("a file where the cache is to be")
    assert f"cannot use the cache {cache} (Not a directory): set HF_HOME" in refusal()


PICKLED = b"x" * 100_000


def test_what_is_no_checkpoint_is_refused_from_the_list_alone(hub: LoopbackHub) -> None:
    files = {name: data for name, data in published_files().items() if name != WEIGHTS}
    shards = {f"pytorch_model-{index}.bin": PICKLED for index in range(6)}
    for listed, said in (
        (
            {"README.md": b"", "m-q4.gguf": PICKLED, "m-q8.gguf": PICKLED},
            "a GGUF repository (m-q4.gguf, m-q8.gguf); use",
        ),
        (
            {"unet/config.json": b"{}", "model_index.json": b"{}"},
            "no config.json, only unet/config.json, model_index.json;",
        ),
        ({}, "no config.json, only no files"),
        (
            {"adapter_config.json": b"{}", "adapter_model.safetensors": PICKLED},
            "adapter_config.json: adapter checkpoints",
        ),
        ({**files, **shards, "sub/model.safetensors": PICKLED}, "no safetensors weights, only pytorch_model-0.bin, "),
    ):
        hub.repositories["owner/name"] = Repository(listed)
        line = refusal()
        assert line.startswith(f"owner/name: {said}"), line
        assert hub.fetched() == []
    assert "and 2 more" in line
    assert locate("owner/name", load_format="random").revision == "c" * 40


def test_small_files_are_read_before_weights(hub: LoopbackHub) -> None:
    files = published_files()
    config = json.loads(files["config.json"]) | {"architectures": ["LlamaForCausalLM"]}
    hub.repositories["owner/name"] = Repository(files | {"config.json": json.dumps(config).encode()})
    assert "LlamaForCausalLM" in refusal()
    assert "config.json" in hub.fetched() and WEIGHTS not in hub.fetched()


def test_only_what_loading_reads_is_fetched(hub: LoopbackHub) -> None:
    files = published_files()
    extra = {
        "consolidated.safetensors": PICKLED,
        "pytorch_model.bin": PICKLED,
        "onnx/config.json": b"{}",
        "README.md": b"#",
        "model.py": b"raise SystemExit",
    }
    hub.repositories["owner/name"] = Repository({**files, **extra})
    directory = locate("owner/name").directory
    assert {path.name for path in directory.iterdir()} == set(files)
    assert set(hub.fetched()) == set(files)


def test_of_sharded_weights_those_of_the_index_are_fetched(hub: LoopbackHub) -> None:
    files = published_files()
    weights = files.pop("model.safetensors")
    files["a.safetensors"], files["b.safetensors"], files["old.safetensors"] = weights, weights[:5000], PICKLED
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.repositories["owner/name"] = Repository(files)
    directory = locate("owner/name").directory
    assert {path.name for path in directory.glob("*.safetensors")} == {"a.safetensors", "b.safetensors"}
    assert (directory / "b.safetensors").read_bytes() == weights[:5000]


def test_what_is_no_hub_is_named(hub: LoopbackHub) -> None:
    hub.faults[""].append(Fault(body=b"<html>log in to this network</html>"))
    assert "unexpected answer from" in refusal()
    assert "no hub id" in refusal("a--b/name")
    hub.repositories["owner/name"].commit = "../../x"
    assert ", no commit" in refusal()
