"""Numbers, dates, times, money, units and abbreviations of a text -> words, before it is spoken."""
