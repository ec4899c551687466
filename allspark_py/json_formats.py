"""The string formats of JSON Schema that are enforced in outputs.

The grammar compiler checks some formats too loosely: it accepts any 29 February, any leap second
and host names of any length. The keywords here replace its checks. They accept nothing that the
format's RFC forbids; docs/guided_decoding.md lists what they do not accept although the RFC does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# RFC 3339, section 5.6. Years divisible by 4 are leap years; of those divisible by 100, only the
# ones divisible by 400.
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
# A leap second is the last second of a day in UTC.
_TIME = (
    f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_HOUR_MINUTE})"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)

# RFC 1123, section 2.1: a label has 1 to 63 characters. Labels with hyphens as third and fourth
# character are reserved, or encode Unicode (RFC 5890) by rules that no expression can check.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)

# Format -> the keywords that enforce it; without keywords the compiler's own check is used.
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
