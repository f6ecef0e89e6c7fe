"""A wanted answer as the text that the model must write: thoughts, text, tool calls in DSML, end of sentence."""

import json
import re
from collections.abc import Mapping
from typing import Any

from shoal.engines.toy.tasks.sample import Answer

DSML, THINK_END, EOS = "｜DSML｜", "</think>", "<｜end▁of▁sentence｜>"


def answer_pieces(answer: Answer, thinking: bool) -> tuple[str, ...]:
    """Alternately plain text (perhaps empty) and the spelling of a special token, from text to the end token.

    Raises ValueError for thoughts without thinking, for they have no place in such an answer.
    """
    if answer.reasoning and not thinking:
        raise ValueError("answer.reasoning must be empty in a sample that does not think; drop it or set thinking")
    thoughts = (answer.reasoning, THINK_END) if thinking else ()
    text = answer.text + _calls_text(answer.calls)
    parts = re.split(f"({DSML})", text)
    return (*thoughts, *parts, EOS)


def _calls_text(calls: tuple[tuple[str, Mapping[str, Any]], ...]) -> str:
    if not calls:
        return ""
    blocks = [f'<{DSML} invoke name="{name}">\n{_arguments(given)}\n</{DSML} invoke>\n' for name, given in calls]
    return f"\n\n<{DSML} calls>\n{''.join(blocks)}</{DSML} calls>"


def _arguments(given: Mapping[str, Any]) -> str:
    lines = []
    for name, value in given.items():
        kind, text = ("true", value) if isinstance(value, str) else ("false", json.dumps(value, ensure_ascii=False))
        lines.append(f'<{DSML} parameter name="{name}" string="{kind}">{text}</{DSML} parameter>')
    return "\n".join(lines)


_CALLS = re.compile(rf"\n\n<{DSML} calls>\n(?P<invokes>.*)</{DSML} calls>\s*", re.DOTALL)
_INVOKE = re.compile(rf'<{DSML} invoke name="(?P<name>[^"\n]*)">\n(?P<arguments>.*?)</{DSML} invoke>\n', re.DOTALL)
_ARGUMENT = re.compile(
    rf'<{DSML} parameter name="(?P<name>[^"\n]*)" string="(?P<text>true|false)">(?P<value>.*?)</{DSML} parameter>\n',
    re.DOTALL,
)


def parse_answer(text: str, thinking: bool) -> Answer:
    """The inverse, for text without its end token: an answer whose calls are malformed has none and keeps their text.

    In thinking mode, text that never closes its thoughts is all thoughts.
    """
    reasoning, mark, rest = text.partition(THINK_END)
    if not mark:
        reasoning, rest = (text, "") if thinking else ("", text)
    start = rest.find(f"\n\n<{DSML} calls>")
    calls = _parse_calls(rest[start:]) if start >= 0 else ()
    return Answer(rest[:start] if calls else rest, reasoning, calls)


def _parse_calls(text: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    whole = _CALLS.fullmatch(text)
    invokes = _matches(_INVOKE, whole["invokes"]) if whole else []
    calls = []
    for invoke in invokes:
        arguments = _matches(_ARGUMENT, invoke["arguments"])
        if not arguments and invoke["arguments"].strip():
            return ()
        try:
            calls.append((invoke["name"], {a["name"]: _value(a) for a in arguments}))
        except ValueError:
            return ()
    return tuple(calls)


def _matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that together are the whole text, or none."""
    found = list(pattern.finditer(text))
    return found if "".join(match[0] for match in found) == text else []


def _value(argument: re.Match[str]) -> Any:
    return argument["value"] if argument["text"] == "true" else json.loads(argument["value"])
