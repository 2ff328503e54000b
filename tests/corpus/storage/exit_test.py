"""Tests that a process ends, and a storage closes, while a store does not answer."""

from absl.testing import absltest
from absl.testing import parameterized

from tests import distributed

STARTS_PROCESSES = True

_READ_AND_END = """
import concurrent.futures, sys, time
import numpy as np
from maxtext_olmo.corpus.storage import remote
from tests import object_server

server = object_server.ObjectServer({"b/x": bytes(100_000)})
server.__enter__()
storage, url = remote.RemoteStorage(), f"{server.url}/b/x"
storage.read(url, 0, 10)
server.faults = lambda number, path: sys.argv[2]
count = 1000  # More than there are threads, so some requests are not sent yet.

def fill():
  numbers = np.arange(count)
  out = np.zeros(100 * count, np.uint8)
  try:
    storage.fill([url], 0 * numbers, 90 * numbers, 50 + 0 * numbers, out, 100 * numbers)
  finally:
    print("ended", flush=True)

pool = concurrent.futures.ThreadPoolExecutor(2)
fills = [pool.submit(fill) for _ in range(2)]
while server.count() < 100:
  time.sleep(0.01)
if sys.argv[1] == "close":
  storage.close()
  for one in fills:
    assert one.exception() is not None
  server.faults = lambda number, path: ""
  assert storage.read(url, 0, 10) == bytes(10)
"""


class ExitTest(parameterized.TestCase):

  @parameterized.product(ending=("exit", "close"), fault=("503", "reset"))
  def test_requests_that_are_repeated_are_given_up(self, ending, fault):
    done = distributed.run_python(_READ_AND_END, ending, fault)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout.count("ended"), 2)


if __name__ == "__main__":
  absltest.main()
