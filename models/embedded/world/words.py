"""Words that are printed in pictures, names for the parts of charts, and things that the world does not hold."""

from __future__ import annotations

from random import Random
from zlib import crc32

_SIGNS = """
able about above acid acorn across action actor advice after again agent agree ahead airport alarm album alert alley
almond alone along alpha always amber anchor angle animal answer apple april apron arcade arena arrow artist aspen
atlas august autumn avenue award bacon badge bakery balance ball banana bank bargain barrel basic basket battery beach
beacon beans beauty bedroom before begin bench berry best better beyond bicycle bigger bingo birch bird bistro black
blanket block blossom board boat bonus book border bottle boxes branch brand brave bread breakfast bridge bright
broker brother brush bucket budget buffet build burger butter button buyer cabin cable cactus cafe cake call camera
camp canal candle candy canoe canvas canyon capital captain carbon cargo carpet carrot castle catalog caution cedar
center central century cereal chair chalk change chapel charge cheese chef cherry chess chicken choice church cinema
city class clay clean clear clerk click client cliff climb clinic clock close cloud clover club coach coast coffee
coins cold comet comic common compass concert cookie cooler copper coral corner cotton counter country courage course
court cousin cover cream credit cricket crown cruise crystal cup curry custom cycle dairy daisy dance danger data
dawn deals december decide deer delta demand dentist depot desert design desk detail dinner direct discount dish
display doctor dollar dolphin door double dragon dream dress drink drive drum dry duck dust eagle early earth east
easy echo edge effort eight either electric eleven elm ember emerald empty energy engine enjoy enter entry equal
error escape evening event every exact exit expert express extra fabric factory fair falcon family famous farm fast
father feather february fence ferry festival fiber field fifty figure final finger finish fire first fish five flag
flame flash flavor flight floor flour flower fluid flute focus forest forever forge fork fortune forward fossil
fountain fourth fox fragile frame free fresh friday friend frost fruit fuel full fun future gallery game garage garden
garlic gate general gentle giant gift ginger glacier glass globe glory glove gold golf good grand granite grape grass
gravity great grill grocery group grove guard guest guide guitar gym habit half hall hammer handle happy harbor
hardware harvest hat haven hazel health heart heavy hedge height hello helmet help herb heritage hero hidden high
hill history hobby holiday hollow home honey hook hope horizon horse hospital host hotel hour house human hundred
hunter husky ice idea import inch indigo info inner insect inside island ivory ivy jacket jaguar january jazz jelly
jewel join joke journal journey joy juice july jump june jungle junior just keep kettle key keyboard kind king kiosk
kitchen kite kiwi knife knight label lake lamp land language lantern large laser laundry lavender lawn leaf league
learn leather left legend lemon lesson letter level library light lilac lime limit line lion liquid list little lobby
local lock lodge logic london long lotus loud lounge love lucky lunch machine magic magnet main major mango manual
maple marble march marina market master match maximum meadow meal meat medal media medium meeting melody melon member
memory menu metal meter metro middle midnight mile milk mill million mineral minimum mint minute mirror mobile model
modern moment monday money monkey month moon morning mother motor mountain mouse movie museum music mustard napkin
nation nature near neck needle nest network never news night nine noble noise noodle noon normal north notice novel
november number nurse oasis object ocean october office olive onion online only open opera option orchard order
organic origin otter outlet outside oven owner oxygen oyster packet paint palace palm panel panic paper parade parent
paris park parking party pasta patrol peace peach peanut pearl pencil people pepper perfect phone photo piano picnic
pilot pine pink pizza place planet plant plate player plaza please pocket poem poet point polar police pond pony pool
poppy popular port post potato powder power prince print private prize produce profit promise public pull pump
pumpkin puppet purple push puzzle quality quarter queen quest quick quiet quiz rabbit radio rain ranch random range
rapid reader ready record recycle reef remote rent repair report rescue reserve resort rest return rhythm ribbon rice
rider right river road robin robot rocket room root rose round route royal rubber ruby rugby rule safari safety sail
salad sale salmon salon salt sample sand saturday sauce school science scooter season seat second secret security
select senior september series service seven shade shadow shelter sheriff escape shine ship shirt shoes shop short
show shower signal silence silver simple singer single sister six skate sketch ski sky sleep slow small smart smile
smoke snack snow soap social soda sofa soft solar solid song soup south space spark special speed spice spider spirit
sport spring stable stadium staff stage stamp star start state station steam steel stereo stone stop storage store
storm story street strong student studio style subway sugar suit summer sun sunday sunset super supper sweet swim
switch symbol table talent tango target taste tavern taxi tea teacher team temple tennis ten tent terrace theater
thirty three thunder thursday ticket tiger timber time tiny toast today toilet tomato tomorrow topaz torch total
touch tower town toy track trade traffic trail train travel treasure tree trial tropic truck true trust tuesday tulip
tunnel turtle twelve twenty twin two under union unit upper urban vacant vacation valley value vanilla vapor vault
vegan velvet vendor version victory video village vintage violet violin vision visit vital voice volcano volume voyage
wagon waiter walk wall walnut warm warning wash watch water wave weather wednesday weekend welcome west whale wheat
wheel white wild willow wind window wine winner winter wise wolf wonder wood world yard year yellow yoga young zebra
zero zone
"""
_HELD_OUT = 8
_SAME_IN_BOTH_CASES = set("cosuvwxzp")
SIGNS = tuple(word for word in _SIGNS.split() if not set(word) <= _SAME_IN_BOTH_CASES)
SEEN_WORDS = tuple(word for word in SIGNS if crc32(word.encode()) % _HELD_OUT)
UNSEEN_WORDS = tuple(word for word in SIGNS if not crc32(word.encode()) % _HELD_OUT)

CHART_LABELS = (
    ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
    ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    ("A", "B", "C", "D", "E", "F", "G", "H"),
    ("Q1", "Q2", "Q3", "Q4"),
    ("2019", "2020", "2021", "2022", "2023", "2024", "2025"),
    ("North", "East", "South", "West"),
    ("Apples", "Pears", "Plums", "Figs", "Limes", "Kiwis", "Grapes"),
    ("Tea", "Milk", "Juice", "Water", "Coffee", "Cocoa"),
    ("Cats", "Dogs", "Fish", "Birds", "Horses"),
    ("Rent", "Food", "Fuel", "Tax", "Fun"),
    ("Anna", "Ben", "Carl", "Dora", "Emil", "Finn", "Gina"),
    ("Bus", "Car", "Train", "Bike", "Walk", "Ship"),
    ("Oslo", "Rome", "Paris", "Bonn", "Lima", "Kyiv"),
)
CHART_TITLES = (
    *("Sales", "Monthly sales", "Sales by region", "Results", "Survey results", "Growth", "Votes", "Visitors"),
    *("Visitors per day", "Rainfall", "Daily steps", "Spending", "Monthly costs", "Market share", "Favorite fruit"),
    *("Test scores", "Books read", "Hours of sleep", "Revenue", "Traffic", "Energy use", "Population", "Orders"),
)

_THINGS = """
dog cat horse cow bird fish car truck bus bicycle train plane boat ship house tree flower mountain river lake person
man woman child baby boy girl face hand eye table chair lamp sofa bed window door cup plate fork spoon knife bottle
apple banana grape lemon bread cheese pizza cake egg shoe hat shirt dress coat glove watch phone laptop keyboard
camera book pen pencil bag box key clock guitar piano drum ball kite robot rocket moon planet cloud rainbow bridge
tower castle church road street sign traffic lion tiger elephant giraffe monkey zebra bear wolf fox rabbit mouse frog
snake turtle duck goose chicken sheep pig goat spider ant bee butterfly shark whale dolphin octopus crab snail leaf
rose tulip cactus mushroom carrot potato tomato onion pepper corn broccoli burger sandwich cookie candy chocolate
coffee juice glass mug pot pan oven fridge toaster sink bath shower towel soap brush mirror carpet curtain pillow
blanket ladder hammer saw nail screw drill wrench rope chain wheel engine tire helmet umbrella scarf belt ring tie
sock boot jacket sweater skirt jeans doctor teacher farmer soldier king queen pirate knight wizard dragon unicorn
ghost monster alien dinosaur penguin owl eagle parrot swan camel kangaroo koala panda deer moose squirrel hedgehog bat
beach island forest desert volcano waterfall garden park school hospital museum stadium airport station factory farm
barn tent cabin hotel restaurant shop market bank office kitchen bedroom bathroom garage flag map globe coin dollar
stamp letter envelope newspaper magazine poster painting statue vase candle fire smoke snow rain storm lightning wind
tractor ambulance helicopter submarine scooter motorcycle skateboard tram taxi van wagon sled canoe raft anchor
trumpet violin flute harp microphone speaker headphones television radio computer tablet printer battery cable plug
"""
_KNOWN_NOUNS = {"ring", "sign"}
"""A shape, and what questions call printed text."""
THINGS = tuple(word for word in _THINGS.split() if word not in _KNOWN_NOUNS)
SEEN_THINGS = tuple(word for word in THINGS if crc32(word.encode()) % 6)
UNSEEN_THINGS = tuple(word for word in THINGS if not crc32(word.encode()) % 6)
PLACES = (
    *("France", "Japan", "Brazil", "Egypt", "Norway", "Canada", "India", "Peru", "Kenya", "Spain", "Italy", "China"),
    *("Poland", "Cuba", "Chile", "Turkey", "Greece", "Mexico", "Ghana", "Nepal", "Iran", "Laos", "Malta", "Fiji"),
)

_CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
_SMALL = "abcdefghijkmnpqrstuvwxyz23456789"
_DIGITS = "0123456789"
"""Without O, I, l and with them 0 and 1 only among digits: in many fonts they look alike."""


def random_string(random: Random, least: int = 3, most: int = 8) -> str:
    alphabet = random.choices((_CAPITALS, _SMALL, _DIGITS), (0.45, 0.35, 0.2))[0]
    return "".join(random.choices(alphabet, k=random.randint(least, most)))


def styled(random: Random, word: str) -> str:
    return random.choice((word.upper(), word.lower(), word.capitalize()))


def number_text(random: Random) -> str:
    """A price, time, date, percentage or plain number."""
    kind = random.randrange(6)
    if kind == 0:
        return f"{random.choice('$€£')}{random.randint(0, 99)}.{random.randint(0, 99):02}"
    if kind == 1:
        return f"{random.randint(0, 23)}:{random.randint(0, 59):02}"
    if kind == 2:
        return f"{random.randint(1, 31)}.{random.randint(1, 12)}.{random.randint(2000, 2039)}"
    if kind == 3:
        return f"{random.randint(1, 100)}%"
    if kind == 4:
        return f"{random.randint(1, 999)},{random.randint(0, 999):03}"
    return str(random.randint(0, 10 ** random.randint(1, 6)))


def made_up_word(random: Random) -> str:
    syllables = random.randint(1, 3)
    return "".join(
        random.choice("bcdfghjklmnprstvwyz")
        + random.choice("aeiou")
        + (random.choice("lmnrstkpd") if random.random() < 0.4 else "")
        for _ in range(syllables)
    )
