"""The words that the embedded voice is made to say well, by kind. Other words come from a list of Debian's."""

from __future__ import annotations

from pathlib import Path


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COLOURS = _words("red blue green yellow orange purple pink brown black white gray silver golden dark light bright")
SHAPES = _words("circle square triangle star ring cross rectangle line shape picture chart bar pie letter word number")
PLACES = _words(
    "house garden kitchen school office station city village river mountain forest beach island market street bridge "
    "hospital library museum theater church castle hotel restaurant airport harbor farm field park road valley lake "
    "ocean desert room window door corner table floor wall roof stairs hall tower shop store bank court factory"
)
THINGS = _words(
    "book paper pencil letter lamp chair clock phone computer camera bottle glass cup plate spoon knife fork bread "
    "butter cheese apple banana lemon cherry potato tomato onion carrot sugar salt pepper coffee tea water milk juice "
    "soup cake cookie sandwich egg rice meat fish chicken car truck train plane boat ship bicycle wheel engine key "
    "box bag basket coat shirt shoe hat glove dress pocket button ring coin money ticket map picture painting song "
    "piano guitar drum violin movie story poem page newspaper magazine message question answer idea plan problem "
    "rule reason lesson test game ball toy doll kite rope stone rock sand tree flower leaf grass bush root seed "
    "fire smoke rain snow wind cloud storm sun moon star sky light shadow sound voice noise music machine tool "
    "hammer nail brush mirror pillow blanket bed sofa carpet curtain candle match soap towel"
)
PEOPLE = _words(
    "man woman boy girl child baby teacher doctor nurse farmer driver pilot sailor soldier king queen prince princess "
    "artist writer singer dancer painter baker cook waiter worker student friend neighbor stranger uncle aunt cousin "
    "brother sister mother father grandmother grandfather husband wife son daughter guest captain judge lawyer "
    "engineer scientist player manager officer customer visitor tourist hunter gardener"
)
ANIMALS = _words(
    "dog cat horse cow sheep goat pig chicken duck goose bird eagle owl fox wolf bear lion tiger elephant monkey "
    "rabbit mouse rat snake frog turtle fish whale dolphin shark bee butterfly spider ant fly camel donkey deer"
)
NAMES = _words(
    "Anna Peter Mary John Susan David Emma Oliver Alice Robert Laura Michael Sarah Thomas Julia Daniel Helen George "
    "Martin Clara Henry Lucy Simon Rachel Paul Linda James Karen Frank Nancy Victor Diana Oscar Eva Samuel Grace"
)
CITIES = _words(
    "London Paris Berlin Rome Madrid Boston Chicago Dallas Denver Seattle Toronto Sydney Tokyo Dublin Vienna Oslo "
    "Moscow Cairo Athens Lisbon"
)
ADJECTIVES = _words(
    "small large big tiny huge old new young good bad happy sad tired hungry thirsty angry kind quiet loud soft hard "
    "hot cold warm cool wet dry clean dirty full empty heavy fast slow early late long short tall wide narrow deep "
    "high low strong weak rich poor brave clever simple strange beautiful ugly famous important difficult easy "
    "dangerous safe free busy ready careful gentle honest lucky modern ancient broken open closed wooden round flat "
    "sharp smooth rough sweet sour bitter fresh bright dark lonely friendly curious serious funny perfect terrible "
    "wonderful different similar possible useful special private public common rare local foreign final main"
)
PAST = _words(
    "found lost saw heard bought sold made broke opened closed carried dropped painted cleaned washed watched followed "
    "helped called visited liked loved hated wanted needed remembered forgot brought took gave kept left moved pushed "
    "pulled touched caught threw drew wrote read built burned changed chose counted covered cut ate drank finished "
    "started stopped fixed hid hit held kicked learned lifted met missed noticed ordered packed passed picked planned "
    "planted played promised put raised reached received repeated saved sent shared showed studied taught told tried "
    "turned understood used wore won"
)
VERBS = _words(
    "find lose see hear buy sell make break open close carry drop paint clean wash watch follow help call visit like "
    "love hate want need remember forget bring take give keep leave move push pull touch catch throw draw write read "
    "build burn change choose count cover cut eat drink finish start stop fix hide hit hold kick learn lift meet miss "
    "notice order pack pass pick plan plant play promise put raise reach receive repeat save send share show study "
    "teach tell try turn understand use wear win"
)
MOTIONS = _words(
    "walked ran jumped swam flew drove sailed climbed danced traveled hurried marched wandered crawled rode slept sat "
    "stood waited worked lived stayed sang laughed cried smiled talked whispered shouted rested"
)
ADVERBS = _words(
    "quickly slowly quietly loudly carefully suddenly finally usually often never always sometimes rarely again soon "
    "today yesterday together alone outside inside everywhere early late well badly nearly almost really certainly "
    "perhaps probably easily clearly gently proudly politely"
)
PREPOSITIONS = _words(
    "in on under over near behind beside above below inside outside across around through toward against between along"
)
TIMES = _words(
    "morning afternoon evening night week month year summer winter spring autumn moment minute hour day weekend"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
UNITS = _words("meters miles feet inches pounds dollars cents minutes hours days weeks years people percent degrees")
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million"
)
FUNCTION = _words(
    "the a an and or but if so because when while where who what why how which that this these those it he she they "
    "we you i me him her them us my your his its our their is are was were be been being am do does did has have had "
    "will would can could should may might must not no yes to of for from with without by at as into onto about after "
    "before during until than then there here very too also just only even still more most much many few some any all "
    "both each every other another such same own up down out off again once"
)
SMALL_TALK = _words(
    "hello hi please thank thanks sorry welcome goodbye okay sure maybe know think believe hope guess mean speak say "
    "said ask answer listen hear voice speech model server computer program image video question description text "
    "demonstration language english cannot nothing something anything everything nobody somebody everybody people "
    "thing time way world life hand part place case point group company number system government country night area "
    "fact water room money story month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city community name president team minute idea body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)

KNOWN: tuple[str, ...] = tuple(
    dict.fromkeys(
        word.lower()
        for words in (
            COLOURS, SHAPES, PLACES, THINGS, PEOPLE, ANIMALS, NAMES, CITIES, ADJECTIVES, PAST, VERBS, MOTIONS, ADVERBS,
            PREPOSITIONS, TIMES, DAYS, MONTHS, UNITS, NUMBER_WORDS, FUNCTION, SMALL_TALK,
        )
        for word in words
    )
)  # fmt: skip
"""All of the above in lower case, without doubles."""


def dictionary(path: Path) -> tuple[str, ...]:
    """Words of 2 to 12 plain small letters of a word list, one a line, in its order."""
    words = path.read_text(encoding="utf-8").split()
    return tuple(
        word for word in words if 2 <= len(word) <= 12 and word.isascii() and word.isalpha() and word.islower()
    )
