"""The decode worker's process: `service.media.decode_worker <socket fd> <memory bytes> <cpu seconds>`."""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import TYPE_CHECKING

import numpy as np

from models.interfaces.errors import InputError
from service.confined.channel import WorkerChannel, allow_cpu, confine
from service.media import messages
from service.media.image_decode import load_decoders, open_image, upright_picture

if TYPE_CHECKING:
    from PIL import Image

    from service.media.video_decode import VideoSource

MAX_BLOB_BYTES = 1 << 30


def main(fd: int, memory_bytes: int, cpu_seconds: int) -> None:
    confine(memory_bytes)
    load_decoders()
    # Imported before the first job. If FFmpeg's libraries are missing, only jobs that need them fail.
    with contextlib.suppress(ImportError):
        import service.media.audio_decode
        import service.media.video_decode  # noqa: F401
    decoder = MediaDecoder(WorkerChannel(socket.socket(fileno=fd), messages.Job))
    while True:
        try:
            job = decoder.channel.receive()
        except EOFError:
            return
        allow_cpu(cpu_seconds)
        decoder.answer(job)


class MediaDecoder:
    """Does the jobs; holds the video or picture that the last one opened."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.channel = channel
        self._video: VideoSource | None = None
        self._image: Image.Image | None = None
        self._data, self._field = b"", ""

    def answer(self, job: messages.Job) -> None:
        if not isinstance(job, (messages.ReadFrames, messages.ReadPixels)):  # the opened video or picture is not needed
            self._close_media()
        try:
            match job:
                case messages.OpenVideo():
                    from service.media.video_decode import VideoSource

                    self._video = VideoSource(self._received(), field=job.field, limits=job.limits)
                    self.channel.send(messages.VideoOpened(self._video.metadata))
                case messages.ReadFrames():
                    frames = () if self._video is None else self._video.frames(job.indices)
                    for index, time, pixels in frames:
                        self.channel.send(messages.Frame(index, time), np.ascontiguousarray(pixels).data.cast("B"))
                    self._close_media()
                    self.channel.send(messages.Done())
                case messages.DecodeAudio():
                    from service.media.audio_decode import decode_samples

                    encoded, rate = self._received(), job.sample_rate
                    samples = decode_samples(encoded, sample_rate=rate, field=job.field, limits=job.limits)
                    self.channel.send(messages.Samples(samples.size), samples.data.cast("B"))
                case messages.OpenImage():
                    self._data, self._field = self._received(), job.field
                    self._image = open_image(self._data, field=job.field, limits=job.limits)
                    self.channel.send(messages.ImageOpened(*self._image.size))
                case messages.ReadPixels():
                    if self._image is None:
                        raise InputError("", "no picture is open")
                    picture = upright_picture(self._image, self._data, field=self._field)
                    self.channel.send(messages.Pixels(*picture.size), np.asarray(picture).data.cast("B"))
                    self._close_media()
        except InputError as error:
            self._close_media()
            self.channel.send(messages.Refused(error.field, str(error)))

    def _received(self) -> bytes:
        return bytes(self.channel.receive_blob(MAX_BLOB_BYTES))

    def _close_media(self) -> None:
        for opened in (self._video, self._image):
            if opened is not None:
                opened.close()
        self._video = self._image = None
        self._data = b""


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
