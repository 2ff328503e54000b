"""Conversations → token ids, and a mask of the tokens that the assistant wrote.

    text    <|im_start|>user\\n Hi <|im_end|>\\n <|im_start|>assistant\\n Hello <|im_end|>\\n  EOS
    mask    0                  0  0           0                         1     1          0   0

If the chat template marks the assistant's text with `{% generation %}`, the mask covers the tokens
of that text. Otherwise the conversation is rendered turn by turn: an assistant turn begins where
its generation prompt ends, and ends with the end-of-turn token. White space after the end-of-turn
token does not belong to the turn. A token that overlaps the assistant's text only in part is also
in the mask.

A conversation ends with exactly one EOS. If the template does not write one, an EOS is added; this
added EOS does not count in the loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo.corpus import chat_template
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.chat_template import ConversationError

ASSISTANT = "assistant"


class Conversation(NamedTuple):
  """A conversation.

  Attributes:
    messages: Messages, each with a role and usually with content.
    tools: Descriptions of the tools that the assistant may call; None if there are none.
    name: Name of the conversation; empty if it has none.
  """

  messages: list[dict[str, Any]]
  tools: list[Any] | None = None
  name: str = ""


class EncodedConversation(NamedTuple):
  """The token ids of a conversation, ending with EOS, and a mask of the assistant's tokens."""

  ids: np.ndarray
  mask: np.ndarray


def parse_row(
    line: bytes, *, messages_field: str = "messages", id_field: str = "id"
) -> Conversation:
  """Returns the conversation in a line of JSON.

  >>> parse_row(b'{"messages": [{"role": "user", "content": "Hi", "name": null}]}').messages
  [{'role': 'user', 'content': 'Hi'}]

  Raises:
    ConversationError: The line is not JSON, or has no conversation.
  """
  try:
    row = json.loads(line.decode())
  except (ValueError, RecursionError) as error:
    raise ConversationError(f"not a line of JSON: {error}") from error
  if not isinstance(row, dict):
    raise ConversationError(f"expected a JSON object, found {_kind(row)}")
  given = row.get(messages_field)
  if not isinstance(given, list) or not given:
    raise ConversationError(
        f"expected a list of messages in the field {messages_field!r}, found {_kind(given)}"
    )
  messages = [_check_message(number, message) for number, message in enumerate(given)]
  if all(message["role"] != ASSISTANT for message in messages):
    raise ConversationError("no message has the role 'assistant', so there is nothing to train on")
  tools = row.get("tools") or None
  if tools is not None and not isinstance(tools, list):
    raise ConversationError(f"expected a list in the field 'tools', found {_kind(tools)}")
  return Conversation(messages, tools, text_files.document_name(row.get(id_field)))


def _check_message(number: int, message: Any) -> dict[str, Any]:
  """Returns a message without its null fields, which most templates do not expect."""
  if not isinstance(message, dict):
    raise ConversationError(f"message {number} is not a JSON object but {_kind(message)}")
  kept = {name: value for name, value in message.items() if value is not None}
  role, content = kept.get("role"), kept.get("content")
  if not isinstance(role, str) or not role:
    raise ConversationError(f"message {number} has no role: found {_kind(role)}")
  if content is None and len(kept) == 1:
    raise ConversationError(f"message {number} ({role}) has no content")
  if content is not None and not isinstance(content, str | list):
    raise ConversationError(f"message {number} ({role}): its content is {_kind(content)}, not text")
  return kept


class ConversationEncoder:
  """Encodes conversations with a tokenizer and a chat template.

  Args:
    tokenizer: The tokenizer.
    template: The chat template.
  """

  def __init__(
      self,
      tokenizer: tokenizer_lib.HuggingFaceTokenizer,
      template: chat_template.ChatTemplate,
  ):
    self.tokenizer = tokenizer
    self.template = template

  def encode(self, conversation: Conversation) -> EncodedConversation:
    """Returns the ids and the mask of a conversation.

    Raises:
      ConversationError: The template or the tokenizer refuses the conversation, or the assistant's
        tokens cannot be told apart from the others.
    """
    text, spans = self.template.render(conversation.messages, conversation.tools)
    if not self.template.marks_assistant:
      spans = self._find_turns(text, conversation)
    try:
      text.encode()
    except UnicodeEncodeError as error:  # JSON can contain lone surrogates.
      raise ConversationError(f"the text is not valid Unicode: {error.reason}") from error
    ids, offsets = self.tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(ids), np.bool_)
    for first, end in spans:
      mask |= (offsets[:, 0] < end) & (offsets[:, 1] > first)
    if not mask.any():
      raise ConversationError("no token belongs to the assistant, so nothing counts in the loss")
    if ids[-1] != self.tokenizer.eos_id:
      ids, mask = np.append(ids, self.tokenizer.eos_id), np.append(mask, False)
    return EncodedConversation(ids, mask)

  def _find_turns(self, text: str, conversation: Conversation) -> list[tuple[int, int]]:
    """Returns the bounds [first, end) of each of the assistant's turns, in characters."""
    messages, tools, _ = conversation
    turns = []
    for number, message in enumerate(messages):
      if message["role"] != ASSISTANT:
        continue
      prompt, _ = self.template.render(messages[:number], tools, add_generation_prompt=True)
      if not text.startswith(prompt):
        raise _not_a_prefix(number, "the prompt for it", prompt, text)
      so_far, _ = self.template.render(messages[: number + 1], tools)
      end = self._end_of_turn(number, so_far, text)
      if end < len(prompt):
        raise _not_a_prefix(number, "it", so_far, text)
      turns.append((len(prompt), end))
    return turns

  def _end_of_turn(self, number: int, so_far: str, text: str) -> int:
    """Returns the place in `text` just after the end-of-turn token of the last turn in `so_far`."""
    if text.startswith(so_far):
      stripped = so_far.rstrip()
      return len(stripped if self._ends_in_token(stripped) else so_far)
    # Some templates end the last turn with EOS, but earlier turns with a different token.
    common = _common_prefix(so_far, text)
    starts = range(common, max(-1, common - self._longest_token), -1)
    for start in starts:
      last, here = self._token_at(so_far, start), self._token_at(text, start)
      if last and here and not so_far[start + len(last) :].strip():
        return start + len(here)
    raise _not_a_prefix(number, "it", so_far, text)

  @property
  def _longest_token(self) -> int:
    return max(map(len, self.tokenizer.added_tokens), default=0)

  def _ends_in_token(self, text: str) -> bool:
    return text.endswith(self.tokenizer.added_tokens)

  def _token_at(self, text: str, place: int) -> str:
    """Returns the longest added token that begins at `place` in a text; "" if there is none."""
    found = (token for token in self.tokenizer.added_tokens if text.startswith(token, place))
    return max(found, key=len, default="")


def has_inner_eos(ids: np.ndarray, eos_id: int) -> bool:
  """Returns whether there is an EOS before the last token.

  >>> has_inner_eos(np.array([1, 0, 2, 0]), 0), has_inner_eos(np.array([1, 0]), 0)
  (True, False)
  """
  return bool((ids[:-1] == eos_id).any())


def _not_a_prefix(number: int, what: str, rendered: str, text: str) -> ConversationError:
  place = _common_prefix(rendered, text)
  return ConversationError(
      f"message {number} (assistant): the chat template renders {what} differently when the rest of"
      f" the conversation follows: {_excerpt(rendered, place)} becomes {_excerpt(text, place)}."
      " Mark the assistant's text in the template with {% generation %} and {% endgeneration %}"
  )


def _common_prefix(a: str, b: str) -> int:
  size = min(len(a), len(b))
  differ = (place for place in range(size) if a[place] != b[place])
  return next(differ, size)


def _excerpt(text: str, place: int) -> str:
  return repr(text[max(0, place - 10) : place + 20])


def _kind(value: Any) -> str:
  """Describes the type of a JSON value in words."""
  if value is None:
    return "nothing"
  names: Mapping[type, str] = {dict: "an object", list: "a list", str: "text", bool: "a Boolean"}
  if isinstance(value, Sequence | Mapping) and not value:
    return f"an empty {names[type(value)].split()[-1]}"
  return names.get(type(value), "a number")
