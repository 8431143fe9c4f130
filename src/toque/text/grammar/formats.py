"""String formats of JSON Schema as patterns, where the grammar library's own are looser than the RFCs.

Each pattern accepts only what the format allows; some rare valid spellings (leap seconds) cannot be written.
"""

from __future__ import annotations

_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LEAP_CENTURY = "([02468][048]|[13579][26])00"
_LEAP_YEAR = "[0-9]{2}(0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|({_LEAP_CENTURY}|{_LEAP_YEAR})-02-29)"
)
_A, _X = "[a-zA-Z0-9]", "[a-zA-Z0-9\\-]"
# 1 to 63 characters, no hyphen at either end, and none in both the third and the fourth place: that is punycode.
_LABEL = f"({_A}({_X}{{0,2}}{_A})?|{_A}{_X}({_A}{_X}|-{_A}){_X}{{0,58}}{_A})"

OWN_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    # Three labels of 63 characters stay under the 253 that a whole name may have.
    "hostname": f"^{_LABEL}(\\.{_LABEL}){{0,2}}$",
}
LIBRARY_FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
# OpenAPI's formats of numbers: bounds where they say something, and nothing where any number will do.
NUMBER_FORMATS: dict[str, dict[str, int]] = {
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"minimum": -(2**53), "maximum": 2**53},  # what every JSON parser reads exactly
    "float": {},
    "double": {},
}
