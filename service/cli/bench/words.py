"""Ordinary English words for the texts of a load. A published tokenizer has a token for nearly every one of them."""

from __future__ import annotations

import numpy as np

_LIST = """
able about above across after again against air along always animal answer apple area arm around art ask autumn away
baby back ball bank base beach bear beautiful because bed before begin behind below best better between big bird black
blue boat body book both bottom box boy bread break bridge bright bring brother brown build bus business buy call
camera car care carry case cat catch cause center certain chair chance change child church circle city class clean
clear climb clock close cloud coast coat cold color come common company complete copper corner country course cover
cross cut dark daughter day deep desk different dinner direction distance doctor dog door down draw dream dress drink
drive dry during each early earth east easy eat edge egg eight end engine enough evening every example eye face fact
falcon family far farm fast father field fight figure fill find finger finish fire first fish five floor flower follow
food foot forest form forward four free friend front fruit full game garden general girl give glass gold good grass
gray great green ground group grow guess hair half hand happy hard hat head hear heart heat heavy help high hill
history hold home horse hospital hot hour house hundred ice idea inside island join keep kitchen know lake land
language large last late laugh lead leaf learn leave left leg less letter level light line listen little live long
look low lunch machine main make map mark market matter mean measure meet middle mile milk mind minute money month
moon more morning mother mountain mouth move music name near neck never new next night nine north nose note number
ocean office old open orange order other outside over page paint paper park part party pass past path pattern people
person picture piece place plain plan plant plate play point poor power present print problem public pull purple push
question quick quiet rain reach read ready real reason red remember rest rich ride right ring river road rock roof
room round rule run same sand school science sea seat second see sentence seven shape shirt shoe shop short shoulder
show side sign signal silver simple sing sister six size sky sleep slow small smile snow soft son song soon sound
south space speak spring square stand star start station stay step stone stop store storm story street strong student
study summer sun surface table tail take talk tall teach team tell ten test thing third three through time today
together tomorrow tool top touch toward town train travel tree triangle true turn under until use valley village visit
voice wait walk wall warm wash watch water way weather week west wheel white whole wide wild wind window winter wish
woman wood word work world write year yellow young
"""
WORDS: tuple[str, ...] = tuple(_LIST.split())


def text(rng: np.random.Generator, count: int) -> str:
    """`count` words drawn from `rng`."""
    return " ".join(rng.choice(WORDS, count))
