"""Chinese: numbers, dates, times, money and units in Han characters. What no rule knows stays as it is.

As in english.py, the rules run one after the other and take linear time. Units that are written in Han characters are
read as they stand: only the number in front of them changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.normalising.numbers import han_cardinal, han_decimal, han_digits

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

BEGIN = r"(?<![A-Za-z0-9_.,:/@#$€£¥￥&=+%~^*\\-])"
END = r"(?![A-Za-z0-9_/@=^*\\]|[.,:-]\d)"
AMOUNT = r"(?P<amount>(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,12})?)"
MINUS = r"(?P<minus>[-−](?=[\d¥￥$€£]))?"
TERM = r"[-−]?\d{1,4}(?:\.\d)?"
"""One end of a range."""
YEAR = r"(1[1-9]\d\d|20\d\d)"

CURRENCIES = {"¥": "元", "￥": "元", "$": "美元", "€": "欧元", "£": "英镑"}
UNITS = {
    "km/h": "公里每小时", "m/s": "米每秒", "km²": "平方公里", "m²": "平方米", "m³": "立方米", "㎡": "平方米",
    "km": "公里", "cm": "厘米", "mm": "毫米", "m": "米", "kg": "公斤", "mg": "毫克", "g": "克", "ml": "毫升",
    "mL": "毫升", "L": "升", "℃": "摄氏度", "°C": "摄氏度", "℉": "华氏度", "°F": "华氏度", "°": "度",
    "kW": "千瓦", "kWh": "千瓦时", "W": "瓦", "V": "伏", "mAh": "毫安时", "Hz": "赫兹", "dB": "分贝", "KB": "KB",
    "MB": "MB", "GB": "GB", "TB": "TB", "Mbps": "Mbps", "MHz": "MHz", "GHz": "GHz", "fps": "fps", "px": "px",
}  # fmt: skip
MEASURES = (
    "个只位名本张条件种块天次遍岁杯瓶辆台座间家层倍周小米斤吨升元千万亿秒点公人场勺部份套头匹支枚袋包盒箱节首项架艘双把封幅棵颗碗"
    "盘口趟声串"
)
"""Before these, two is 两, not 二."""
COUNTED = rf"(?!\d|[.,-]\d|[{MEASURES}年月日平多余分度克字级届股票号%％‰+×*=A-Za-z])"
"""No number of this kind is an amount."""
CODE = (
    r"(?:(?<![尺页数筹])码|(?:尾|卡|账|帐)号|请按|分机号?|QQ号?|[Qq]{2}群)[是为：:\s]{0,2}(?P<short>\d{2,20})"
    r"|(?:(?:(?<![\d一二三四五六七八九十百几])号码?|电话|传真|热线|座机|手机)[是为：:\s]{0,2}|位[是为])(?P<long>\d{3,20})"
    r"|(?<=[机线话号\d请])转\s?(?P<line>\d{3,6})|(?<=[座栋幢楼元])(?P<room>\d{3,4})(?=[^\d号]|\Z)"
)
NAMED = "高校|院校|大学(?!生)|工程(?!师)|晚会|事件|事变|惨案|大促|购物节|工作制|计划|大?地震|电影|特工"
"""What is named by a number of three digits."""
SERVICES = (
    r"12306|12315|12333|12366|12388|10086|10010|955\d\d|(?:985|211)(?=[、和及/]|\Z)"
    r"|(?<=[打拨])(?:1[012]\d|123\d\d|9[56]\d{3})"
)
SEASONS = "年|赛季|学年|财年|年度|学期"


def normalise_chinese(text: str) -> str:
    """text: a clause or more. Words and marks that no rule knows stay."""
    if DIGIT.search(text):
        text = text.translate(NARROW)
        for pattern, replace in RULES:
            text = pattern.sub(replace, text)
    return text


def _signed(match: re.Match[str], words: str) -> str:
    return f"负{words}" if match["minus"] else words


def _date(match: re.Match[str]) -> str:
    month, day = int(match[2]), int(match[3])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    return f"{han_digits(match[1])}年{han_cardinal(month)}月{han_cardinal(day)}日"


def _time(match: re.Match[str]) -> str:
    hour, minute, second = int(match[1]), int(match[2]), match[3]
    if hour > 24 or minute > 59 or (second and int(second) > 59):
        return match[0]
    spoken = f"{'两' if hour == 2 else han_cardinal(hour)}点"
    if minute or second:
        spoken += f"{'零' if 0 < minute < 10 else ''}{han_cardinal(minute)}分"
    return f"{spoken}{han_cardinal(int(second))}秒" if second else spoken


def _money(match: re.Match[str]) -> str:
    amount = match["amount"]
    if "." in amount:
        amount = amount.rstrip("0").rstrip(".")
    spoken = f"{han_decimal(amount)}{match['scale'] or ''}{CURRENCIES[match['currency']]}"
    return _signed(match, spoken)


def _percent(match: re.Match[str]) -> str:
    return _signed(match, f"百分之{han_decimal(match['amount'])}")


def _range(match: re.Match[str]) -> str:
    first, last = match[1], match[2]
    if first.startswith("0") or last.startswith("0") or int(first) >= int(last):
        return match[0]
    before = "百分之" if match[3] else ""
    return f"{before}{han_cardinal(int(first))}到{before}{han_cardinal(int(last))}"


def _unit_range(match: re.Match[str]) -> str:
    amounts = (_signed_term(match[1]), _signed_term(match[2]))
    return f"{'到'.join(amounts)}{UNITS[match['unit']]}"


def _signed_term(amount: str) -> str:
    return f"{'负' if amount[0] in '-−' else ''}{han_decimal(amount.lstrip('-−'))}"


def _digits(match: re.Match[str]) -> str:
    return han_digits(match[0])


def _code(match: re.Match[str]) -> str:
    return re.sub(r"\d+", _digits, match[0])


def _years(match: re.Match[str]) -> str:
    return f"{han_digits(match[1])}到{han_digits(match[2])}"


def _score(match: re.Match[str]) -> str:
    return f"{han_cardinal(int(match[1]))}比{han_cardinal(int(match[2]))}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = int(match[1]), int(match[2])
    if not 0 < top < bottom:
        return match[0]
    return f"{han_cardinal(bottom)}分之{han_cardinal(top)}"


def _phone(match: re.Match[str]) -> str:
    return "，".join(map(han_digits, re.findall(r"\d+", match[0])))


def _plain(match: re.Match[str]) -> str:
    amount = match["amount"]
    long = len(amount) >= 10 and amount.isdigit()
    return _signed(match, han_digits(amount) if long else han_decimal(amount))


DIGIT = re.compile(r"\d")
"""A text without one is one that no rule changes."""
NARROW = {0xFF10 + digit: str(digit) for digit in range(10)}
"""Digits of full width."""
OPERATORS = {"+": "加", "×": "乘", "*": "乘", "÷": "除以", "=": "等于", "<": "小于", ">": "大于"}
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))

RULES: tuple[Rule, ...] = tuple(
    (re.compile(pattern), replace)
    for pattern, replace in (
        (rf"{BEGIN}{YEAR}[-/](\d{{1,2}})[-/](\d{{1,2}}){END}", _date),
        (rf"{BEGIN}{YEAR}[-–—~～至到]{YEAR}(?={SEASONS}|[，。；、）)\s]|\Z)", _years),
        (rf"{BEGIN}{YEAR}[-/](\d\d)(?=赛季|学年|财年)", _years),
        (rf"{BEGIN}{YEAR}(?=年)(?!年(?:的?历史|之久|左右)|(?<=00)年前)", _digits),
        (r"\A\s?(?:19[5-9]\d|20[0-4][1-9])(?=[，。！])", _digits),
        (rf"(?:{CODE}){COUNTED}", _code),
        (rf"{BEGIN}(?:{SERVICES}){COUNTED}", _digits),
        (rf"{BEGIN}\d{{3}}(?=(?:[、和/]\d{{3}})?(?:{NAMED}))(?<!00)(?<!\d0)|(?<=、|和|/)\d{{3}}(?={NAMED})", _digits),
        (r"(?<![\d.第])[015-9][05](?=后(?![来面排台半]))", _digits),
        (rf"{BEGIN}7-11{COUNTED}", lambda match: "七一一"),
        (r"(?<=\d秒)\d\d(?!\d)", _digits),
        (r"(?<=\d) ?[-−] ?(?=\d{1,9}(?:\.\d{1,4})? ?=)", lambda match: "减"),
        (r"(?<=['’])\d\d(?=年)", _digits),
        (rf"(?:(?<=拨打)|(?<=电话)|(?<=热线)|(?<=房间)|(?<=邮编))\d{{3,12}}{END}", _digits),
        (rf"{BEGIN}\d{{3,4}}(?=室|号?房(?![间子价产租贷]))", _digits),
        (r"(?<=\d) ?([×÷]) ?(?=\d)", lambda match: OPERATORS[match[1]]),
        (r"(?<=\d) ?([+*=<>]) ?(?=\d)", lambda match: OPERATORS[match[1]]),
        (rf"{BEGIN}(\d{{1,3}}):(\d){END}", _score),
        (rf"(?:(?<=比分)|(?<=以))(\d{{1,3}}):(\d{{1,3}}){END}", _score),
        (r"(?<=\d:\d\d)[-–~～](?=\d{1,2}:\d\d)", lambda match: "到"),
        (r"(?<![\d.])(\d)\.(\d)(?=折)", lambda match: han_digits(match[1] + match[2])),
        (rf"{BEGIN}(\d{{1,2}}):(\d\d)(?::(\d\d))?{END}", _time),
        (rf"{BEGIN}{MINUS}(?P<currency>[¥￥$€£]){AMOUNT}(?P<scale>万亿|[万亿])?元?{END}", _money),
        (rf"{BEGIN}(\d{{1,4}})%?[-–~～](\d{{1,4}})([%％])", _range),
        (rf"{BEGIN}{MINUS}{AMOUNT}[%％]", _percent),
        (rf"{BEGIN}{MINUS}{AMOUNT}‰", lambda match: _signed(match, f"千分之{han_decimal(match['amount'])}")),
        (rf"{BEGIN}({TERM})[-–~～]({TERM})\s?(?P<unit>{UNIT})(?![A-Za-z0-9_/²³])", _unit_range),
        (rf"{BEGIN}(?:1[3-9]\d{{9}}|0\d{{2,3}}-\d{{7,8}}|400-\d{{3}}-\d{{4}}){END}", _phone),
        (rf"(?<!第){BEGIN}(\d{{1,3}})/(\d{{1,3}}){END}", _fraction),
        (
            rf"{BEGIN}{MINUS}{AMOUNT}\s?(?P<unit>{UNIT})"
            r"(?![A-Za-z0-9_/²³])",
            lambda match: _signed(match, han_decimal(match["amount"]) + UNITS[match["unit"]]),
        ),
        (rf"{BEGIN}(\d{{1,4}})[-–~～](\d{{1,4}})(){END}", _range),
        (
            rf"(?<!第){BEGIN}2(?=\s?(?!小于)(?:[{MEASURES}]|年(?!级|[0-9一二三四五六七八九十])|分钟))",
            lambda match: "两",
        ),
        (
            rf"{BEGIN}{MINUS}(?P<amount>(?:\d{{1,3}}(?:,\d{{3}}){{1,4}}|\d{{1,15}})(?:\.\d{{1,12}})?|\d{{16,24}}){END}",
            _plain,
        ),
    )
)
