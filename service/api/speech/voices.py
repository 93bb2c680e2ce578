"""GET, POST and DELETE /v1/audio/voices: reference audio that was uploaded with consent, encoded once."""

from __future__ import annotations

import secrets
import unicodedata

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from models.checkpoints.lora_folders import adapter_folders
from models.interfaces.errors import CheckpointError, InputError
from service.api.context import ServerContext, context_of
from service.api.http.errors import ApiError, invalid
from service.api.http.form import read_form
from service.api.http.middleware import RequestRecord, record_of
from service.api.http.openapi import JSON, WORK_ERRORS, get, json_response, operation
from service.api.http.streaming import unless_disconnected
from service.api.speech import speaker
from service.api.speech.request import speech_model
from service.api.speech.schema import VoiceDeleted, VoiceList, VoiceObject, VoiceUpload
from service.hub.catalog import Catalog, HostedModel
from service.media.reference_audio import level_reference
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.voices import ID, Voice, VoiceStoreError, is_name, name_key

router = APIRouter()

PATH = "/v1/audio/voices"
NO_CONSENT = {"false", "no", "0", "off", "none", "null"}
"""Values of `consent` that mean no."""
STATUS = {"full": 409, "exists": 409, "gone": 404, "disk_full": 507, "disk": 500}
CODES = {"exists": "voice_exists", "full": "too_many_voices", "disk_full": "insufficient_storage"}
RESERVED = {speaker.DEFAULT_VOICE, *speaker.OPENAI_VOICES}


def name_problem(name: str) -> str:
    """Why no voice can be added under this name; empty if one can."""
    if not is_name(name):
        return "must be 1 to 64 letters, digits, spaces or any of . - _ ', the first one a letter or digit"
    if name_key(name) in RESERVED:
        return "this is the name of a built-in voice"
    # Requests that still name a deleted voice by its id would get this one.
    return "must not have the form of a voice's id" if ID.fullmatch(name_key(name)) else ""


def lora_voices(settings: Settings, catalog: Catalog) -> dict[str, str]:
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
        problem = name_problem(unicodedata.normalize("NFC", folder.name))
        if problem or key in voices:
            raise SettingsError(f"lora_voices: {folder.name!r}: {problem or f'the same name as {voices[key]!r}'}")
        voices[key] = folder.name
    return voices


@get(router, PATH, "List built-in voices, adapters and uploaded voices.", {JSON: VoiceList})
async def list_voices(request: Request) -> Response:
    context = context_of(request)
    adapters = map(speaker.Adapter, context.lora_voices.values())
    uploaded = context.voices.voices(context.owner(record_of(request.scope).client))
    listed: tuple[Voice | speaker.Adapter | str, ...] = (
        speaker.DEFAULT_VOICE,
        *speaker.OPENAI_VOICES,
        *adapters,
        *uploaded,
    )
    voices = [_object(context, voice) for voice in listed]
    return json_response(VoiceList(voices, voices))


@get(router, PATH + "/{voice}", "Get a voice.", {JSON: VoiceObject}, errors=(401, 404))
async def get_voice(request: Request, voice: str) -> Response:
    context = context_of(request)
    found = speaker.find_voice(context, voice, None, context.owner(record_of(request.scope).client))
    return json_response(_object(context, found))


@router.delete(
    PATH + "/{voice}",
    openapi_extra=operation("Delete an uploaded voice.", {JSON: VoiceDeleted}, errors=(401, 403, 404)),
)
async def delete_voice(request: Request, voice: str) -> Response:
    context = context_of(request)
    found = context.voices.find(voice, context.owner(record_of(request.scope).client))
    if found is None:
        raise speaker.no_voice("No uploaded voice")
    try:
        await context.in_thread(lambda: context.voices.delete(found.id))
    except VoiceStoreError as error:
        raise speaker.no_voice("No uploaded voice") if error.reason == "gone" else _store_error(error) from error
    return json_response(VoiceDeleted(found.id))


@router.post(
    PATH,
    openapi_extra=operation(
        "Upload a voice.",
        {JSON: VoiceObject},
        errors=(*WORK_ERRORS, 409, 507),
        body={"multipart/form-data": VoiceUpload},
    ),
)
async def upload_voice(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    needed = "name, and audio_sample or speaker_description"
    given, sample, unread = await read_form(request, VoiceUpload, "audio_sample", needed)
    context.field_warnings.warn(PATH, unread)
    work = _store(context, given, sample, record_of(request.scope))
    voice = await unless_disconnected(request, work, context.settings.request_timeout)
    return json_response(_object(context, voice))


async def _store(context: ServerContext, given: VoiceUpload, sample: bytes | None, record: RequestRecord) -> Voice:
    model, name, consent = speech_model(context, given.model, record), _new_name(context, given.name), given.consent
    if sample is None:
        if given.speaker_description is None:
            raise invalid("audio_sample", "required: an audio file, unless speaker_description describes the voice")
        if given.ref_text is not None:
            raise invalid("ref_text", "requires audio_sample, whose transcript it is")
        consent = None
    elif consent is None or consent.lower() in NO_CONSENT:
        raise invalid("consent", "required: a statement that the speaker agrees, or true")
    try:
        context.voices.check_room(name, context.owner(record.client))
        if sample is not None:
            latents, seconds = await _uploaded(context, model, sample, given.ref_text, record.client)
        else:
            latents, seconds = await _described(context, model, given.speaker_description or "", given.seed)
        return await context.in_thread(
            lambda: context.voices.add(
                name=name,
                encoder=speaker.encoder_of(model),
                consent=consent,
                seconds=seconds,
                latents=latents,
                ref_text=given.ref_text,
                description=given.speaker_description,
                owner=context.owner(record.client),
            )
        )
    except VoiceStoreError as error:
        raise _store_error(error) from error
    except InputError:
        context.metrics.observe("media_rejections_total", kind="audio", reason="refused")
        raise


def _new_name(context: ServerContext, given: str) -> str:
    name = unicodedata.normalize("NFC", given)
    if problem := name_problem(name):
        raise invalid("name", problem)
    if name_key(name) in context.lora_voices:
        raise invalid("name", "this is the name of a voice of the server, an adapter")
    return name


async def _uploaded(
    context: ServerContext, model: HostedModel, data: bytes, ref_text: str | None, client: str
) -> tuple[dict[str, np.ndarray], float]:
    """Latents and seconds of an audio file."""
    rate = model.speech_processor.reference_sample_rate
    wave = await context.media.audio_file(data, sample_rate=rate, field="audio_sample", client=client)
    wave = await context.in_thread(lambda: level_reference(wave, rate, "audio_sample"))
    return await speaker.encode_reference(context, model, wave, ref_text), len(wave) / rate


async def _described(
    context: ServerContext, model: HostedModel, description: str, seed: int | None
) -> tuple[dict[str, np.ndarray], float]:
    """The same for a description, which is spoken once."""
    design = speaker.as_design(description)
    if not design:
        raise invalid("speaker_description", "has no character but parentheses and control characters")
    speaker.check_room(model, speaker.spoken_text(design), "speaker_description")
    drawn = secrets.randbits(62) if seed is None else seed
    patches, seconds = await speaker.described_reference(context, model, design, drawn)
    return {"reference": patches}, seconds


def _store_error(error: VoiceStoreError) -> ApiError:
    field, message = ("name", f"name: {error}.") if error.reason == "exists" else (None, f"{error}.")
    return ApiError(STATUS[error.reason], message, param=field, code=CODES.get(error.reason, "internal_error"))


def _object(context: ServerContext, voice: Voice | speaker.Adapter | str) -> VoiceObject:
    """voice: as find_voice returns it."""
    if isinstance(voice, str):
        return VoiceObject(voice, voice, "audio.voice", "builtin", description=speaker.OPENAI_VOICES.get(voice))
    if isinstance(voice, speaker.Adapter):
        (model,) = context.catalog.of_kind("speech")  # the one to which the adapters belong
        return VoiceObject(voice.folder, voice.folder, "audio.voice", "lora", model=model.name)
    speaks = (model.name for model in context.catalog.of_kind("speech") if speaker.encoder_of(model) == voice.encoder)
    return VoiceObject(
        id=voice.id,
        name=voice.name,
        object="audio.voice",
        type="uploaded",
        created_at=voice.created_at,
        seconds=voice.seconds,
        ref_text=voice.ref_text,
        description=voice.description,
        consent=voice.consent,
        model=next(speaks, None),
    )
