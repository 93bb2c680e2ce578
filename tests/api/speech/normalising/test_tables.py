"""What the rules make of numbers, dates, times, money, units and abbreviations."""

from __future__ import annotations

import pytest

from service.api.speech.normalising.numbers import cardinal, han_cardinal, ordinal, year
from service.api.speech.normalising.text import normalise

ENGLISH = {
    "in 1999": "in nineteen ninety-nine",
    "since 2005, and in 2010": "since two thousand five, and in twenty ten",
    "in 1906": "in nineteen oh six",
    "1066 AD": "ten sixty-six AD",
    "from 1990 to 2000": "from nineteen ninety to two thousand",
    "1999-2004": "nineteen ninety-nine to two thousand four",
    "the 1990s and the 80s": "the nineteen nineties and the eighties",
    "the 1900s": "the nineteen hundreds",
    "1500 people": "one thousand five hundred people",
    "2026-11-22": "November twenty-second twenty twenty-six",
    "2026-13-45": "2026-13-45",
    "11/22/2026": "November twenty-second twenty twenty-six",
    "22/11/2026": "November twenty-second twenty twenty-six",
    "1/2/2026": "1/2/2026",
    "November 22, 2026": "November twenty-second twenty twenty-six",
    "on Nov. 3rd": "on November third",
    "on the 3rd of May 2020": "on the third of May twenty twenty",
    "22 November": "the twenty-second of November",
    "June 31": "June thirty-one",
    "3:30 pm": "three thirty PM",
    "3:30pm": "three thirty PM",
    "at 7 a.m. sharp": "at seven AM sharp",
    "at 7 p.m. We left": "at seven PM. We left",
    "at 7 a.m.": "at seven AM.",
    "at 7 p.m. EST we left": "at seven PM EST we left",
    "It is. 5 came, 6 left.": "It is. Five came, six left.",
    "Dec 25": "December twenty-fifth",
    "open 9am-5pm": "open nine AM to five PM",
    "10:00-11:30": "ten o'clock to eleven thirty",
    "call 911 or 1-800-555-1234": "call nine one one or one, eight zero zero, five five five, one two three four",
    "in Q3 2024": "in Q3 twenty twenty-four",
    "milk, etc. We left": "milk, et cetera. We left",
    "15:45": "fifteen forty-five",
    "3:00 or 3:05": "three o'clock or three oh five",
    "25:61": "25:61",
    "$3.50": "three dollars and fifty cents",
    "$1": "one dollar",
    "$0.01": "one cent",
    "$3.00": "three dollars",
    "-$5": "minus five dollars",
    "$1,234.56": "one thousand two hundred thirty-four dollars and fifty-six cents",
    "$3.5 million": "three point five million dollars",
    "$20B": "twenty billion dollars",
    "£2.01": "two pounds and one penny",
    "5 €": "five euros",
    "5 km": "five kilometers",
    "1 km": "one kilometer",
    "120km/h": "one hundred twenty kilometers per hour",
    "-5°C": "minus five degrees Celsius",
    "6 ft": "six feet",
    "2.5 kg": "two point five kilograms",
    "a 5G phone": "a 5G phone",
    "No. 5": "Number five",
    "see fig. 2": "see figure two",
    "That is a no. I know": "That is a no. I know",
    "#1": "number one",
    "1/2": "one half",
    "2/3 and 3/4": "two thirds and three quarters",
    "1 1/2": "one and one half",
    "9/11": "nine eleven",
    "50%": "fifty percent",
    "5-10%": "five to ten percent",
    "pages 10-20": "pages ten to twenty",
    "3-2": "three to two",
    "v1.2.3": "version one point two point three",
    "555-123-4567": "five five five, one two three, four five six seven",
    "+1 (555)": "+1 (five hundred fifty-five)",
    "+44 20 7946 0958": "plus four four, two zero, seven nine four six, zero nine five eight",
    "1st 2nd 3rd 21st": "first second third twenty-first",
    "the 100th": "the one hundredth",
    "Dr. Smith": "Doctor Smith",
    "Mrs. Dalloway": "Missus Dalloway",
    "St. Paul, Elm St.": "Saint Paul, Elm St.",
    "e.g. this": "for example this",
    "Bring 2 snacks, e.g. 3 apples, 4 pears.": "Bring two snacks, for example three apples, four pears.",
    "Costs vary, e.g. $5.": "Costs vary, for example five dollars.",
    "Met 3 people": "Met three people",
    "5 o'clock": "five o'clock",
    "Las Vegas, 3 hotels": "Las Vegas, three hotels",
    "R&D, cats & dogs": "R&D, cats and dogs",
    "Henry VIII": "Henry the Eighth",
    "3.14 and 1,000,000": "three point one four and one million",
    "007": "zero zero seven",
    "a 3-year-old": "a three-year-old",
    "4111111111111111": "four" + " one" * 15,
    "He has 10, 20, 30.": "He has ten, twenty, thirty.",
    "COVID-19, B2B, mp3": "COVID-19, B2B, mp3",
    "192.168.1.1": "one hundred ninety-two dot one hundred sixty-eight dot one dot one",
    "https://x.example/2026/5?a=1": "x dot example slash two thousand twenty-six slash five",
    "me2@x.example": "me2 at x dot example",
    "a[3] = 2*3": "a[three] = 2*3",
    "5'10\"": "five foot ten",
}

CHINESE = {
    "今天是2026年11月22日。": "今天是二零二六年十一月二十二日。",
    "时间2026-11-22": "时间二零二六年十一月二十二日",
    "日期2026-13-40": "日期2026-13-40",
    "1999-2004年": "一九九九到二零零四年",
    "下午3:30": "下午三点三十分",
    "2:05": "two oh five",
    "上午2:00": "上午两点",
    "在12:00:30": "在十二点零分三十秒",
    "价格¥3.50": "价格三点五元",
    "花了$20": "花了二十美元",
    "约￥3.5万": "约三点五万元",
    "气温-5℃": "气温负五摄氏度",
    "跑了5km": "跑了五公里",
    "面积30 m²": "面积三十平方米",
    "涨了50%": "涨了百分之五十",
    "约5-10%": "约百分之五到百分之十",
    "占1/2": "占二分之一",
    "第3名": "第三名",
    "第2个": "第二个",
    "2个人和12个人": "两个人和十二个人",
    "2个月": "两个月",
    "共10005人": "共一万零五人",
    "1,234.5元": "一千二百三十四点五元",
    "电话13812345678": "电话一三八一二三四五六七八",
    "电话010-12345678": "电话零一零，一二三四五六七八",
    "圆周率3.14": "圆周率三点一四",
    "用GPT-4和mp3": "用GPT-4和mp3",
    "没有数字": "没有数字",
}

OTHERS = [
    "Ich habe 5 Äpfel, und 3 Birnen. Es kostet 5 €.",
    "J'ai 5 pommes.",
    "Peter hat 3 Birnen.",
    "Los 3 hermanos, El Paso 5",
    "ICH HABE 5 KATZEN",
    "Met 3 van de 5",
    "J'ai 5 pommes et 3 poires.",
    "El 5 de mayo hay 3 clases para los niños.",
    "私は5個のりんごを2026年に",
    "사과 5개",
    "У меня 5 яблок",
]


@pytest.mark.parametrize(("written", "spoken"), [*ENGLISH.items(), *CHINESE.items()])
def test_table(written: str, spoken: str) -> None:
    assert normalise(written) == spoken
    assert normalise(spoken) == spoken, "words stay"


@pytest.mark.parametrize("text", OTHERS)
def test_other_languages_are_left_to_the_model(text: str) -> None:
    assert normalise(text) == text


def test_each_sentence_has_its_language() -> None:
    assert normalise("我有5个。You have 5 of them. Ich habe 5.") == "我有五个。You have five of them. Ich habe 5."


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (101, "one hundred one"),
        (1_000_000, "one million"),
        (
            10**18 - 1,
            " ".join(
                f"nine hundred ninety-nine {scale}"
                for scale in ("quadrillion", "trillion", "billion", "million", "thousand")
            )
            + " nine hundred ninety-nine",
        ),
    ],
)
def test_cardinal(number: int, words: str) -> None:
    assert cardinal(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "first"),
        (12, "twelfth"),
        (20, "twentieth"),
        (42, "forty-second"),
        (100, "one hundredth"),
        (1003, "one thousand third"),
    ],
)
def test_ordinal(number: int, words: str) -> None:
    assert ordinal(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1900, "nineteen hundred"),
        (1066, "ten sixty-six"),
        (2000, "two thousand"),
        (2005, "two thousand five"),
        (2010, "twenty ten"),
    ],
)
def test_year(number: int, words: str) -> None:
    assert year(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "零"),
        (10, "十"),
        (15, "十五"),
        (20, "二十"),
        (105, "一百零五"),
        (110, "一百一十"),
        (1001, "一千零一"),
        (1010, "一千零一十"),
        (10_000, "一万"),
        (10_010, "一万零一十"),
        (100_000, "十万"),
        (100_000_001, "一亿零一"),
        (12_0345_6789, "十二亿零三百四十五万六千七百八十九"),
    ],
)
def test_han_cardinal(number: int, words: str) -> None:
    assert han_cardinal(number) == words
