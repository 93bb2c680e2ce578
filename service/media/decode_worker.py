"""The decode worker's process: `python -m service.media.decode_worker <socket fd> <memory bytes> <cpu seconds>`."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from typing import TYPE_CHECKING

import numpy as np

from models.errors import InputError
from service.media.channel import (
    Channel,
    DecodeAudio,
    Done,
    Frame,
    Job,
    OpenVideo,
    ReadFrames,
    Refused,
    Samples,
    VideoOpened,
)

if TYPE_CHECKING:
    from service.media.video_decode import VideoSource

MAX_BLOB_BYTES = 1 << 30


def main(fd: int, memory_bytes: int, cpu_seconds: int) -> None:
    _confine(memory_bytes)
    # Ahead of the first job. Where FFmpeg's libraries are missing, only the jobs that need them fail.
    with contextlib.suppress(ImportError):
        import service.media.audio_decode
        import service.media.video_decode  # noqa: F401
    channel = Channel(socket.socket(fileno=fd), Job)
    video: VideoSource | None = None
    while True:
        try:
            job = channel.receive()
        except EOFError:
            return
        _allow_cpu(cpu_seconds)
        if video is not None and not isinstance(job, ReadFrames):  # its frames were not wanted
            video.close()
            video = None
        try:
            match job:
                case OpenVideo():
                    from service.media.video_decode import VideoSource

                    video = VideoSource(bytes(channel.receive_blob(MAX_BLOB_BYTES)), field=job.field, limits=job.limits)
                    channel.send(VideoOpened(video.metadata))
                case ReadFrames():
                    if video is not None:
                        for index, time, pixels in video.frames(job.indices):
                            channel.send(Frame(index, time), np.ascontiguousarray(pixels).data.cast("B"))
                        video.close()
                    video = None
                    channel.send(Done())
                case DecodeAudio():
                    from service.media.audio_decode import decode_clip

                    clip = bytes(channel.receive_blob(MAX_BLOB_BYTES))
                    samples = decode_clip(clip, sample_rate=job.sample_rate, field=job.field, limits=job.limits)
                    channel.send(Samples(samples.size), samples.data.cast("B"))
        except InputError as error:
            if video is not None:
                video.close()
            video = None
            channel.send(Refused(error.field, str(error)))


def _confine(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _allow_cpu(seconds: int) -> None:
    """Lets this job use that much more processor time; SIGXCPU ends the process beyond it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
