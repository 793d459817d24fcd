"""Plans in other forms than the one that is asked for: JSON, and numbered lists; models write both.

JSON, alone, in a fence or between lines of prose, is a list of lemmas, an object that holds one under `lemmas` or
another such name, or an object of lemmas by id; a lemma has the fields of the format that is asked for, or those of
`Lemma`:

    {"lemmas": [{"id": "L1", "type": "computational", "statement": "...", "dependencies": [], "verify": "..."},
                {"id": "FINAL", "statement": "...", "depends_on": ["L1"]}]}

In a numbered list each item is a lemma, and one of them is called FINAL:

    1. (computational) The square of 3 is 9. Verify: multiply.
    2. L2: The square of 4 is 16.
    3. **FINAL**: The answer is 25 (depends on L1 and 2).

What such a plan leaves out has the default of `Lemma`; FINAL is a synthesis. Everything is given back as the text of
the fields of a block, to be checked as those are.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sigma0.reason.lemma.graph import FINAL, TYPES, shortened

Block = tuple[str, dict[str, str]]
_LISTS = ("lemmas", "plan", "graph", "nodes", "steps", "lemmagraph")
_KEYS = {
    "ID": ("id", "lemma", "name", "label", "lemmaid"),
    "TYPE": ("type", "kind", "category", "lemmatype"),
    "STATEMENT": ("statement", "claim", "description", "goal", "text", "content"),
    "DEPENDS": ("depends", "dependson", "dependencies", "dependency", "deps", "requires", "uses", "parents"),
    "VERIFY": ("verify", "verification", "verificationstrategy", "verificationmethod", "strategy", "check"),
}
# places where JSON may begin that are tried
_MOST_OPENINGS = 40
_OPENS_JSON = re.compile(r"^[^\S\n]*(?=[\[{])|(?<=:)[^\S\n]*(?=[\[{][^\S\n]*$)", re.MULTILINE)

_KINDS = "|".join(TYPES)
_ITEM = re.compile(
    r"^(?P<indent>[ \t]*)(?:[-*+\u2022][ \t]+)?"
    r"(?:(?P<number>[0-9]{1,2})[.)][ \t]+|(?=[*_`\[]*(?:L[0-9]|final\b|(?:lemma|step)[ \t]+[0-9])))[*_`\[]*"
    r"(?:(?:(?:lemma|step)[ \t]+(?P<spoken>[0-9]{1,2})"
    r"|(?:(?:lemma|step)[ \t]+)?(?P<name>[A-Z]{1,2}[0-9]{1,3}|final(?:[ _](?:lemma|answer))?))"
    r"[*_`\]]*[ \t]*(?=[:.(\[\u2013\u2014-])[*_`\]]*)?",
    re.IGNORECASE,
)
_FINAL_NAME = re.compile(r"final(?:[ _-]?(?:lemma|answer))?", re.IGNORECASE)
_KIND = re.compile(rf"[(\[][*_` ]*({_KINDS})[*_` ]*[)\]]|\btype[*_`]*\s*:[*_`\s]*({_KINDS})\b[*_`.;,]*", re.IGNORECASE)
_ID = r"(?:(?:lemmas?|steps?)\s+)?[*_`\[(#]*(?:[A-Z]{1,3}[0-9]{1,3}|[0-9]{1,2})[*_`\])]*"
_DEPENDS = re.compile(
    r"[(\[]?[*_`]*\b(?:depend(?:s|ing|ent)?(?:[ _]on)?|dependencies|builds?[ ]on)[*_`]*\s*:?[*_`\s]*"
    rf"(none|nothing|n/a|[-\u2013\u2014]|{_ID}(?:\s*(?:,?\s*and\s|[,;&+])\s*{_ID})*)[)\]]?[.;,]?",
    re.IGNORECASE,
)
_VERIFY = re.compile(
    r"[*_`]*\b(?:verify|verification(?:[ _](?:strategy|method))?|check)[*_`]*\s*:[*_`\s]*(.*)$",
    re.IGNORECASE | re.DOTALL,
)


def json_blocks(text: str) -> list[Block] | None:
    """The lemmas of a plan in JSON; None where there is none.

    Raises:
        ValueError: If a lemma is no object, or has no id.
    """
    for value in _json_values(text):
        entries = _entries(value)
        if entries:
            return [_json_block(entry) for entry in entries]
    return None


def list_blocks(text: str) -> list[Block] | None:
    """The lemmas of a numbered list; None where there is none of at least two items, one of them called FINAL."""
    items: list[tuple[str, int, list[str]]] = []
    for line in text.splitlines():
        item = _ITEM.match(line)
        # what is written further in than the first item belongs to the one above it
        if item and (not items or len(item["indent"].expandtabs()) <= items[0][1]):
            name = item["name"] or item["spoken"] or item["number"] or ""
            items.append((name, len(item["indent"].expandtabs()), [line[item.end() :]]))
        elif items and line.strip():
            items[-1][2].append(line)
    if len(items) < 2 or not any(_FINAL_NAME.fullmatch(name) for name, _, _ in items):
        return None
    return [(_named(name), _list_fields(name, "\n".join(lines))) for name, _, lines in items]


def _json_values(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    end = 0
    for opening in islice(_OPENS_JSON.finditer(text), _MOST_OPENINGS):
        # inside of what was read there is no other plan
        if opening.end() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            continue
        yield value


def _entries(value: Any) -> list[Any]:
    """The lemmas that a JSON value holds; none where it is no plan."""
    if isinstance(value, list):
        return value if value and all(_has_statement(entry) for entry in value[:1]) else []
    if not isinstance(value, dict):
        return []
    keys = {_squeezed(key): key for key in value}
    for name in _LISTS:
        inner = value.get(keys.get(name, ""))
        entries = _entries(inner)
        if entries:
            final = value.get(keys.get("final", ""))
            return [*entries, {**final, "id": FINAL}] if isinstance(final, dict) else entries
    if value and all(_has_statement(entry) for entry in value.values()):
        return [{"id": name, **entry} for name, entry in value.items()]
    return []


def _has_statement(entry: Any) -> bool:
    return isinstance(entry, dict) and any(_squeezed(key) in _KEYS["STATEMENT"] for key in entry)


def _json_block(entry: Any) -> Block:
    if not isinstance(entry, dict):
        raise ValueError(f"the plan's JSON holds {shortened(json.dumps(entry), 40)} where a lemma is expected")
    values = {_squeezed(key): value for key, value in entry.items()}
    fields = {}
    for field, keys in _KEYS.items():
        # of two keys for one field the first in the list is the field, the other a remark
        key = next((key for key in keys if key in values), None)
        if key is not None:
            fields[field] = _as_text(values[key])
    if "ID" not in fields:
        raise ValueError(f"a lemma of the plan's JSON has no id: {shortened(json.dumps(entry), 60)}")
    name = _named(fields.pop("ID"))
    return name, _completed(name, fields)


def _list_fields(name: str, text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for field, pattern in (("DEPENDS", _DEPENDS), ("TYPE", _KIND), ("VERIFY", _VERIFY)):
        match = pattern.search(text)
        if match:
            fields[field] = next(group for group in match.groups() if group is not None)
            # the sentence before and the one after stay apart
            text = f"{text[: match.start()]}\n{text[match.end() :]}"
    lines = (line.strip(" \t-*+_`:.\u2013\u2014\u2022") for line in text.splitlines())
    fields["STATEMENT"] = ". ".join(filter(None, lines))
    return _completed(_named(name), fields)


def _completed(name: str, fields: dict[str, str]) -> dict[str, str]:
    kind = "synthesis" if name == FINAL else "structural"
    return {"TYPE": kind, "DEPENDS": "none", "VERIFY": "", **fields}


def _named(name: str) -> str:
    if _FINAL_NAME.fullmatch(name.strip()):
        return FINAL
    bare = re.sub(r"^(?:lemma|step)\s+", "", name.strip(), flags=re.IGNORECASE)
    return f"L{bare}" if bare.isdecimal() else bare.upper()


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_as_text, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _squeezed(key: str) -> str:
    return re.sub(r"[^a-z]", "", key.lower())
