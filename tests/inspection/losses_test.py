"""Tests of logged losses and their spikes."""

import csv
import json
import pathlib
import struct

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.inspection import losses as losses_lib


def _varint(value):
  encoded = b""
  while value > 127:
    encoded += bytes([value & 127 | 128])
    value >>= 7
  return encoded + bytes([value])


def _field(number, value):
  if isinstance(value, int):
    return _varint(number << 3) + _varint(value)
  if isinstance(value, float):
    return _varint(number << 3 | 5) + struct.pack("<f", value)
  return _varint(number << 3 | 2) + _varint(len(value)) + value


def _record(step, tag, value, *, as_tensor=False):
  held = _field(8, _field(1, 1) + _field(5, struct.pack("<f", value))) if as_tensor else None
  scalar = held or _field(2, value)
  event = _varint(1 << 3 | 1) + struct.pack("<d", 1.5)
  event += _field(2, step) + _field(5, _field(1, _field(1, tag.encode()) + scalar))
  return struct.pack("<Q", len(event)) + b"crc1" + event + b"crc2"


class ReadLossesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.expected = {0: 2.5, 1: 2.25, 300: 7.0}

  def assert_read(self, path, **options):
    read = losses_lib.read_losses(str(path), **options)
    self.assertEqual(dict(zip(read.steps.tolist(), read.values.tolist())), self.expected)
    return read

  def test_json_lines(self):
    path = self.folder / "metrics.jsonl"
    lines = [{"step": 1, "loss": 9.0}, {"note": "restarted"}]
    lines += [{"step": s, "loss": v, "grad": 1.0} for s, v in self.expected.items()]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    self.assert_read(path)

  def test_a_bad_line_far_into_the_log_is_named(self):
    path = self.folder / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(2500)]
    lines[1700] = ""
    path.write_text("\n".join(lines))
    self.assertLen(losses_lib.read_losses(str(path)).steps, 2499)
    for bad in ("{", '{"step": 1}, {"step": 2}', "[", "]"):
      lines[2200] = bad
      path.write_text("\n".join(lines))
      with self.assertRaisesRegex(errors.ConfigError, "Line 2201 of .* is not JSON"):
        losses_lib.read_losses(str(path))

  def test_values_that_are_no_steps_are_passed_over(self):
    path = self.folder / "metrics.jsonl"
    values = (-1, 1.5, 1 << 63, 10**400, True, "x", None, 7, 8.0, "9")
    path.write_text("\n".join(json.dumps({"step": value, "loss": 1.0}) for value in values))
    self.assertEqual(losses_lib.read_losses(str(path)).steps.tolist(), [7, 8, 9])

  def test_csv(self):
    path = self.folder / "metrics.csv"
    with path.open("w", newline="") as file:
      writer = csv.writer(file)
      writer.writerows(
          [("step", "train/loss", "eval/loss"), *((s, v, 1) for s, v in self.expected.items())]
      )
    self.assertEqual(self.assert_read(path).name, "train/loss")

  @parameterized.parameters(False, True)
  def test_event_files_of_tensorboard(self, as_tensor):
    records = [
        _record(s, "learning/loss", v, as_tensor=as_tensor) for s, v in self.expected.items()
    ]
    records.insert(1, _record(0, "learning/moe_lb_loss", 3.0))
    path = self.folder / "events.out.tfevents.1.host"
    path.write_bytes(b"".join(records) + records[0][:-3])  # The last one is being written.
    self.assert_read(path)
    self.assert_read(self.folder)

  def test_the_export_of_another_tool_and_positions_are_read(self):
    path = self.folder / "export.csv"
    path.write_text('"Step","run - train/loss"\n' + "".join(f"{i},2.5\n" for i in range(3)))
    self.assertEqual(losses_lib.read_losses(str(path)).steps.tolist(), [0, 1, 2])
    path = self.folder / "metrics.jsonl"
    path.write_text('{"step": 3, "loss": 2.5, "position": 24}\n{"step": 4, "loss": 2.5}\n')
    self.assertEqual(losses_lib.read_losses(str(path)).positions, {3: 24})

  def test_the_loss_can_be_named(self):
    path = self.folder / "metrics.jsonl"
    lines = [{"step": s, "a_loss": v, "b_loss": 0.0} for s, v in self.expected.items()]
    path.write_text("\n".join(map(json.dumps, lines)))
    self.assert_read(path, name="a_loss")
    with self.assertRaisesRegex(
        errors.ConfigError, "has several losses: a_loss, b_loss. Choose one"
    ):
      losses_lib.read_losses(str(path))
    with self.assertRaisesRegex(
        errors.ConfigError, "both a step and 'c_loss'. Found: a_loss, b_loss"
    ):
      losses_lib.read_losses(str(path), name="c_loss")

  @parameterized.parameters(
      ("a.jsonl", b"{", "Line 1 of .* is not JSON"),
      ("a.jsonl", b'{"step": 1}', "expected records with a `step` and a `loss`; found no number"),
      ("a.jsonl", b"\xff\xfe", "is not text"),
      ("a.jsonl", b"", "found no number"),
      ("a.tfevents", struct.pack("<Q", 3) + b"crc1" + b"\x0f\xff\xff" + b"crc2", "is damaged"),
      ("a.csv", b"a,b\n1,2\n", "found no number"),
  )
  def test_a_file_without_losses_is_a_config_error(self, name, content, message):
    path = self.folder / name
    path.write_bytes(content)
    with self.assertRaisesRegex(errors.ConfigError, message):
      losses_lib.read_losses(str(path))

  def test_a_missing_file_is_a_file_not_found_error(self):
    for name in ("none.jsonl", "none.csv", "none.tfevents"):
      with self.assertRaisesRegex(FileNotFoundError, f"{name} does not exist.$"):
        losses_lib.read_losses(str(self.folder / name))


if __name__ == "__main__":
  absltest.main()
