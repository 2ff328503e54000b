"""Words of memory that several threads see, for code that numba compiles: an array of int64, and operations that nobody gets between.

Whatever was written before a word was set or added to is there for whoever finds it so: all operations are in one order (`seq_cst`).

Numba's cache notices a change in the file of a compiled function, not in those of what it calls: whoever changes this file has to
change `inspection_numba` too.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numba.extending
from llvmlite import ir
from numba.core import cgutils

# Any: what numba's compiler makes of these is not what a type checker sees.
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic

# Whether the processor has an instruction that waits for a moment, and it is known here.
BREATHES = platform.machine() == "x86_64"


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
  """Where a word of a post lies."""
  data = context.make_array(signature.args[0])(context, builder, args[0]).data
  return builder.gep(data, [args[1]])


@intrinsic
def get(_typing: Any, post: Any, word: Any) -> Any:
  """A word of `post`, before everything that is read later."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.load_atomic(_word(context, builder, signature, args), "seq_cst", 8)

  return types.int64(post, types.intp), generate


@intrinsic
def set(_typing: Any, post: Any, word: Any, value: Any) -> Any:
  """Sets a word of `post`, after everything that was written before."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    builder.store_atomic(args[2], _word(context, builder, signature, args), "seq_cst", 8)
    return context.get_dummy_value()

  return types.void(post, types.intp, types.int64), generate


@intrinsic
def add(_typing: Any, post: Any, word: Any, value: Any) -> Any:
  """Adds to a word of `post` at one blow, and gives what it was before."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    word = _word(context, builder, signature, args)
    return builder.atomic_rmw("add", word, args[2], "seq_cst")

  return types.int64(post, types.intp, types.int64), generate


@intrinsic
def breathe(_typing: Any) -> Any:
  """Tells the core that it waits, where there is an instruction for that, so that another thread of it goes on faster."""

  def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
    if BREATHES:
      kind = ir.FunctionType(ir.VoidType(), [])
      builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
    return context.get_dummy_value()

  return types.void(), generate


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
  """The memory at an address as a pointer to what the type or array `like` holds."""
  del typingctx
  pointer = types.CPointer(like.dtype)

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

  return pointer(address, like), generate
