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
KEY_WISHES = (
    "(answer|reply|respond) (in|as|with|using) (JSON|json) with {keys}[ only| please]",
    "(give|return|write) (the|your) (answer|reply|result) (in|as) (JSON|json) with {keys}[ only| please]",
    "(as|in) (JSON|json) with {keys}[ only| please]",
    "(I need|I want|give me|return|output|write) (JSON|json|a JSON object) with {keys}[ only| please]",
    "(answer|reply|respond) (in|as) (JSON|json), use {keys}[ only| please]",
)
"""keys: what `wordings.named_keys` says."""
KEY_WORDS = ("key", "field")
BEFORE = (
    *("look at the picture. ", "please answer: ", "question: ", "quick question: ", "hi! ", "hello, ", "now, ", "ok, "),
    *("have a look: ", "tell me, ", "please, ", "and ", "so ", "look: ", "I have a question: ", "can you help me? "),
)
AFTER = (*(", please", " please"), *(" thank you", " now"))
