"""Tests of chat templates."""

import json
import pathlib
import pickle

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import chat_template
from maxtext_olmo.errors import ConfigError
from tests import chats


class ChatTemplateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def test_marked_pieces_are_found_and_the_marks_leave_no_trace(self):
    template = chat_template.ChatTemplate(chats.MARKED, {"eos_token": "E"})
    messages = chats.chat("a", "bc", "d", "", system="s")
    text, spans = template.render(messages)
    self.assertTrue(template.marks_assistant)
    self.assertEqual(
        text,
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nbc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\nE",
    )
    self.assertEqual([text[a:b] for a, b in spans], ["bc<|im_end|>", "E"])
    prompt, _ = template.render(messages[:1], add_generation_prompt=True)
    self.assertEndsWith(prompt, "<|im_start|>assistant\n")

  def test_a_template_without_marks_has_no_pieces(self):
    template = chat_template.ChatTemplate(chats.CHATML)
    self.assertFalse(template.marks_assistant)
    self.assertEqual(template.render(chats.chat("a", "b"))[1], [])

  def test_a_copy_in_another_process_renders_the_same(self):
    template = chat_template.ChatTemplate(chats.MARKED, {"eos_token": "E"})
    copy = pickle.loads(pickle.dumps(template))
    self.assertEqual(copy.render(chats.chat("a", "b")), template.render(chats.chat("a", "b")))

  def test_tools_json_and_loop_controls_are_available(self):
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ tools | tojson }} {{ m | tojson(indent=1) }}{% endfor %}"
    )
    template = chat_template.ChatTemplate(source)
    text, _ = template.render(chats.chat("<é>", "b"), [{"name": "é&"}])
    self.assertEqual(text, '[{"name": "é&"}] {\n "role": "user",\n "content": "<é>"\n}')

  @parameterized.parameters(
      ("{{ raise_exception('no\nway') }}", "the chat template fails: no way"),
      ("{{ 'a' + messages[0]['none'] }}", "has no attribute 'none'"),
      ("{{ messages[9] + 'a' }}", "the chat template fails: "),
      ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
      ("{{ messages.append(1) }}", "the chat template fails: "),
      (
          "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
          "one generation block inside another",
      ),
  )
  def test_what_a_template_refuses_is_an_error_of_the_conversation(self, source, message):
    template = chat_template.ChatTemplate(source)
    with self.assertRaisesRegex(chat_template.ConversationError, message):
      template.render(chats.chat("a", "b"))

  @parameterized.parameters("{% for %}", "{{ a", "{% generation %}", "{% unknown %}")
  def test_a_template_that_is_not_jinja_is_an_error(self, source):
    with self.assertRaisesRegex(ConfigError, "my.jinja, line 1 is not a valid chat template: "):
      chat_template.ChatTemplate(source, where="my.jinja")

  def test_a_tokenizer_has_its_template_in_its_config_or_in_a_file(self):
    messages = chats.chat("a", "b")
    tokenizer = chats.write_tokenizer(self.dir / "t")
    expected = chat_template.ChatTemplate(chats.MARKED, {"eos_token": chats.EOS}).render(messages)
    self.assertEqual(chat_template.load_template(str(tokenizer)).render(messages), expected)
    file = str(tokenizer / "tokenizer.json")
    self.assertEqual(chat_template.load_template(file).render(messages), expected)
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": chats.CHATML}]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    self.assertFalse(chat_template.load_template(file).marks_assistant)
    (tokenizer / "chat_template.jinja").write_text("from the file{{ eos_token }}")
    loaded = chat_template.load_template(str(tokenizer), eos_token="E")
    self.assertEqual(loaded.render(messages)[0], "from the fileE")
    (self.dir / "own.jinja").write_text("own")
    loaded = chat_template.load_template(str(tokenizer), str(self.dir / "own.jinja"))
    self.assertEqual(loaded.render(messages)[0], "own")

  def test_a_missing_template_is_an_error(self):
    tokenizer = str(chats.write_tokenizer(self.dir / "t", template=None))
    with self.assertRaisesRegex(ConfigError, r"has no chat template: .*\(--chat-template\)"):
      chat_template.load_template(tokenizer)
    with self.assertRaisesRegex(ConfigError, "The chat template .*none does not exist"):
      chat_template.load_template(tokenizer, str(self.dir / "none"))
    (self.dir / "t" / "tokenizer_config.json").write_text("[]")
    with self.assertRaisesRegex(ConfigError, "tokenizer_config.json is not a JSON object"):
      chat_template.load_template(tokenizer)


if __name__ == "__main__":
  absltest.main()
