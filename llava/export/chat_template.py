"""A conversation template as Jinja, for `apply_chat_template`: it writes what `llava.data.preprocess` tokenises.

The strings come from the template itself, which is asked to write a short conversation.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from llava.constants import DEFAULT_IM_END_TOKEN, DEFAULT_IM_START_TOKEN, DEFAULT_IMAGE_TOKEN
from llava.conversation import Conversation, Part, SeparatorStyle
from llava.mm_utils import adds_space, leading_ids

_SYSTEM, _TURN = "{system}", "{said}"  # stand for the texts of a system message and of a turn

# Words in capitals are replaced: first the pieces of Jinja, then strings by their literals.
_CHAT = """\
{%- set ns = namespace(text=PREAMBLE, user=FIRST_USER, said='', behind=false) %}
{%- for message in messages %}
SAID
  {%- if message['role'] == 'system' and loop.first %}
    SYSTEM
  {%- elif message['role'] == 'user' %}
    {%- set ns.text = ns.text + ns.user + TEXT + USER_END %}
    {%- set ns.user = USER %}
  {%- elif message['role'] == 'assistant' and loop.last and not add_generation_prompt %}
    {%- set ns.text = ns.text + LAST_ANSWER + TEXT + LAST_END %}
  {%- elif message['role'] == 'assistant' %}
    {%- set ns.text = ns.text + ANSWER + TEXT + END %}
  {%- else %}
    REFUSE
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {%- set ns.text = ns.text + OPEN %}
{%- endif %}
WRITE"""

_CAPTION = """\
{%- set ns = namespace(text='', said='', behind=false) %}
{%- for message in messages %}
SAID
  {%- if message['role'] == 'assistant' %}
    {%- set ns.text = ns.text + ns.said + END %}
  {%- elif message['role'] == 'user' %}
    {%- set ns.text = ns.text + '<image>' * (ns.said.split('<image>') | length - 1) %}
  {%- else %}
    REFUSE
  {%- endif %}
{%- endfor %}
WRITE"""

_PIECES = {
    "SAID": """\
  {%- set ns.said = '' %}
  {%- if message['content'] is string %}
    {%- set ns.said = message['content'] %}
  {%- else %}
    {%- set ns.behind = false %}
    {%- for content in message['content'] %}
      {%- if content['type'] in ['image', 'image_url'] %}
        {%- set ns.said = ns.said + ('\\n' if ns.said and not ns.said.endswith('\\n') else '') + '<image>' %}
        {%- set ns.behind = true %}
      {%- elif content['text'] %}
        {%- set gap = '\\n' if ns.behind and not content['text'].startswith('\\n') else '' %}
        {%- set ns.said = ns.said + gap + content['text'] %}
        {%- set ns.behind = false %}
      {%- endif %}
    {%- endfor %}
  {%- endif %}""",
    "SYSTEM": """\
{%- set ns.text = SYSTEM_PREAMBLE.replace('{system}', ns.said) if ns.said else EMPTY_PREAMBLE %}
    {%- set ns.user = SYSTEM_USER.replace('{system}', ns.said) if ns.said else EMPTY_USER %}""",
    "REFUSE": "{{- raise_exception('this template has no place here for a message of role ' + message['role']) }}",
    "TEXT": "ns.said",
    "WRITE": """\
{%- for text in ns.text.replace('<image>', IMAGE).split('<image>') %}
  {%- set space = '' if not text or MARKED else FRONT if loop.first else BEHIND %}
  {{- (BOS if loop.first else '<image>') + space + text }}
{%- endfor %}""",
}


def chat_template(template: Conversation, tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False) -> str:
    """The Jinja text; parts of a message are joined as `llava.data.messages` joins them.

    Args:
        template: one of `llava.conversation`; one without questions (`plain`) writes pictures and captions alone.
        tokenizer: decides what is written before a text: a BOS, a space.
        mm_use_im_start_end: whether training put tags around pictures.
    """
    pieces = dict(_PIECES)
    if template.sep_style is SeparatorStyle.PLAIN:
        text, strings = _CAPTION, {"PREAMBLE": "", "END": template.sep}
    else:
        text, strings = _CHAT, _strings(template)
        if "SYSTEM_USER" not in strings:
            pieces["SYSTEM"] = pieces["REFUSE"]
        if _strips(template):
            pieces["TEXT"] = "(ns.said | trim)"
    image = DEFAULT_IMAGE_TOKEN
    if mm_use_im_start_end and template.sep_style is not SeparatorStyle.PLAIN:
        image = DEFAULT_IM_START_TOKEN + image + DEFAULT_IM_END_TOKEN
    strings["IMAGE"] = f"<Image>{image}</Image>" if "mmtag" in template.version else image
    strings["BOS"] = tokenizer.bos_token if leading_ids(strings["PREAMBLE"], tokenizer) else ""
    # SentencePiece puts a space before every text that does not begin with a token of its own. Training encodes what
    # stands between pictures as texts of their own; here a BOS or a picture comes before the text.
    space = " " if adds_space(tokenizer) else ""
    added = sorted(set(tokenizer.get_added_vocab()) - {DEFAULT_IMAGE_TOKEN}) if space else []
    marked = " or ".join(f"text.startswith({json.dumps(token)})" for token in added) or "false"
    strings["FRONT"] = space if strings["BOS"] else ""
    strings["BEHIND"] = "" if DEFAULT_IM_END_TOKEN in strings["IMAGE"] else space
    values = {name: json.dumps(value) for name, value in strings.items()}
    return _filled(_filled(text, pieces), values | {"MARKED": f"({marked})"})


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\b[A-Z_]+\b", lambda word: values.get(word[0], word[0]), text)


def _strings(template: Conversation) -> dict[str, str]:
    """Strings around turns, by the words of `_CHAT`; `SYSTEM_` and `EMPTY_` ones, for a system message with
    and without words, only if the template takes one."""
    preamble, (user, answer, second, last) = _written(template, turns=4)
    open_answer = replace(template, messages=[[template.roles[0], _TURN], [template.roles[1], None]]).parts()
    strings = {
        "PREAMBLE": preamble,
        "FIRST_USER": user[0],
        "USER": second[0],
        "USER_END": user[1],
        "ANSWER": answer[0],
        "END": answer[1],
        "LAST_ANSWER": last[0],
        "LAST_END": last[1],
        "OPEN": _joined(part for part in open_answer if part.speaker == "assistant"),
    }
    try:
        systems = {"SYSTEM": template.with_system(_SYSTEM), "EMPTY": template.with_system("")}
    except ValueError:
        return strings
    for name, with_system in systems.items():
        strings[f"{name}_PREAMBLE"], ((strings[f"{name}_USER"], _), _) = _written(with_system, turns=2)
    return strings


def _written(template: Conversation, turns: int) -> tuple[str, list[tuple[str, str]]]:
    """What the template writes before a conversation, and around each of its turns."""
    messages = [[template.roles[index % 2], _TURN] for index in range(turns)]
    parts = replace(template, messages=messages).parts()
    preamble, *said = [_joined(group) for _, group in groupby(parts, lambda part: part.speaker)]
    if parts[0].speaker != "system":
        preamble, said = "", [preamble, *said]
    return preamble, [(before, after) for before, _, after in (text.partition(_TURN) for text in said)]


def _joined(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts)


def _strips(template: Conversation) -> bool:
    """Whether turns lose white space at their ends."""
    written = replace(template, messages=[[template.roles[0], f" {_TURN} "]]).parts()
    return f" {_TURN} " not in _joined(written)
