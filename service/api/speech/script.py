"""The `input` of a speech request, whole or as it is written -> segments to speak and the silence between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechProcessor
from service.api.speech.request import SpeechJob
from service.api.speech.writing import Line, Writing
from service.api.spoken_text.alignment import Pair, spoken_of
from service.api.spoken_text.lexicon import MAX_GROWTH, LexiconFilter
from service.api.spoken_text.normalising.text import TextNormaliser
from service.api.spoken_text.passages import PassageReader
from service.api.spoken_text.text_cleaning import clean_text, speakable
from service.api.spoken_text.text_splitting import Granularity, TextSplitter


@dataclass
class Script:
    """Segments of a text, perhaps still being written. pause: seconds of silence after the last one."""

    lines: list[Line] = field(default_factory=list)
    pause: float = 0.0

    def add(self, part: Line | float) -> None:
        """part: the next segment, or seconds of silence."""
        if isinstance(part, float):
            self.pause += part
        else:
            self.lines.append(replace(part, pause=self.pause))
            self.pause = 0.0

    @property
    def pauses(self) -> float:
        """Seconds of all pauses together."""
        return sum(line.pause for line in self.lines) + self.pause

    @property
    def characters(self) -> int:
        return sum(len(line.text) for line in self.lines)

    def unspoken(self, processor: SpeechProcessor) -> str:
        """Letters and digits that the model cannot speak, each once."""
        return processor.unspoken("".join(line.text for line in self.lines))


class ScriptReader:
    """Reads a text in chunks. However it is cut into chunks, the segments are the same.

    ssml: a text that begins with <speak> is SSML. written: also find out how segments were written. first: granularity
    of the first segment, if it differs, so that the first audio is ready sooner.
    """

    def __init__(
        self, job: SpeechJob, *, ssml: bool = True, written: bool = False, first: Granularity | None = None
    ) -> None:
        self.speakable = False
        """Whether the last chunk had something to speak, even if its segment is not complete."""
        self._job = job
        self._passages = PassageReader(ssml=ssml)
        self._lexicon = LexiconFilter(*job.lexicons) if job.lexicons else None
        normaliser = TextNormaliser() if job.normalised else None
        self._filters = [step for step in (self._lexicon, normaliser) if step is not None]
        self._writing = Writing(1 + len(self._filters)) if written else None
        self._splitter = TextSplitter(job.granularity, max_length=job.segment_length, first=first)
        self._begun = False
        """Whether the first segment is complete."""

    @property
    def error(self) -> InputError | None:
        """What could not be read of the last chunk; text continues after it, SSML does not."""
        return self._passages.error

    @property
    def lexicon_full(self) -> bool:
        """Whether words were not replaced because the text would have become too long."""
        return self._lexicon is not None and self._lexicon.full

    def feed(self, text: str, *, final: bool = False) -> list[Line | float]:
        """Return the segments that are complete, and pauses in seconds. final: a segment ends here."""
        self.speakable = False
        parts: list[Line | float] = []
        for piece in self._passages.feed(text, final=final):
            if isinstance(piece, float):
                parts += [*self._segments((), final=True), piece]
            else:
                self.speakable = self.speakable or speakable(piece[1])
                parts += self._segments((piece,), final=False)
        return [*parts, *self._segments((), final=True)] if final else parts

    def _segments(self, pairs: Sequence[Pair], *, final: bool) -> list[Line]:
        steps = [pairs]
        for step in self._filters:
            steps.append(step.feed(spoken_of(steps[-1]), final=final))
        cut = self._splitter.feed(spoken_of(steps[-1]), final=final)
        texts = [cleaned for part in cut if speakable(cleaned := clean_text(part).strip())]
        if self._writing is None:
            return [Line(text) for text in texts]
        for index, rewritten in enumerate(steps):
            self._writing.add(index, rewritten)
        lines: list[Line] = []
        if texts:
            lines = self._writing.lines(texts, "" if self._begun else self._job.control_of(texts[0]))
            self._begun = True
        if final:
            self._writing.clear()
        return lines


def read_script(job: SpeechJob, text: str, *, written: bool) -> Script:
    """Read a whole text. written: also find out how the segments were written. InputError names what does not fit."""
    reader, script = ScriptReader(job, written=written), Script()
    for part in reader.feed(text, final=True):
        script.add(part)
    if reader.error is not None:
        raise reader.error
    if reader.lexicon_full:
        raise InputError("lexicon", f"makes the text more than {MAX_GROWTH} characters longer")
    if not script.lines:
        raise InputError("input", f"nothing to speak: {_reason(text)}")
    return script


def _reason(text: str) -> str:
    """Why nothing of the text is spoken."""
    if not speakable(text):
        return "the text has neither words nor numbers, and signs by themselves are not spoken"
    return "blocks of code, tags, link targets and emoji are removed from it, which leaves no word or number"
