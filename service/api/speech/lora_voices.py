"""Voices that are low-rank adapters of the speech model: the folders of the setting lora_voices, by name."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection

from models.checkpoints.lora_folders import adapter_folders
from models.interfaces.errors import CheckpointError
from service.hub.catalog import Catalog
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.voices.names import is_name, name_key
from service.voices.store import ID


def lora_voices(settings: Settings, catalog: Catalog, reserved: Collection[str]) -> dict[str, str]:
    """Folder of each adapter by the name_key of its voice. SettingsError for a folder that is not an adapter, and
    unless exactly one speech model is hosted."""
    if settings.lora_voices is None:
        return {}
    hosted = len(catalog.of_kind("speech"))
    if hosted != 1:
        raise SettingsError(f"lora_voices: adapters are of one speech model, and {hosted} are hosted")
    try:
        folders = adapter_folders(settings.lora_voices.expanduser().absolute())
    except CheckpointError as error:
        raise SettingsError(str(error)) from error
    voices: dict[str, str] = {}
    for folder in folders:
        key = name_key(folder.name)
        if not is_name(unicodedata.normalize("NFC", folder.name)) or ID.fullmatch(key):
            raise SettingsError(
                f"lora_voices: {folder.name!r} cannot be a voice's name, which is 1 to 64 letters, digits, spaces or "
                "any of . - _ '"
            )
        if key in reserved:
            raise SettingsError(f"lora_voices: {folder.name!r} is the name of a built-in voice")
        if key in voices:
            raise SettingsError(f"lora_voices: {voices[key]!r} and {folder.name!r} are the same name")
        voices[key] = folder.name
    return voices
