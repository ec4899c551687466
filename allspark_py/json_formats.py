"""The string formats of JSON Schema that outputs are held to.

Where the grammar compiler knows a format too loosely (any 29 February, any leap second, host names
of any length), the keywords here stand in for it. They leave nothing through that the format's RFC
forbids; docs/guided_decoding.md names what they leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# RFC 3339, section 5.6. Years divisible by 4 are leap years, of those by 100 the ones by 400.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:"
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
    f")|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
# A leap second is the last one of a day in UTC.
_TIME = (
    f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_HOUR_MINUTE})"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)

# RFC 1123, section 2.1: a label has 1 to 63 characters. Labels with hyphens as their third and
# fourth character are reserved, or encode Unicode (RFC 5890), whose rules no expression can hold.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)

# Format -> the keywords that enforce it; the compiler's own notion of it where there are none.
ENFORCED: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
    "duration": {},
    "email": {},
    "ipv4": {},
    "ipv6": {},
    "uri": {},
    "uuid": {},
}
