"""A conversation template as Jinja, for `apply_chat_template`: it writes what `llava.data.preprocess` tokenises.

The strings come from the template itself, which writes a short conversation.
"""

import json
import re
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import PART_KINDS, Conversation, Frame
from llava.data.turns import MMTAG
from llava.mm_utils import adds_space, leading_ids

_SYSTEM, _TURN = "{system}", "{said}"  # stand for the texts of a system message and of a turn

# Words in capitals are replaced: first the pieces of Jinja, then strings by their literals. `write` knows what is
# before its text: the start, a picture, or other text.
_CHAT = """\
{%- set ns = namespace(space=FRONT, user=FIRST_USER, said='', behind=false) %}
{%- macro write(words) %}
  {%- for text in words.replace('<image>', IMAGE).split('<image>') %}
    {%- if not loop.first %}COUNT
      {{- '<image>' }}
      {%- set ns.space = BEHIND %}
    {%- endif %}
    {%- if text %}
      {{- ('' if MARKED else ns.space) + text }}
      {%- set ns.space = '' %}
    {%- endif %}
  {%- endfor %}
{%- endmacro %}
{{- BOS }}
{%- if not messages or messages[0]['role'] != 'system' %}
  {{- write(PREAMBLE) }}
{%- endif %}
{%- for message in messages %}
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
  {%- endif %}
  {%- if message['role'] == 'system' and loop.first %}
    SYSTEM
  {%- elif message['role'] == 'user' %}PLACE
    {{- write(ns.user + TEXT + USER_END) }}
    {%- set ns.user = USER %}
  {%- elif message['role'] == 'assistant' and loop.last and not add_generation_prompt %}
    {{- write(LAST_HEADER) }}GENERATION{{- write(GAP + TEXT + END) }}ENDGENERATION{{- write(LAST_TAIL) }}
  {%- elif message['role'] == 'assistant' %}
    {{- write(HEADER) }}GENERATION{{- write(GAP + TEXT + END) }}ENDGENERATION{{- write(TAIL) }}
  {%- else %}
    REFUSE
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- write(OPEN) }}
{%- endif %}"""

_ONE_PICTURE = """
      {%- if ns.seen is defined %}
        {{- raise_exception('one picture per conversation: this model was trained to see several of them uncut') }}
      {%- endif %}
      {%- set ns.seen = true %}"""
_IMAGE_FIRST = """
    {%- if ns.said.split('<image>') | length == 2 and not ns.said.startswith('<image>') %}
      {%- set ns.said = ('<image>\\n' + (ns.said.replace('<image>', '') | trim)) | trim %}
    {%- endif %}"""
_PIECES = {
    "SYSTEM": """\
{{- write(SYSTEM_PREAMBLE.replace('{system}', ns.said) if ns.said else EMPTY_PREAMBLE) }}
    {%- set ns.user = SYSTEM_USER.replace('{system}', ns.said) if ns.said else EMPTY_USER %}""",
    "REFUSE": "{{- raise_exception('this template has no place here for a message of role ' + message['role']) }}",
    "TEXT": "ns.said",
    "GENERATION": "{% generation %}",
    "ENDGENERATION": "{% endgeneration %}",
}


def chat_template(
    template: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    several_pictures: bool = True,
    image_first: bool = False,
) -> str:
    """The Jinja text; parts of a message are joined as `llava.data.messages` joins them.

    Args:
        template: one of `llava.conversation`, with questions.
        tokenizer: decides what is written before a text: a BOS, a space.
        several_pictures: whether a conversation may have more than one; False raises at the second.
        image_first: whether a turn's only picture is put before its text, as `llava.data.turns.image_first` does.
    """
    pieces, strings = dict(_PIECES) | {"COUNT": "" if several_pictures else _ONE_PICTURE}, _strings(template)
    pieces["PLACE"] = _IMAGE_FIRST if image_first else ""
    if "SYSTEM_USER" not in strings:
        pieces["SYSTEM"] = pieces["REFUSE"]
    if _strips(template):
        pieces["TEXT"] = "(ns.said | trim)"
    strings["IMAGE"] = MMTAG if "mmtag" in template.version else DEFAULT_IMAGE_TOKEN
    strings["BOS"] = tokenizer.bos_token if leading_ids(strings["PREAMBLE"], tokenizer) else ""
    # SentencePiece puts a space before every text that does not begin with a token of its own. Training encodes what
    # stands between pictures as texts of their own; here a BOS or a picture comes before the text.
    space = " " if adds_space(tokenizer) else ""
    added = sorted(set(tokenizer.get_added_vocab()) - {DEFAULT_IMAGE_TOKEN}) if space else []
    marked = " or ".join(f"text.startswith({json.dumps(token)})" for token in added) or "false"
    strings["FRONT"] = space if strings["BOS"] else ""
    strings["BEHIND"] = space
    values = {name: json.dumps(value) for name, value in strings.items()}
    return _filled(_filled(_CHAT, pieces), values | {"MARKED": f"({marked})"})


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\b[A-Z_]+\b", lambda word: values.get(word[0], word[0]), text)


def _strings(template: Conversation) -> dict[str, str]:
    """Strings around turns, by the words of `_CHAT`; `SYSTEM_` and `EMPTY_` ones, for a system message with and
    without words, only if the template takes one."""
    preamble, (user, answer, second, last) = _written(template, turns=4)
    open_answer = replace(template, messages=[[template.roles[0], _TURN], [template.roles[1], None]]).parts()
    strings = {
        "PREAMBLE": preamble,
        "FIRST_USER": user.header + user.gap,
        "USER": second.header + second.gap,
        "USER_END": user.end + user.tail,
        "HEADER": answer.header,
        "LAST_HEADER": last.header,
        "GAP": answer.gap,
        "END": answer.end,
        "TAIL": answer.tail,
        "LAST_TAIL": last.tail,
        "OPEN": "".join(part.text for part in open_answer if part.speaker == "assistant"),
    }
    try:
        systems = {"SYSTEM": template.with_system(_SYSTEM), "EMPTY": template.with_system("")}
    except ValueError:
        return strings
    for name, with_system in systems.items():
        preamble, (user, _) = _written(with_system, turns=2)
        strings |= {f"{name}_PREAMBLE": preamble, f"{name}_USER": user.header + user.gap}
    return strings


def _written(template: Conversation, turns: int) -> tuple[str, list[Frame]]:
    """What the template writes before a conversation, and around each of its turns."""
    messages = [[template.roles[index % 2], _TURN] for index in range(turns)]
    parts = replace(template, messages=messages).parts()
    preamble, frames = "", []
    for speaker, group in groupby(parts, lambda part: part.speaker):
        texts = dict.fromkeys(PART_KINDS, "") | {part.kind: part.text for part in group}
        if speaker == "system":
            preamble = texts["header"]
        else:
            frames.append(Frame(texts["header"], texts["body"].removesuffix(_TURN), texts["end"], texts["tail"]))
    return preamble, frames


def _strips(template: Conversation) -> bool:
    """Whether turns lose white space at their ends."""
    written = replace(template, messages=[[template.roles[0], f" {_TURN} "]]).parts()
    return f" {_TURN} " not in "".join(part.text for part in written)
