"""Settings of flags, variables and files, and errors that name the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from models.interfaces.cpus import default_threads
from service.cli.serve_help import choices, describe, descriptions, panel
from service.settings.reading import SettingsError
from service.settings.settings import Settings, load_settings, unknown_variables
from tests.support.rows import rows


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"REPRISE_{name.upper()}", raising=False)
    monkeypatch.delenv("REPRISE_CONFIG", raising=False)


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_n: 3\nport: 1\nmax-images: 5\n")
    monkeypatch.setenv("REPRISE_MAX_N", "4")
    monkeypatch.setenv("REPRISE_PORT", "2")
    settings = load_settings({"max_n": "5"}, file)
    assert (settings.max_n, settings.port, settings.max_images, settings.max_frames) == (5, 2, 5, 768)
    monkeypatch.setenv("REPRISE_CONFIG", str(file))
    assert load_settings().max_images == 5


def test_lists_come_from_words_lists_and_repeated_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: [a, b]\nsolver_steps: [4, 5]\n")
    assert load_settings(config=file).model == ("a", "b")
    assert load_settings(config=file).solver_steps == (4, 5)
    monkeypatch.setenv("REPRISE_MODEL", "c d")
    monkeypatch.setenv("REPRISE_SOLVER_STEPS", "32 4 32")
    settings = load_settings(config=file)
    assert settings.model == ("c", "d") and settings.solver_steps == (32, 4), "once and in order"
    assert load_settings({"model": ["e"]}).model == ("e",)


def test_only_variables_are_split_at_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text('model: "/tmp/a dir/ck"\napi_key: "correct horse battery"\nsolver_steps: 8\n')
    settings = load_settings(config=file)
    assert settings.model == ("/tmp/a dir/ck",) and settings.keys() == ("correct horse battery",)
    assert settings.solver_steps == (8,)
    assert load_settings({"model": ["/tmp/a dir/ck"]}).model == ("/tmp/a dir/ck",)
    monkeypatch.setenv("REPRISE_API_KEY", "correct horse")
    assert load_settings(config=file).keys() == ("correct", "horse")


@pytest.mark.parametrize(
    ("name", "choice"),
    [(name, choice) for name, field in Settings.model_fields.items() for choice in choices(field.annotation)],
)
def test_every_choice_of_help_is_a_flag_and_a_variable(monkeypatch: pytest.MonkeyPatch, name: str, choice: str) -> None:
    if choice == "allowlist":  # which needs one, and the other modes must not have one
        monkeypatch.setenv("REPRISE_MEDIA_DOMAIN", "a.example")
    assert str(getattr(load_settings({name: choice}), name)) == choice
    monkeypatch.setenv(f"REPRISE_{name.upper()}", choice)
    assert str(getattr(load_settings(), name)) == choice


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("4K", 4096), ("1.5M", 1_572_864), ("2GiB", 2 << 30)])
def test_bytes_have_units(text: str, size: int) -> None:
    assert load_settings({"max_body": text}).max_body == size


@pytest.mark.parametrize("text", ["yes", "true", "on", "1:30"])
def test_a_number_in_a_file_is_written_as_for_a_flag(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    for name in ("port", "drain_delay", "memory_share", "max_body", "threads", "solver_steps", "max_waiting"):
        file.write_text(f"{name}: {text}\n")
        with pytest.raises(SettingsError, match=rf"^{name}: must be a .* \('{text}' given\)$"):
            load_settings(config=file)


def test_a_file_means_what_flags_mean(tmp_path: Path) -> None:
    """YAML alone would make booleans of these words, and other numbers of these digits."""
    written = {"media_urls": "off", "page": "no", "graphs": "0", "max_n": "010", "api_key": "0x1F"}
    file = tmp_path / "settings.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, text in written.items()) + "model: [1e5]\nlexicon: null\n")
    assert load_settings(config=file) == load_settings({**written, "model": ["1e5"]})


def test_unknown_keys_of_a_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_imagez: 3\n")
    with pytest.raises(SettingsError, match=r"max_imagez.*did you mean max_images"):
        load_settings(config=file)


def test_unknown_variables_are_named() -> None:
    environ = {"REPRISE_MAX_IMAGEZ": "3", "REPRISE_PORT": "1", "REPRISE_CONFIG": "x", "REPRISE_URL": "z", "PATH": "y"}
    assert unknown_variables(environ) == ["REPRISE_MAX_IMAGEZ (did you mean REPRISE_MAX_IMAGES?)"]


def test_hosts_of_media_may_have_ports_and_be_addresses() -> None:
    hosts = ("A.example:8443", "xn--bcher-kva.example", "host_1", "192.0.2.7:443", "2001:db8::1")
    assert load_settings({"media_urls": "allowlist", "media_domain": [*hosts]}).media_domain == hosts


def test_an_invalid_value_is_shown_unless_it_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_PORT", "http")
    with pytest.raises(SettingsError, match=r"^port: must be a valid integer \('http' given\)$"):
        load_settings()
    with pytest.raises(SettingsError, match=r"^max_n: .* \(1000 given\)$"):
        load_settings({"port": 1, "max_n": 1000})
    with pytest.raises(SettingsError, match=r"^api_key: ") as caught:
        load_settings({"port": 1, "api_key": [12345678]})
    assert "12345678" not in str(caught.value)


def test_what_is_wrong_with_a_value_is_said_in_plain_words() -> None:
    for line in Path(__file__).with_name("refused_settings.tsv").read_text().splitlines():
        flags, said = line.split("\t")
        with pytest.raises(SettingsError) as caught:
            load_settings(json.loads(flags))
        assert str(caught.value) == said


def test_a_file_that_does_not_fit_is_named_with_the_place(tmp_path: Path) -> None:
    """Of what is no YAML, or no mapping."""
    file = tmp_path / "bad.yaml"
    for text, said in rows(__file__, "refused_files.jsonl"):
        file.write_text(text)
        with pytest.raises(SettingsError) as caught:
            load_settings(config=file)
        message = str(caught.value)
        assert message.startswith(f"{file}: {said}") and "secret" not in message and "unicode" not in message
    with pytest.raises(SettingsError, match=r"missing\.yaml"):
        load_settings(config=tmp_path / "missing.yaml")


def test_a_file_of_keys_may_come_from_windows(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufefffirst\r\n# another one\r\nsecond\r\n".encode())
    assert load_settings({"api_key_file": file}).keys() == ("first", "second")


def test_an_address_wider_than_loopback_needs_a_key_or_insecure_no_auth() -> None:
    for extra in ({"api_key": ["k"]}, {"insecure_no_auth": True}):
        assert load_settings({"host": "0.0.0.0", **extra}).host == "0.0.0.0"
    for loopback in ("localhost", "127.0.0.2", "::1"):
        assert load_settings({"host": loopback}).keys() == ()


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("voices_dir: für alle\n", "utf-8")
    code = (
        "import sys; from service.settings.settings import load_settings; print(ascii(str(load_settings().voices_dir)))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "REPRISE_CONFIG": str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | ascii_only, capture_output=True, text=True)
    assert done.stdout.strip() == ascii("für alle"), done.stderr


def test_what_is_printed_is_a_settings_file_without_secrets(tmp_path: Path) -> None:
    settings = load_settings({"api_key": ["very-secret"], "max_n": 3})
    text = describe(settings)
    assert "very-secret" not in text and "very-secret" not in repr(settings)
    assert yaml.safe_load(text)["max_n"] == 3
    (tmp_path / "again.yaml").write_text(text)
    with pytest.raises(SettingsError, match="api_key: the stars that --print-config writes are no key"):
        load_settings(config=tmp_path / "again.yaml")
    (tmp_path / "again.yaml").write_text(text.replace("*" * 10, "another"))
    again = load_settings(config=tmp_path / "again.yaml")
    assert again.model_dump(exclude={"api_key"}) == settings.model_dump(exclude={"api_key"})


def test_every_setting_is_documented() -> None:
    for name in Settings.model_fields:
        assert descriptions()[name].endswith("."), name
        assert panel(name) in ("Models", "Server", "Engine", "Limits", "Media", "Speech"), name


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (3, 2), (8, 4), (16, 8), (128, 8)])
def test_threads_follow_the_processors(monkeypatch: pytest.MonkeyPatch, count: int, threads: int) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: count)
    assert default_threads() == threads
