"""Which models a server hosts, and under which names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.interfaces.errors import CheckpointError
from service.hub import EMBEDDED, embedded
from service.hub.catalog import DEMO_NOTICES, Catalog, embedded_models, load_catalog
from service.link.config import EngineConfig
from service.processes.config import COMPUTED, FIXED, engine_config
from service.settings.reading import SettingsError
from service.settings.settings import Settings, load_settings

GOLDEN = Path(__file__).parent / "golden" / "qwen2_vl"
EMBEDDED_NAMES = {"qwen2_vl", "qwen3_asr", "voxcpm2"}


def load(*models: str, **flags: object) -> Catalog:
    return load_catalog(load_settings({"model": models, **flags}))


def test_a_directory_is_served_under_its_name() -> None:
    catalog = load(str(GOLDEN))
    (model,) = catalog.models
    assert model.names == ("qwen2_vl",) and model.kind == "chat" and not model.demo
    assert catalog.get("qwen2_vl") is model and catalog.get("other") is None
    config = engine_config(load_settings(), catalog)
    assert config.models[0].directory == str(GOLDEN) and config.models[0].name == "qwen2_vl"


def test_the_engine_gets_every_setting_of_a_name_that_it_knows() -> None:
    flags: dict[str, object] = {"max_running": 3, "graph_memory": "2G", "encoder_cache": "1M", "log_format": "json"}
    catalog = load(str(GOLDEN))
    names = set(EngineConfig.__struct_fields__) - COMPUTED - FIXED
    assert names <= Settings.model_fields.keys()
    for settings in (load_settings(), load_settings(flags)):
        config = engine_config(settings, catalog)
        assert {name: getattr(config, name) for name in names} == {name: getattr(settings, name) for name in names}
    assert engine_config(load_settings(), catalog) == EngineConfig(config.models), "defaults differ"


def test_aliases() -> None:
    assert load(str(GOLDEN), served_model_name=["a,b"]).models[0].names == ("a", "b")
    assert load(str(GOLDEN), served_model_name=["a", "b"]).models[0].names == ("a", "b")
    other = str(GOLDEN.parent / "minicpmv_2_5")
    catalog = load(str(GOLDEN), other, served_model_name=[f"{GOLDEN}=first,one", f"{other}=second"])
    assert [model.names for model in catalog.models] == [("first", "one"), ("second",)]


def test_two_models_of_one_name_are_refused() -> None:
    other = str(GOLDEN.parent / "minicpmv_2_5")
    with pytest.raises(CheckpointError, match="'same' names two models"):
        load(str(GOLDEN), other, served_model_name=[f"{GOLDEN}=same", f"{other}=same"])
    with pytest.raises(CheckpointError, match="served_model_name: 'nope' is not one of the models"):
        load(str(GOLDEN), served_model_name=["nope=x"])
    with pytest.raises(SettingsError, match=rf"model: {GOLDEN} is given twice"):
        load(str(GOLDEN), other, str(GOLDEN), served_model_name=["a"])


def test_no_model_means_the_embedded_ones() -> None:
    catalog = load()
    assert {model.name for model in catalog.models} == {f"reprise/{name}" for name in EMBEDDED_NAMES}
    assert all(model.demo for model in catalog.models)
    assert {Path(directory).name for directory in embedded_models()} == EMBEDDED_NAMES


def test_what_is_embedded_is_hosted_and_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN.parent / "qwen3_asr", tmp_path / "qwen3_asr")
    for module in ("service.hub", "service.hub.catalog"):
        monkeypatch.setattr(f"{module}.EMBEDDED", tmp_path)
    (model,) = load_catalog(Settings()).models
    assert model.name == "reprise/qwen3_asr" and "microphone" in DEMO_NOTICES[model.task]


def test_an_embedded_model_is_named_as_it_is_served() -> None:
    """It is never looked for on the hub, where its name may be anybody's."""
    catalog = load("reprise/voxcpm2", str(GOLDEN))
    assert [(model.name, model.demo) for model in catalog.models] == [("reprise/voxcpm2", True), ("qwen2_vl", False)]
    assert catalog.models[0].checkpoint.directory == EMBEDDED / "voxcpm2"
    assert load("reprise/qwen2_vl", served_model_name=["a"]).models[0].names == ("a",)
    assert not {"reprise/none", "reprise/../embedded/voxcpm2"} & embedded().keys()


def test_a_directory_of_an_embedded_models_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN, tmp_path / "reprise/qwen2_vl")
    monkeypatch.chdir(tmp_path)
    (model,) = load("reprise/qwen2_vl").models
    assert (model.name, model.demo) == ("qwen2_vl", False)
    assert model.checkpoint.directory == tmp_path / "reprise/qwen2_vl"


LOCATE = """
import sys
from models.interfaces.errors import CheckpointError
from service.hub import locate
for argument in sys.argv[1:]:
    try:
        found = locate(argument)
        print(found.source, found.revision, found.directory)
    except CheckpointError as error:
        print(error)
"""


def test_offline_the_cache_is_all_there_is(tmp_path: Path) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(GOLDEN, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    # The variables of huggingface_hub are read when it is imported: a process of its own.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", LOCATE, "owner/name", f"owner/name@{commit}", "owner/name@other", "owner/none"]
    lines = subprocess.check_output(command, text=True, env=environ, cwd=GOLDEN.parents[2]).splitlines()
    found = f"owner/name {commit} {repository}/snapshots/{commit}"
    assert lines[:2] == [found, found]
    missing = f"missing or incomplete in the cache {tmp_path}/hub, and HF_HUB_OFFLINE is set"
    assert lines[2:] == [f"owner/name@other: {missing}", f"owner/none: {missing}"]


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        load(str(tmp_path))
    (tmp_path / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="GGUF checkpoints are not hosted"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": null}')
    with pytest.raises(CheckpointError, match="is not hosted"):
        load(str(tmp_path))
