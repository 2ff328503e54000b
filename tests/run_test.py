"""Tests of the test runner, on small test files of their own."""

import os
import pathlib
import subprocess
import sys
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

STARTS_PROCESSES = True

_RUNNER = pathlib.Path(__file__).with_name("run.py")
_ALONE_AND_SHARED = (("alone",), ("shared", "--fast"))
_HEAD = """
import os, subprocess, sys
from absl.testing import absltest
class SomeTest(absltest.TestCase):
"""
_TAIL = """
if __name__ == "__main__":
  absltest.main()
"""
_PASSES = "def test_passes(self): pass"
_FAILS = "def test_fails(self): self.fail('as it should')"
_SKIPS = "def test_skips(self): self.skipTest('today')"


class RunTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write(self, name, *methods, head="", tail=""):
    body = textwrap.indent("\n".join(methods) or "pass", "  ")
    (self.folder / f"{name}_test.py").write_text(head + _HEAD + body + tail + _TAIL)

  def run_tests(self, *options):
    done = subprocess.run(
        [sys.executable, str(_RUNNER), "-j", "2", *options, str(self.folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TEST_RETRIES": "0"},
    )
    self.assertEqual(done.stderr, "")
    return done.returncode, done.stdout

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_file_that_hangs_is_stopped_with_a_traceback_and_fails(self, *options):
    self.write("good", _PASSES)
    self.write("stuck", "def test_waits(self): __import__('threading').Event().wait()")
    code, output = self.run_tests(*options, "--hang-seconds", "5")
    self.assertEqual(code, 1, output)
    self.assertIn("in test_waits", output)
    self.assertIn("had not ended after 5 s", output)
    self.assertEqual(output.splitlines()[-1], "1 passed, 1 failed")

  def test_a_file_that_leaves_a_child_behind_does_not_hang(self):
    leaves = "def test_leaves(self): subprocess.Popen(['sleep', '1000'])"
    self.write("leaving", leaves)
    code, output = self.run_tests()
    self.assertEqual(code, 0, output)

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_counts_end_the_output_after_the_slowest_files(self, *options):
    self.write("good", _PASSES)
    self.write("mixed", _PASSES, _SKIPS)
    code, output = self.run_tests(*options)
    self.assertEqual(code, 0, output)
    lines = output.splitlines()
    self.assertEqual(lines[-1], "2 passed, 0 failed, 1 skipped")
    slowest = lines.index("The 2 slowest files:")
    self.assertCountEqual(
        [line.split()[-1] for line in lines[slowest + 1 : slowest + 3]],
        [str(self.folder / "good_test.py"), str(self.folder / "mixed_test.py")],
    )

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_failing_file_is_reported_with_its_output(self, *options):
    self.write("bad", _FAILS, _PASSES)
    self.write("good", _PASSES)
    code, output = self.run_tests(*options)
    self.assertEqual(code, 1)
    self.assertRegex(output, r"FAILED +2 tests .*bad_test\.py")
    self.assertRegex(output, r"ok +1 tests .*good_test\.py")
    self.assertIn("as it should", output)
    self.assertEndsWith(output, "\n2 passed, 1 failed\n")

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_retry_lists_a_file_that_then_passes_and_fails_one_that_does_not(self, *options):
    marker = str(self.folder / "marker")
    second = f"def test_second(self): os.path.exists({marker!r}) or (open({marker!r}, 'x'), 1 / 0)"
    self.write("unstable", second)
    self.write("bad", _FAILS)
    code, output = self.run_tests(*options, "--retries", "1")
    self.assertEqual(code, 1)
    self.assertIn("ZeroDivisionError", output)
    listed = output[output.index("UNSTABLE") :]
    self.assertIn("unstable_test.py", listed)
    self.assertNotIn("bad_test.py", listed)
    self.assertEndsWith(output, "\n1 passed, 1 failed\n")
    (self.folder / "bad_test.py").unlink()
    (self.folder / "marker").unlink()
    self.assertEqual(self.run_tests(*options, "--retries", "1")[0], 0)
    (self.folder / "marker").unlink()
    self.assertEqual(self.run_tests(*options)[0], 1)

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_file_without_tests_has_failed(self, *options):
    self.write("empty")
    code, output = self.run_tests(*options)
    self.assertEqual(code, 1)
    self.assertEndsWith(output, "\n0 passed, 1 failed\n")

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_file_that_cannot_be_imported_has_failed(self, *options):
    self.write("broken", _PASSES, head="import no_such_module")
    self.write("good", _PASSES)
    code, output = self.run_tests(*options)
    self.assertEqual(code, 1)
    self.assertIn("No module named 'no_such_module'", output)
    self.assertEndsWith(output, "\n1 passed, 1 failed\n")

  @parameterized.named_parameters(*_ALONE_AND_SHARED)
  def test_a_file_that_dies_has_failed_and_the_others_run(self, *options):
    self.write("a_dies", "def test_dies(self): print('last words', flush=True); os._exit(3)")
    self.write("b_good", _PASSES)
    self.write("c_good", _PASSES)
    code, output = self.run_tests(*options)
    self.assertEqual(code, 1)
    self.assertIn("last words", output)
    self.assertEndsWith(output, "\n2 passed, 1 failed\n")

  @parameterized.named_parameters(
      ("subprocess", "subprocess.run(['true'])"),
      ("fork", "os.fork() or os._exit(0)"),
      ("system", "os.system('true')"),
      ("spawn", "import multiprocessing as m; m.get_context('spawn').Process(target=int).start()"),
  )
  def test_a_process_that_an_unmarked_file_starts_is_refused(self, code):
    test = f"def test_starts(self):\n  try:\n    {code}\n  except RuntimeError: pass"
    self.write("hidden", test)
    code, output = self.run_tests("--fast")
    self.assertEqual(code, 1)
    self.assertIn("Set STARTS_PROCESSES = True", output)
    self.assertIn("hidden_test.py", output)
    self.assertEndsWith(output, "\n0 passed, 1 failed\n")

  def test_fast_leaves_a_marked_file_to_the_other_mode(self):
    starts = "def test_starts(self): subprocess.run(['true'], check=True)"
    self.write("marked", starts, head="STARTS_PROCESSES = True\n")
    self.write("good", _PASSES)
    code, output = self.run_tests("--fast")
    self.assertEqual(code, 0, output)
    self.assertEndsWith(output, "\n1 passed, 0 failed\n")
    code, output = self.run_tests()
    self.assertEqual(code, 0, output)
    self.assertEndsWith(output, "\n2 passed, 0 failed\n")

  def test_each_file_has_the_devices_that_it_asks_for(self):
    for count in (1, 2, 4):
      self.write(
          f"devices_{count}",
          f"def test_devices(self): self.assertLen(jax.devices(), {count})",
          head="import jax",
          tail=f"\ndef setUpModule():\n  jax.config.update('jax_num_cpu_devices', {count})\n",
      )
    unset = "def test_devices(self): self.assertLen(jax.devices(), 1)"
    self.write("unset", unset, head="import jax")
    code, output = self.run_tests("--fast")
    self.assertEqual(code, 0, output)

  def test_files_of_one_interpreter_do_not_change_each_others_surroundings(self):
    for name in ("a", "b", "c"):
      self.write(
          name,
          "def test_alone(self):",
          "  self.assertNotIn('LEFT_BEHIND', os.environ)",
          "  self.assertEqual(len(sys.argv), 1)",
          "  self.assertEqual(os.listdir(self.create_tempdir()), [])",
          "  os.environ['LEFT_BEHIND'] = os.getcwd()",
          "  sys.argv.append('more')",
          "  os.chdir('/')",
      )
    code, output = self.run_tests("--fast")
    self.assertEqual(code, 0, output)


if __name__ == "__main__":
  absltest.main()
