"""Chat templates of Hugging Face tokenizers: messages → text, with the assistant's parts marked.

A template is a Jinja program. Text between `{% generation %}` and `{% endgeneration %}` is the
assistant's:

    {{ '<|im_start|>assistant\\n' }}
    {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}

Templates are rendered as `transformers` renders them, in a sandbox, with one exception: there is no
`strftime_now`, so that the same conversation always gives the same text.
"""

from __future__ import annotations

import functools
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_TEMPLATE_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_LARGEST_TEMPLATE = 16 << 20


class ConversationError(CorpusError):
  """Raised for a conversation that cannot be used; the message says why."""


class ChatTemplate:
  """A compiled chat template.

  >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}.{% endfor %}")
  >>> template.render([{"role": "user", "content": "Hi"}])
  ('user: Hi.', [])

  Args:
    source: The Jinja program.
    special_tokens: Variables that the program may use, such as `eos_token`.
    where: Where the program comes from; shown in errors.

  Attributes:
    marks_assistant: Whether the program marks the assistant's text with `{% generation %}`.
  """

  def __init__(
      self,
      source: str,
      special_tokens: Mapping[str, str] | None = None,
      where: str = "The chat template",
  ):
    self._arguments = (source, dict(special_tokens or {}), where)
    self._special_tokens = dict(special_tokens or {})
    self.marks_assistant = bool(_GENERATION.search(source))
    self._first, self._last = (f"\x02{uuid.uuid4().hex}\x03" for _ in range(2))
    self._template = self._compile(source, where)

  def __reduce__(self) -> tuple[Any, ...]:
    return ChatTemplate, self._arguments  # Compiled templates cannot be pickled.

  def render(
      self,
      messages: Sequence[Mapping[str, Any]],
      tools: Sequence[Any] | None = None,
      *,
      add_generation_prompt: bool = False,
  ) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text of a conversation, and the characters [first, end) of each marked piece.

    Raises:
      ConversationError: The template refuses the conversation, or fails on it.
    """
    try:
      text = self._template.render(
          messages=messages,
          tools=tools,
          documents=None,
          add_generation_prompt=add_generation_prompt,
          **self._special_tokens,
      )
    except Exception as error:  # A template can raise anything that a Python expression can.
      raise ConversationError(f"the chat template fails: {_one_line(error)}") from error
    if self._first not in text:
      return text, []
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    place = 0
    for piece in text.split(self._first):
      inside, found, after = piece.partition(self._last)
      if bool(found) != bool(pieces):
        raise ConversationError("the chat template has one generation block inside another")
      if found and inside:
        spans.append((place, place + len(inside)))
      pieces += [inside, after]
      place += len(inside) + len(after)
    return "".join(pieces), spans

  def _compile(self, source: str, where: str) -> Any:
    try:
      import jinja2
      import jinja2.sandbox
    except ImportError as error:
      raise ConfigError("Chat templates need the package `jinja2`: pip install jinja2.") from error
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["mark_generation"] = lambda text: f"{self._first}{text}{self._last}"
    try:
      return environment.from_string(source)
    except jinja2.TemplateError as error:
      line = getattr(error, "lineno", None)
      place = f"{where}, line {line}" if line else where
      raise ConfigError(f"{place} is not a valid chat template: {_one_line(error)}.") from error


def load_template(
    tokenizer: str, file: str | None = None, *, eos_token: str | None = None
) -> ChatTemplate:
  """Loads the chat template of a tokenizer, or one from a file.

  Args:
    tokenizer: A `tokenizer.json`, a directory with one, or `hf:NAME`. Its config names the special
      tokens.
    file: File with a template to use instead of the tokenizer's own.
    eos_token: Value of `eos_token` in the template; by default, the one in the tokenizer's config.
  """
  _, paths = tokenizer_lib.find_files(tokenizer, others=(*tokenizer_lib.CONFIGS, _TEMPLATE_FILE))
  templates = [path for path in paths if path.endswith(_TEMPLATE_FILE)]
  config = tokenizer_lib.read_configs([path for path in paths if path not in templates])
  tokens = special_tokens(config)
  if eos_token is not None:
    tokens["eos_token"] = eos_token
  if file is not None:
    return ChatTemplate(_read(file), tokens, file)
  for path in templates:
    if os.path.isfile(path):
      return ChatTemplate(_read(path), tokens, path)
  source = config.get("chat_template")
  if isinstance(source, list):  # Several named templates; one is the default.
    named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    source = named.get("default")
  if not isinstance(source, str) or not source:
    raise ConfigError(
        f"The tokenizer {tokenizer} has no chat template: expected a {_TEMPLATE_FILE} or a"
        " chat_template in its tokenizer_config.json. Give a file with one (--chat-template)."
    )
  return ChatTemplate(source, tokens, f"chat_template of {tokenizer}")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns the text of each special token in a tokenizer's config.

  >>> special_tokens({"eos_token": {"content": "</s>"}, "pad_token": None})
  {'eos_token': '</s>'}
  """
  found = {}
  for name in _SPECIAL_TOKENS:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if isinstance(text, str) and text:
      found[name] = text
  return found


def _read(path: str) -> str:
  if not os.path.isfile(path):
    raise ConfigError(f"The chat template {path} does not exist. Check the path.")
  try:
    with open(path, encoding="utf-8", newline="") as file:
      return file.read(_LARGEST_TEMPLATE)
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"The chat template {path} cannot be read: {error}.") from error


@functools.cache
def _generation_tag() -> Any:
  """Returns the Jinja extension for `{% generation %}`."""
  import jinja2.ext
  import jinja2.nodes

  class GenerationTag(jinja2.ext.Extension):
    """Puts marks around the text of a block."""

    tags = {"generation"}  # noqa: RUF012 - its base class has a set

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      call = self.call_method("mark")
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
      mark: Any = self.environment.globals["mark_generation"]
      return mark(caller())

  return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
  """Renders JSON without HTML escapes, unlike Jinja's own filter."""
  return json.dumps(
      value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str) -> None:
  import jinja2

  raise jinja2.TemplateError(message)


def _one_line(error: BaseException) -> str:
  text = " ".join(str(error).split())[:300]
  return text or type(error).__name__
