"""Tool calls as V4.1 writes them, described for a grammar: which calls an answer may, must or may only hold."""

from collections.abc import Sequence
from typing import Any

from shoal.engines.grammar.compiler import DSML

Format = dict[str, Any]
BEGIN = f"<{DSML} calls>\n"  # how deepseek-recipe renders a block, and the released encoding of V4.1
END = f"</{DSML} calls>"
BEFORE = "\n\n"  # between the answer's text, empty or not, and the block


def rest_of_block(tools: Sequence[Format], is_parallel: bool) -> Format:
    """One call or more and the end of the block, which the prompt has already begun."""
    return _sequence(_calls(tools, is_parallel), _text(END))


def text_with_block(tools: Sequence[Format], is_parallel: bool) -> Format:
    """Any text, and perhaps a block of calls at its end."""
    block = {"type": "tag", "begin": BEGIN, "content": _calls(tools, is_parallel), "end": END}
    return {"type": "triggered_tags", "triggers": [BEGIN.rstrip()], "tags": [block], "stop_after_first": True}


def json_or_block(schema: object, tools: Sequence[Format], is_parallel: bool) -> Format:
    """A JSON text, or a block of calls."""
    block = _sequence(_text(BEFORE + BEGIN), _calls(tools, is_parallel), _text(END))
    return {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, block]}


def _calls(tools: Sequence[Format], is_parallel: bool) -> Format:
    calls = [
        {
            "type": "tag",
            "begin": f'<{DSML} invoke name="{tool["name"]}">\n',
            "content": {"type": "json_schema", "style": "deepseek_v4_1_xml", "json_schema": tool["parameters"]},
            "end": f"</{DSML} invoke>\n",
        }
        for tool in tools
    ]
    return {
        "type": "tags_with_separator", "tags": calls, "separator": "", "at_least_one": True,
        "stop_after_first": not is_parallel,
    }  # fmt: skip


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
