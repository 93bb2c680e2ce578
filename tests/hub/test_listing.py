"""The list of files decides: what cannot be served is refused before anything heavy is fetched."""

from __future__ import annotations

import json

import pytest

from models.interfaces.errors import CheckpointError
from service.hub import locate
from tests.hub.conftest import published_files
from tests.support.loopback_hub import Fault, LoopbackHub, Repository

PICKLED = b"x" * 100_000


def refusal(model: str = "owner/name", **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(model, **options)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_gguf_repositories_are_refused_from_the_list_alone(hub: LoopbackHub) -> None:
    hub.repositories["owner/name"] = Repository({"README.md": b"", "m-q4.gguf": PICKLED, "m-q8.gguf": PICKLED})
    line = refusal()
    assert line.startswith("owner/name: a GGUF repository (m-q4.gguf, m-q8.gguf); use one with config.json")
    assert hub.fetched() == []


def test_weights_in_other_formats_are_refused_from_the_list_alone(hub: LoopbackHub) -> None:
    files = published_files()
    del files["model.safetensors"]
    shards = {f"pytorch_model-{index}.bin": PICKLED for index in range(6)}
    hub.repositories["owner/name"] = Repository({**files, **shards, "sub/model.safetensors": PICKLED})
    line = refusal()
    assert "no safetensors weights, only pytorch_model-0.bin, " in line and "and 2 more" in line
    assert hub.fetched() == []
    assert locate("owner/name", load_format="random").revision == "c" * 40


def test_a_repository_without_a_configuration_is_refused_with_what_is_there(hub: LoopbackHub) -> None:
    hub.repositories["owner/name"] = Repository({"unet/config.json": b"{}", "model_index.json": b"{}"})
    assert "no config.json, only unet/config.json, model_index.json; needed are config.json" in refusal()
    hub.repositories["owner/name"] = Repository({})
    assert "no config.json, only no files" in refusal()
    assert hub.fetched() == []


def test_adapters_are_refused_from_the_list_alone(hub: LoopbackHub) -> None:
    hub.repositories["owner/name"] = Repository({"adapter_config.json": b"{}", "adapter_model.safetensors": PICKLED})
    assert refusal() == "owner/name: adapter_config.json: adapter checkpoints are not hosted"
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"), ({"quantization_config": {}}, None)],
)
def test_small_files_are_read_before_weights(hub: LoopbackHub, change: dict[str, object], message: str | None) -> None:
    files = published_files()
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | change).encode()
    hub.repositories["owner/name"] = Repository(files)
    if message is None:
        assert locate("owner/name").directory.is_dir()
        return
    assert message in refusal()
    assert "config.json" in hub.fetched() and "model.safetensors" not in hub.fetched()


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
