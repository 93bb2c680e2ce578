"""Abbreviations in capitals that are words of another language (AI, UN, OS, MIT): their numbers are spoken in English,
those of other languages' clauses are left to the model."""

from __future__ import annotations

import pytest

from service.api.speech.normalising.text import TextNormaliser, normalise

ENGLISH = {
    "AI grew 5%": "AI grew five percent",
    "AI 5%": "AI five percent",
    "AI +5%, ML 3%.": "AI plus five percent, ML three percent.",
    "AI: 5 trends": "AI: five trends",
    "AI's 5 risks": "AI's five risks",
    '"AI" made 12 jokes': '"AI" made twelve jokes',
    "AI STOCKS FALL 5%": "AI STOCKS FALL five percent",
    "TOP 10 AI TOOLS": "TOP ten AI TOOLS",
    "MIT AI LAB: 120 PAPERS": "MIT AI LAB: one hundred twenty PAPERS",
    "GDP up 3.5%": "GDP up three point five percent",
    "US GDP: 3.5%": "US GDP: three point five percent",
    "NASA: 12 Mar 2024": "NASA: the twelfth of March twenty twenty-four",
    "CPU 80 °C": "CPU eighty degrees Celsius",
    "CPU 80 °C, GPU 65 °C": "CPU eighty degrees Celsius, GPU sixty-five degrees Celsius",
    "RAM 16 GB": "RAM sixteen gigabytes",
    "UN 2030": "UN two thousand thirty",
    "UN says 30 died": "UN says thirty died",
    "UN: 193 members": "UN: one hundred ninety-three members",
    "MIT: 5 labs": "MIT: five labs",
    "OS 11": "OS eleven",
    "macOS 15 vs OS 9": "macOS fifteen vs OS nine",
    "MS-DOS 6.22": "MS-DOS six point two two",
    "PC 2, OS 11": "PC two, OS eleven",
    "iPhone SE 3": "iPhone SE three",
    "Springfield, IL 5": "Springfield, IL five",
    "8 p.m. EST": "eight PM EST",
    "8:30 AM ET": "eight thirty AM ET",
    "SALE ENDS MONDAY 5 PM EST": "SALE ENDS MONDAY five PM EST",
    "9:00 am IST": "nine AM IST",
    "1066 CE": "ten sixty-six CE",
    "Pluto: 39.5 AU": "Pluto: thirty-nine point five AU",
    "Est. 5 years": "Est. five years",
    "SALE: 50% OFF": "SALE: fifty percent OFF",
    "BREAKING: 3 DEAD, 12 HURT": "BREAKING: three DEAD, twelve HURT",
}
FOREIGN = [
    "J'AI 5 CHATS",
    "J’AI 20 ANS",
    "C'EST 5 €",
    "L'UN DES 5",
    "LA TVA EST DE 20 %",
    "UN JOUR, 5 HEURES",
    "UN JOUR DE 24 H",
    "IL EST 5 H",
    "IL EST 17:00",
    "DU 5 AU 12 MAI",
    "CE SOIR: 20 H",
    "AUX 5 COINS DU MONDE",
    "NASA : 12 juin 2024",
    "Les AI ont augmenté de 5 %.",
    "Le MIT compte 11000 étudiants.",
    "L'AI Act fixe 5 règles.",
    "UN 5% DE DESCUENTO",
    "AL 50% DE DESCUENTO",
    "NASA: 12 de junio de 2024",
    "La IA crece un 5%.",
    "OS 5 MELHORES",
    "DOS 5 AOS 10 ANOS",
    "SE 5 È TROPPO",
    "AI cresce 5%",
    "DER UMSATZ STIEG 5 %",
    "MIT 5 KINDERN NACH BERLIN",
    "MIT 80 km/h DURCH BERLIN",
    "MIT 18 JAHREN",
    "ES IST 5 UHR",
    "DAS 5. AI-LABOR",
    "AI UND ML 5%",
    "AI wuchs um 5 Prozent.",
    "AI-Umsatz stieg um 5 %",
    "Der AI-Markt sank um 5 %.",
    "Laut UN starben 300 Menschen.",
    "Die UN fordert 5 Milliarden Euro.",
    "Das MIT hat 11000 Studenten.",
    "Die CPU hat 80 °C und 3 Kerne.",
    "AI groeide met 5%.",
    "AI steg 5 procent.",
    "DEN 5 MAJ",
    "NA 5 DNI",
]


@pytest.mark.parametrize(("written", "spoken"), ENGLISH.items())
def test_abbreviations_are_english(written: str, spoken: str) -> None:
    assert normalise(written) == spoken


@pytest.mark.parametrize("text", FOREIGN)
def test_other_languages_keep_their_numbers(text: str) -> None:
    assert normalise(text) == text


@pytest.mark.parametrize("clause", ["AI 5%", "UN 2030", "OS 11", "CPU 80 °C", "MIT 5"])
def test_between_clauses_of_a_language_they_are_of_it(clause: str) -> None:
    german = f"Das ist nicht neu: {clause}, und es ist gut."
    assert normalise(german) == german
    assert clause not in normalise(f"There is more of it: {clause}, and that is good.")


@pytest.mark.parametrize("size", [1, 3])
def test_chunks_do_not_matter(size: int) -> None:
    for text in (*ENGLISH, *FOREIGN):
        normaliser = TextNormaliser()
        parts = [normaliser.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join([*parts, normaliser.flush()]) == normalise(text), text
