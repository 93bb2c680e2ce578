"""Grammars of the questions by task. (a|b) is a choice, [a] may be left out, {slot} is filled in later."""

from __future__ import annotations

from models.embedded.world.print_grammars import PRINTS
from models.embedded.world.scene_grammars import SCENES
from models.embedded.world.talk_grammars import TALK

GRAMMARS: dict[str, tuple[str, ...]] = {**SCENES, **PRINTS, **TALK}
"""By task."""

JSON_WISHES = (
    "(answer|reply|respond) (in|as|with|using) (JSON|json)[ only| please| format]",
    "(give|return|write) (the|your) (answer|reply|result) (in|as) (JSON|json)[ only| please| format]",
    "(as|in) (JSON|json)[ please| only| format]",
    "(I need|I want|give me|return|output|write) (JSON|json)[ only| please| format]",
    "(use|only use) (JSON|json)[ please| format]",
)
BEFORE = (
    *("look at the picture. ", "please answer: ", "question: ", "quick question: ", "hi! ", "hello, ", "now, ", "ok, "),
    *("have a look: ", "tell me, ", "please, ", "and ", "so ", "look: ", "I have a question: ", "can you help me? "),
)
AFTER = (*(", please", " please"), *(" thank you", " now"))
