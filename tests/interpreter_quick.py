"""Triton's interpreter without what it does over and over: types and shapes are made once, sources are read once.

Every function here gives what the interpreter's own gives, of fewer steps. test_interpreter.py holds them together.
Of another Triton than KNOWN, whose insides may be others, nothing is replaced.
"""

import ast
import builtins
import dataclasses
import inspect

import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN = "3.6."
_own = {
    "block": core.block_type.__init__,
    "to_ir": core.block_type.to_ir,
    "dtype": interpreter._get_np_dtype,
    "operands": TritonSemantic.binary_op_type_checking_impl,
    "broadcast": TritonSemantic.broadcast_impl_value,
}


class Later:
    """The type of a tuple of values, made where it is asked for: its name spells those of all its values."""

    def __get__(self, values, owner=None):
        if values is None:
            return self
        found = values.__dict__["type"] = core._type_for_tuple_values(values.values)
        return found


def tuple_of(self, args, type=None):
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


_blocks: dict = {}
_known: dict = {}


def block_of(self, element_ty, shape):
    sizes = builtins.tuple(x.value if type(x) is core.constexpr else x for x in shape)
    if not all(type(x) is int for x in sizes):
        return _own["block"](self, element_ty, shape)
    found = _blocks.get((element_ty.name, sizes))
    if found is None:
        _own["block"](self, element_ty, shape)
        found = {"shape": self.shape, "numel": self.numel, "name": self.name, "sizes": sizes}
        found["of_tensors"] = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in sizes])
        _blocks[element_ty.name, sizes] = found
    self.__dict__.update(found)
    self.element_ty = element_ty


_SCALAR = core.constexpr(1), core.tuple([])


def tensor_of(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if "of_tensors" in type.__dict__ else _SCALAR


_dtypes: dict = {}


def np_dtype(of):
    name = of.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _own["dtype"](of)
    return _dtypes[name]


def block(element_ty, sizes):
    """The type of a block of these sizes, of one instance."""
    found = _known.get((element_ty.name, sizes))
    if found is None:
        found = _known[element_ty.name, sizes] = core.block_type(element_ty, list(sizes))
    return found


def to_ir(self, builder):
    return _own["to_ir"](self, builder) if self.element_ty.is_ptr() else self


_FLOATING = {"fp16", "bf16", "fp32", "fp64"}
_constants: dict = {}


def holds(name, number):
    """Whether a number next to a tensor of this type is made one of it, and fits."""
    if type(number) is float:
        return name in _FLOATING
    return type(number) is int and -(2**31) <= number < 2**31 and (name in _FLOATING or name in ("int32", "int64"))


def constant(self, number, dtype):
    found = _constants.get((dtype.name, number))
    if found is None:
        found = _constants[dtype.name, number] = self.scalar_constant(number, dtype)
    return found


def operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
    """Tensors of one type of elements, not pointers, are cast to no other, but for division's sake; nor is a tensor
    for the sake of a number that its type holds."""
    if not div_or_mod:
        if type(lhs) is type(rhs) is core.tensor:
            if lhs.dtype.name == rhs.dtype.name and not lhs.dtype.is_ptr():
                return broadcast(self, lhs, rhs)
        elif arithmetic_check and type(lhs) is core.tensor and holds(lhs.dtype.name, rhs):
            return broadcast(self, lhs, constant(self, rhs, lhs.dtype))
        elif arithmetic_check and type(rhs) is core.tensor and holds(rhs.dtype.name, lhs):
            return broadcast(self, constant(self, lhs, rhs.dtype), rhs)
    return _own["operands"](self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def broadcast(self, lhs, rhs):
    a, b = lhs.type.__dict__.get("sizes", ()), rhs.type.__dict__.get("sizes", ())
    if a == b:
        return lhs, rhs
    if not a or not b:
        scalar, sizes = (rhs, a) if a else (lhs, b)
        of = block(scalar.dtype, sizes)
        made = self.tensor(self.builder.create_splat(of, scalar.handle), of)
        return (lhs, made) if a else (made, rhs)
    if len(a) != len(b):
        return _own["broadcast"](self, lhs, rhs)
    sizes = builtins.tuple([n if m == 1 else m for m, n in zip(a, b)])
    if any(n not in (1, m) for m, n in zip(sizes, b)):
        return _own["broadcast"](self, lhs, rhs)
    return spread(self, lhs, sizes), spread(self, rhs, sizes)


def spread(self, x, sizes):
    if x.type.sizes == sizes:
        return x
    return self.tensor(self.builder.create_broadcast(x.handle, sizes), block(x.dtype, sizes))


class Located(interpreter.ASTTransformer):
    """Assignments as the interpreter rewrites them, with places of their own."""

    def visit_Assign(self, node):
        node = super().visit_Assign(node)
        for made in (node.value, node.value.func, node.value.func.value, node.value.args[1]):
            ast.copy_location(made, node)
        return node


def rewritten(self):
    """The function that stands for a kernel's: its source is read once, and keeps its lines' numbers."""
    try:
        lines, first = inspect.getsourcelines(self.fn)
    except Exception:
        return self.fn
    self.filename, self.def_lineno = self.fn.__code__.co_filename, self._find_def(lines)
    before = first + next(k for k, line in enumerate(lines) if line.strip().startswith("def ")) - 1
    tree = ast.parse("\n" * before + self._prepare_source(lines))
    return self._compile_and_exec(Located().visit(tree))


_WRAPPER = core.load.__code__


def patched(obj, name, member, builder, scope):
    """An operation that knows its semantics. What only asks for these is left out."""
    semantic, fn = interpreter.interpreter_semantic, member
    if getattr(member, "__code__", None) is _WRAPPER:
        fn = member.__wrapped__

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return fn(*args, **kwargs)

    scope.set_attr(obj, name, call)


_patch = interpreter._patch_lang
_patched: set = set()
_seen: set = set()


def patch_once(fn):
    """The interpreter puts its operations into triton.language at every call of a function, on top of those of the
    call before. Here nothing is compiled, and those of the first call stay."""
    if fn not in _seen:
        names = {x.__name__ for x in fn.__globals__.values() if x is tl or x is core} - _patched
        if names:
            _patched.update(names)
            _patch(fn)
        _seen.add(fn)
    return interpreter._LangPatchScope()


def install(put=setattr):
    if not triton.__version__.startswith(KNOWN):
        return
    put(core.tuple, "type", Later())
    put(core.tuple, "__init__", tuple_of)
    put(core.tensor, "__init__", tensor_of)
    put(core.block_type, "__init__", block_of)
    put(core.block_type, "with_element_ty", lambda self, element_ty: block(element_ty, self.sizes))
    put(core.block_type, "to_ir", to_ir)
    put(TritonSemantic, "binary_op_type_checking_impl", operands)
    put(TritonSemantic, "broadcast_impl_value", broadcast)
    put(interpreter, "_get_np_dtype", np_dtype)
    put(interpreter.FunctionRewriter, "rewrite_ast", rewritten)
    put(interpreter, "_patch_attr", patched)
    put(interpreter, "_patch_lang", patch_once)
    # sums of integers are checked for overflow, by operations whose result a builder without debug does not read
    options = interpreter.interpreter_builder.options
    put(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=options.debug))
