"""English: names of months, currencies, units and titles, and what abbreviations stand for."""

from __future__ import annotations

import re

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"), "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"), "¥": ("yen", "yen", "", ""),
    "₹": ("rupee", "rupees", "paisa", "paise"), "₩": ("won", "won", "", "")
}  # fmt: skip
DOLLARS = {
    "A": "Australian", "AU": "Australian", "C": "Canadian", "CA": "Canadian", "HK": "Hong Kong",
    "NZ": "New Zealand", "S": "Singapore"
}  # fmt: skip
CODES = {
    "USD": ("US dollar", "US dollars"), "EUR": ("euro", "euros"), "GBP": ("pound", "pounds"),
    "JPY": ("yen", "yen"), "CHF": ("Swiss franc", "Swiss francs"), "CNY": ("yuan", "yuan"),
    "INR": ("rupee", "rupees")
}  # fmt: skip
PERIODS = {
    "mo": "month", "yr": "year", "hr": "hour", "h": "hour", "kg": "kilogram", "lb": "pound",
    "sq ft": "square foot", "GB": "gigabyte"
}  # fmt: skip
"""What money is paid for, besides whole words."""
LARGE = {
    **dict.fromkeys(("k", "K"), "thousand"),
    **dict.fromkeys(("m", "M", "mn"), "million"),
    **dict.fromkeys(("b", "B", "bn"), "billion"),
    "tn": "trillion",
}


def _plural(one: str) -> str:
    """square meter -> square meters, mile per hour -> miles per hour."""
    head, per, rest = one.partition(" per ")
    if head.endswith("hertz") or one == "per mille":
        return one
    first, space, last = head.partition(" ") if head.startswith("degree") else ("", "", head)
    plural = f"{first}s{space}{last}" if first else re.sub("foots$", "feet", f"{last}s")
    return plural + per + rest


UNIT_NAMES = (
    "km/h kilometer per hour, kph kilometer per hour, m/s meter per second, mph mile per hour, km² square "
    "kilometer, m² square meter, m³ cubic meter, km2 square kilometer, m2 square meter, m3 cubic meter, km/s "
    "kilometer per second, km kilometer, cm centimeter, mm millimeter, m meter, mi mile, ft foot, yd yard, kg "
    "kilogram, mg milligram, µg microgram, μg microgram, g gram, lbs pound, lb pound, oz ounce, ml milliliter, mL "
    "milliliter, µl microliter, μl microliter, µL microliter, μL microliter, L liter, °C degree Celsius, ℃ degree "
    "Celsius, °F degree Fahrenheit, ℉ degree Fahrenheit, ° degree, GB/s gigabyte per second, MB/s megabyte per "
    "second, TB terabyte, GB gigabyte, MB megabyte, KB kilobyte, kB kilobyte, GHz gigahertz, MHz megahertz, kHz "
    "kilohertz, Hz hertz, kWh kilowatt hour, kW kilowatt, MW megawatt, W watt, V volt, Ω ohm, kΩ kiloohm, hrs hour, "
    "hr hour, mins minute, min minute, secs second, sec second, ms millisecond, µs microsecond, μs microsecond, h "
    "hour, ¢ cent, ‰ per mille, µm micrometer, μm micrometer, nm nanometer, cm² square centimeter, cm³ cubic "
    "centimeter, kcal kilocalorie, tsp teaspoon, tbsp tablespoon, dB decibel, rpm revolution per minute, bpm beat "
    "per minute, fps frame per second, kbps kilobit per second, Mbps megabit per second, Gbps gigabit per second, "
    "px pixel, ㎡ square meter"
)
UNITS = {unit: (one, _plural(one)) for unit, one in (entry.split(" ", 1) for entry in UNIT_NAMES.split(", "))}
"""Each symbol with one and many of it."""

BEFORE_NUMBERS = {
    "no": "number", "nos": "numbers", "nr": "number", "fig": "figure", "figs": "figures", "vol": "volume",
    "ch": "chapter", "sec": "section", "eq": "equation", "p": "page", "pp": "pages", "approx": "approximately",
    "ext": "extension"
}  # fmt: skip
TITLES = {"Dr": "Doctor", "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Prof": "Professor", "St": "Saint"}
WORDS = {
    "e.g.": "for example", "i.e.": "that is", "etc.": "et cetera", "vs.": "versus", "approx.": "approximately",
    "Jr.": "Junior", "Sr.": "Senior"
}  # fmt: skip
