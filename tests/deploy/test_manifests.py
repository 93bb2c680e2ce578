"""What the compose files promise, read from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from service.settings.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
MARGIN = 10
"""Seconds beyond a drain until a service manager may kill."""


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_ports_are_published_on_loopback() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len({port.rpartition(":")[2] for port in ports}) == len(ports) and all("_PORT:-" in port for port in ports)
    assert all(port.startswith(("127.0.0.1:", "${REPRISE_PUBLISH:-127.0.0.1}:")) for port in ports)


def test_keys_are_variables_and_no_file_with_them_is_tracked() -> None:
    environment = compose()["services"]["server"]["environment"]
    assert environment["REPRISE_API_KEY"] == "${REPRISE_API_KEY:-}"
    named = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    named |= set(re.findall(r"\$\{(\w+)", (ROOT / "deploy/docker-compose.gpu.yml").read_text()))
    example = (ROOT / ".env.example").read_text().splitlines()
    assert named | {"COMPOSE_FILE", "REPRISE_LOG_LEVEL"} == {
        line.strip("# ").partition("=")[0] for line in example if "=" in line
    }
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines() and all(line[:1] in ("", "#") for line in example)


def test_every_setting_in_the_file_reaches_the_server_but_the_port_inside() -> None:
    service = compose()["services"]["server"]
    assert service["env_file"] == [{"path": ".env", "required": False}]
    assert (
        service["environment"]["REPRISE_PORT"] == "8000" and "${REPRISE_PUBLISH_PORT:-8000}:8000" in service["ports"][0]
    )
    fixed = {name for name, value in service["environment"].items() if "${" not in str(value)}
    assert fixed == {"REPRISE_HOST", "REPRISE_PORT"}


def test_containers_have_time_to_drain_and_no_more_rights_than_they_need() -> None:
    service = compose()["services"]["server"]
    drain = Settings.model_fields["drain_timeout"].default
    assert int(service["stop_grace_period"].removesuffix("s")) >= drain + MARGIN
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["job_name"] == "reprise" and scrape["static_configs"] == [{"targets": ["server:8000"]}]


def test_environment_names_settings() -> None:
    files = (compose(), compose("deploy/docker-compose.gpu.yml"))
    names = {name for file in files for service in file["services"].values() for name in service.get("environment", {})}
    ours = {name.removeprefix("REPRISE_").lower() for name in names if name.startswith("REPRISE_")}
    assert ours and ours <= set(Settings.model_fields)


def test_the_ray_application_serves_two_models() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy/ray/reprise.yaml").read_text())["applications"]
    settings = load_settings(application["args"]["settings"])
    assert settings.model == ("Qwen/Qwen2-VL-2B-Instruct", "openbmb/VoxCPM2")
