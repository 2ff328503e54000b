"""Tests of encoding conversations, compared with transformers."""

import json
import pathlib
import re

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import chat_template
from maxtext_olmo.corpus import conversations
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from tests import chats

try:
  import transformers
except ImportError:
  transformers = None

_CONTENTS = st.lists(
    st.text(st.sampled_from("ab \n<|>é😀.the"), max_size=12).filter(lambda text: text.strip()),
    min_size=1,
    max_size=5,
)


class ParseTest(parameterized.TestCase):

  def test_a_row_has_messages_tools_and_a_name(self):
    row = {
        "key": 7,
        "chat": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [1]}],
        "tools": [{"name": "f"}],
    }
    line = json.dumps(row).encode()
    parsed = conversations.parse_row(line, messages_field="chat", id_field="key")
    self.assertEqual(parsed, (row["chat"], row["tools"], "7"))

  @parameterized.parameters(
      ("{", "not a line of JSON: "),
      ("[" * 100_000, "not a line of JSON: "),
      ("[]", "expected a JSON object, found an empty list"),
      ("1", "expected a JSON object, found a number"),
      ("{}", "expected a list of messages in the field 'messages', found nothing"),
      ('{"messages": []}', "found an empty list"),
      ('{"messages": "x"}', "found text"),
      ('{"messages": [3]}', "message 0 is not a JSON object but a number"),
      ('{"messages": [{"content": "x"}]}', "message 0 has no role: found nothing"),
      ('{"messages": [{"role": "user", "content": null}]}', r"message 0 \(user\) has no content"),
      ('{"messages": [{"role": "user", "content": 1}]}', "its content is a number, not text"),
      ('{"messages": [{"role": "user", "content": "x"}]}', "no message has the role 'assistant'"),
      (
          '{"messages": [{"role": "assistant", "content": "x"}], "tools": "x"}',
          "expected a list in the field 'tools', found text",
      ),
  )
  def test_a_row_that_cannot_be_used_says_why(self, line, message):
    with self.assertRaisesRegex(conversations.ConversationError, message):
      conversations.parse_row(line.encode())

  def test_bytes_that_are_not_text_are_an_error(self):
    with self.assertRaisesRegex(conversations.ConversationError, "not a line of JSON: 'utf-8'"):
      conversations.parse_row(b'{"messages": "\xff"}')


class EncodeTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.dir = chats.write_tokenizer(pathlib.Path(absltest.get_default_test_tmpdir(), "chats"))
    cls.tokenizer = tokenizer_lib.HuggingFaceTokenizer(cls.dir / "tokenizer.json")

  def encoder(self, source):
    template = chat_template.ChatTemplate(source, {"eos_token": chats.EOS})
    return conversations.ConversationEncoder(self.tokenizer, template)

  def encode(self, source, messages, tools=None):
    return self.encoder(source).encode(conversations.Conversation(messages, tools))

  def pieces(self, encoded):
    """Returns the text of each run of tokens of the assistant."""
    import tokenizers

    decode = tokenizers.Tokenizer.from_file(str(self.dir / "tokenizer.json")).decode
    found, run = [], []
    for token, mine in zip([*encoded.ids.tolist(), 0], [*encoded.mask.tolist(), False]):
      if mine:
        run.append(token)
      elif run:
        found.append(decode(run, skip_special_tokens=False))
        run = []
    return found

  @parameterized.parameters(chats.MARKED, chats.UNMARKED)
  def test_the_assistants_text_and_the_tokens_that_end_its_turns_are_trained(self, source):
    messages = chats.chat("Hi", "It is é😀.", "the\n", "  four \n", system="The system.")
    encoded = self.encode(source, messages)
    self.assertEqual(self.pieces(encoded), ["It is é😀.<|im_end|>", "  four \n" + chats.EOS])
    self.assertEqual(encoded.ids[-1], self.tokenizer.eos_id)
    self.assertFalse(conversations.has_inner_eos(encoded.ids, self.tokenizer.eos_id))

  def test_an_eos_that_the_template_does_not_have_is_added_and_not_trained(self):
    encoded = self.encode(chats.CHATML, chats.chat("Hi", "It is four.", "the", "x \n"))
    self.assertEqual(self.pieces(encoded), ["It is four.<|im_end|>", "x \n<|im_end|>"])
    self.assertEqual(encoded.ids[-1], self.tokenizer.eos_id)
    self.assertFalse(encoded.mask[-1])

  def test_a_turn_without_an_end_keeps_its_white_space(self):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    self.assertEqual(self.pieces(self.encode(source, chats.chat("a", "b \n"))), ["b \n"])

  @parameterized.parameters(chats.MARKED, chats.UNMARKED)
  def test_system_and_tool_messages_are_not_trained_but_calls_are(self, source):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    pieces = self.pieces(self.encode(source, messages))
    self.assertEqual(pieces, ['[{"name": "f"}]<|im_end|>', f"It is 42.{chats.EOS}"])

  @parameterized.parameters(chats.MARKED, chats.UNMARKED)
  @hypothesis.given(contents=_CONTENTS, system=st.none() | st.just("The system."))
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_ids_and_mask_are_those_of_transformers(self, source, contents, system):
    if transformers is None:
      self.skipTest("transformers is not installed.")
    messages = chats.chat("Hi", *contents, system=system)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(self.dir / "tokenizer.json"), eos_token=chats.EOS
    )
    # Without this, its offsets leave out spaces, and a turn that begins with one has no mask.
    reference.backend_tokenizer.post_processor = None
    expected = reference.apply_chat_template(
        messages,
        chat_template=chats.MARKED,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    eos = self.tokenizer.eos_id
    ends = [] if expected["input_ids"][-1] == eos else [eos]
    encoded = self.encode(source, messages)
    self.assertEqual(encoded.ids.tolist(), [*expected["input_ids"], *ends])
    self.assertEqual(
        encoded.mask.tolist(),
        [*map(bool, expected["assistant_masks"]), *map(bool, [0] * len(ends))],
    )

  @hypothesis.given(contents=_CONTENTS)
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_a_uniform_template_trains_each_turn_of_the_assistant_and_nothing_else(self, contents):
    contents = [re.sub(r"[<|>]", "", text) or "x" for text in contents]
    encoded = self.encode(chats.CHATML, chats.chat("Hi", *contents))
    turns = [f"{text}<|im_end|>" for text in contents[::2]]
    # White space at the beginning of a turn may be one token with the line break before it.
    self.assertEqual(
        [piece.lstrip() for piece in self.pieces(encoded)], [t.lstrip() for t in turns]
    )

  def test_a_template_that_renders_a_turn_differently_later_is_an_error(self):
    thinking = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}<think>"
        "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    self.encode(thinking, chats.chat("a", "b"))
    with self.assertRaisesRegex(
        conversations.ConversationError,
        r"message 1 \(assistant\): the chat template renders it differently when .* Mark the",
    ):
      self.encode(thinking, chats.chat("a", "b", "c", "d"))
    prompt = chats.CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "<|im_start|>assistant: ")
    with self.assertRaisesRegex(
        conversations.ConversationError, "renders the prompt for it differ"
    ):
      self.encode(prompt, chats.chat("a", "b"))

  def test_conversations_without_loss_and_text_that_is_not_unicode_are_errors(self):
    nothing = (
        "{{ messages[0].content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with self.assertRaisesRegex(conversations.ConversationError, "nothing counts in the loss"):
      self.encode(nothing, chats.chat("a", "b"))
    with self.assertRaisesRegex(conversations.ConversationError, "not valid Unicode"):
      self.encode(chats.CHATML, chats.chat("a", "\ud800"))

  def test_an_eos_in_a_message_is_noticed(self):
    encoded = self.encode(chats.MARKED, chats.chat(f"a{chats.EOS}b", "c"))
    self.assertTrue(conversations.has_inner_eos(encoded.ids, self.tokenizer.eos_id))
    self.assertEqual(np.count_nonzero(encoded.ids == self.tokenizer.eos_id), 2)


if __name__ == "__main__":
  absltest.main()
