"""GET, POST and DELETE /v1/audio/voices: clips that were uploaded with consent, encoded once."""

from __future__ import annotations

import re

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from models.errors import InputError
from service.api.context import ServerContext, context_of
from service.api.errors import ApiError, bad_request
from service.api.openapi import JSON, WORK_ERRORS, operation
from service.api.record import record_of
from service.api.speaking import DEFAULT_VOICE, OPENAI_VOICES, encode_clip, encoder_of, speech_model
from service.api.speech_schema import VoiceDeleted, VoiceList, VoiceObject, VoiceUpload
from service.voices import Voice, VoiceStoreError

router = APIRouter()

PATH = "/v1/audio/voices"
NAME = re.compile(r"\w(?:[\w .'-]{0,62}[\w.'])?")
CONSENT = {"false", "no", "0", "off", "none", "null"}
"""Statements that give no consent."""
MAX_FIELD = 4096
STATUS = {"full": 409, "exists": 409, "disk_full": 507, "disk": 500}
RESERVED = {DEFAULT_VOICE, *OPENAI_VOICES}


@router.get(PATH, openapi_extra=operation("List the voices.", {JSON: VoiceList}))
async def list_voices(request: Request) -> Response:
    builtin = [
        VoiceObject(name, name, "audio.voice", "builtin", description=OPENAI_VOICES.get(name))
        for name in (DEFAULT_VOICE, *OPENAI_VOICES)
    ]
    voices = builtin + [_object(voice) for voice in context_of(request).voices.voices()]
    return _json(VoiceList(voices, voices))


@router.get(PATH + "/{voice}", openapi_extra=operation("One uploaded voice.", {JSON: VoiceObject}, errors=(401, 404)))
async def get_voice(request: Request, voice: str) -> Response:
    return _json(_object(_find(context_of(request), voice)))


@router.delete(
    PATH + "/{voice}",
    openapi_extra=operation("Delete an uploaded voice.", {JSON: VoiceDeleted}, errors=(401, 403, 404)),
)
async def delete_voice(request: Request, voice: str) -> Response:
    context = context_of(request)
    found = _find(context, voice)
    try:
        await context.in_thread(lambda: context.voices.delete(found.id))
    except KeyError:
        raise _not_found() from None
    return _json(VoiceDeleted(found.id))


@router.post(
    PATH,
    openapi_extra=operation(
        "Keep a voice.",
        {JSON: VoiceObject},
        errors=(*WORK_ERRORS, 409, 507),
        body={"multipart/form-data": VoiceUpload},
    ),
)
async def upload_voice(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    form = await _form(request)
    try:
        voice = await _keep(context, form, request)
    finally:
        await form.close()
    return _json(_object(voice))


async def _keep(context: ServerContext, form: FormData, request: Request) -> Voice:
    model = speech_model(context, _field(form, "model"), record_of(request.scope))
    name = _field(form, "name")
    if name is None or not NAME.fullmatch(name):
        raise bad_request("name: 1 to 64 letters, digits, spaces or .-' are needed.", "name")
    if name.lower() in RESERVED:
        raise bad_request("name: this name belongs to a voice of the server.", "name")
    consent = _field(form, "consent")
    if consent is None or consent.lower() in CONSENT:
        raise bad_request("consent: a statement that the speaker agrees is needed (or true).", "consent")
    sample = form.get("audio_sample")
    if not isinstance(sample, UploadFile):
        raise bad_request("audio_sample: a file is needed.", "audio_sample")
    ref_text = _field(form, "ref_text")
    description = _field(form, "speaker_description")
    try:
        context.voices.check_room(name)
        rate = model.speech_processor.reference_sample_rate
        wave = await context.media.audio_file(await sample.read(), sample_rate=rate, field="audio_sample")
        latents = await encode_clip(context, model, wave, ref_text)
        return await context.in_thread(
            lambda: context.voices.add(
                name=name,
                encoder=encoder_of(model),
                consent=consent,
                seconds=len(wave) / rate,
                latents=latents,
                ref_text=ref_text,
                description=description,
            )
        )
    except VoiceStoreError as error:
        field = "name" if error.reason == "exists" else None
        code = {"exists": "voice_exists", "full": "too_many_voices", "disk_full": "insufficient_storage"}
        raise ApiError(
            STATUS[error.reason], f"{error}.", param=field, code=code.get(error.reason, "internal_error")
        ) from error
    except InputError:
        context.metrics.observe("media_rejections_total", kind="audio", reason="refused")
        raise


async def _form(request: Request) -> FormData:
    """The parsed body; its file part spools to disk, bounded by the limit on bodies."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise bad_request("The body must be multipart/form-data with the file audio_sample.", "audio_sample")
    parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=16, max_part_size=MAX_FIELD * 4)
    try:
        return await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise bad_request("The body is not a form of at most 16 fields and one file.") from error


def _field(form: FormData, name: str) -> str | None:
    """A text field, None where it is missing or empty."""
    value = form.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise bad_request(f"{name}: must be text, not a file.", name)
    if len(value) > MAX_FIELD:
        raise bad_request(f"{name}: at most {MAX_FIELD} characters are taken.", name)
    return value.strip() or None


def _find(context: ServerContext, key: str) -> Voice:
    voice = context.voices.find(key)
    if voice is None:
        raise _not_found()
    return voice


def _not_found() -> ApiError:
    return ApiError(404, "There is no uploaded voice of that id or name.", param="voice", code="voice_not_found")


def _object(voice: Voice) -> VoiceObject:
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
    )


def _json(payload: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(payload), media_type=JSON)
