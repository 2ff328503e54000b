"""Prints the versions of the packages that setup.cfg bounds, as installed and as allowed.

python tests/versions.py            a table of this environment
python tests/versions.py --lowest   the same, and fails unless each package has its lowest version
"""

import argparse
import configparser
import contextlib
import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.version import Version

_SETUP = pathlib.Path(__file__).resolve().parent.parent / "setup.cfg"
EXTRAS = ("train", "tokenizers", "chat", "zstd", "parquet", "fast", "cloud", "eval", "report")


def requirements() -> list[Requirement]:
  """Returns what the package and its tested extras require, on any version of Python."""
  setup = configparser.ConfigParser()
  setup.read(_SETUP)
  lines = setup["options"]["install_requires"].split("\n")
  for extra in EXTRAS:
    lines += setup["options.extras_require"][extra].split("\n")
  return [Requirement(line) for line in lines if line.strip()]


def lowest(python: str) -> dict[str, Version]:
  """Returns the lowest version of each package that setup.cfg allows on a version of Python.

  >>> lowest("3.11")["numpy"]
  <Version('2.0')>
  """
  found: dict[str, Version] = {}
  for requirement in requirements():
    if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
      for bound in requirement.specifier:
        if bound.operator == ">=":
          version = Version(bound.version)
          found[requirement.name] = max(version, found.get(requirement.name, version))
  return found


def above(floors: dict[str, Version], installed: dict[str, Version]) -> list[str]:
  """Returns the packages that are not installed at their lowest version.

  >>> above({"rich": Version("13.7")}, {"rich": Version("13.7.0")})
  []
  """
  return [name for name, floor in floors.items() if installed.get(name) != floor]


def _installed(names: Iterable[str]) -> dict[str, Version]:
  """Returns the versions of those packages that this environment has."""
  found = {}
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = Version(importlib.metadata.version(name))
  return found


def main() -> int:
  """Prints the table; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
      "--lowest", action="store_true", help="fail unless each version is the lowest"
  )
  args = parser.parse_args()
  floors = lowest(".".join(platform.python_version_tuple()[:2]))
  installed = _installed(floors)
  print(f"Python {platform.python_version()}")
  print(f"{'package':<18} {'lowest':<8} installed")
  for name, floor in floors.items():
    print(f"{name:<18} {floor!s:<8} {installed.get(name, '-')}")
  if args.lowest and (names := above(floors, installed)):
    print(
        f"Not at their lowest version: {', '.join(names)}. Delete this environment, and run again."
    )
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
