"""Every PTX instruction of the ladder, as a function that a kernel calls, and who holds what.

A PTX instruction becomes callable through `@intrinsic`: Numba types the call, and `InlineAsm` puts
the text where the call stands. All other modules are plain Python, so moving the ladder to another
compiler means rewriting this one (`ptx_hopper` is made with its `instruction` and `on_registers`).
`emulator.Block` does in NumPy what each function here does.

Fragments. A warp has 32 lanes; with g = lane // 4 (0…7) and t = lane % 4, lane g, t holds of

    A (16 × 16, fp16)  4 registers of 2 halves: a0 = A[g, 2t:2t+2]      a1 = A[g+8, 2t:2t+2]
                                                a2 = A[g, 2t+8:2t+10]   a3 = A[g+8, 2t+8:2t+10]
    B (16 × 8, fp16)   2 registers of 2 halves: b0 = B[2t:2t+2, g]      b1 = B[2t+8:2t+10, g]
    C (16 × 8, fp32)   4 registers:             c0, c1 = C[g, 2t:2t+2]  c2, c3 = C[g+8, 2t:2t+2]

The first half of a pair is the low one. Two C fragments side by side, rounded to fp16, are an
A fragment: so P = softmax(S) is multiplied with V without leaving its registers.

`ldmatrix` fills such registers from shared memory. It moves four 8 × 8 matrices of halves; lane i
gives the address of row i % 8 of matrix i // 8 (16 bytes, aligned), and register r of lane g, t
becomes [g, 2t:2t+2] of matrix r; with `_trans`, [2t:2t+2, g], that is, of the transposed matrix.

bf16 differs from fp16 in the names of `mma` and `cvt` alone; it lies in the same registers.
"""

from llvmlite import ir
from numba import config, types

if config.ENABLE_CUDASIM:
    intrinsic = None
else:
    from numba.cuda.extending import intrinsic

U32, U64, I32, F32 = types.uint32, types.uint64, types.int32, types.float32
_LLVM = {U32: ir.IntType(32), I32: ir.IntType(32), U64: ir.IntType(64), F32: ir.FloatType()}
_CONSTRAINT = {U32: "r", I32: "r", U64: "l", F32: "f"}


def instruction(text, inputs=(), outputs=(), touches_memory=False):
    """Return PTX text as a function: $0, $1, … are its outputs, then its inputs.

    With touches_memory, it keeps its place among other memory accesses and barriers; without, the
    compiler may move it like any arithmetic. Several outputs come as a tuple.
    """
    if intrinsic is None:
        return None  # the simulator knows no PTX
    constraints = ["=" + _CONSTRAINT[t] for t in outputs] + [_CONSTRAINT[t] for t in inputs]
    if touches_memory:
        constraints.append("~{memory}")
    if len(outputs) > 1:
        result, returns = types.UniTuple(outputs[0], len(outputs)), [_LLVM[t] for t in outputs]
        returns = ir.LiteralStructType(returns)
    else:
        result = outputs[0] if outputs else types.void
        returns = _LLVM[outputs[0]] if outputs else ir.VoidType()

    def generate(context, builder, signature, arguments):
        value = _call(builder, returns, text, constraints, arguments, touches_memory)
        if len(outputs) > 1:
            parts = [builder.extract_value(value, i) for i in range(len(outputs))]
            return context.make_tuple(builder, result, parts)
        return value if outputs else context.get_dummy_value()

    return _typed(len(inputs), lambda *_: result(*inputs), generate)


def on_registers(text, count, inputs=(), reads=True):
    """Return PTX text as a function of a local array of `count` floats, which it changes.

    $0, $1, … are the array's elements, which the compiler keeps in registers, then the inputs.
    Without `reads`, what the elements held before is of no use, and free to be forgotten.
    """
    if intrinsic is None:
        return None
    old = range(count if reads else 0)  # inputs in the registers of the outputs: "0", "1", …
    constraints = ["=f"] * count + [_CONSTRAINT[t] for t in inputs] + [str(i) for i in old]
    constraints.append("~{memory}")
    returns = ir.LiteralStructType([ir.FloatType()] * count)

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature, arguments)
        places = [builder.gep(data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]
        values = [*arguments[1:], *(builder.load(places[i]) for i in old)]
        changed = _call(builder, returns, text, constraints, values, True)
        for i, place in enumerate(places):
            builder.store(builder.extract_value(changed, i), place)
        return context.get_dummy_value()

    return _typed(1 + len(inputs), lambda array, *_: types.void(array, *inputs), generate)


def _call(builder, returns, text, constraints, arguments, touches_memory):
    """Put the text where the builder is; return its value."""
    function = ir.FunctionType(returns, [x.type for x in arguments])
    asm = ir.InlineAsm(function, text, ",".join(constraints), side_effect=touches_memory)
    # convergent: what a whole warp executes together must not be moved into a branch
    return builder.call(asm, arguments, attrs=("convergent",) if touches_memory else ())


def _typed(arity, signature, generate):
    """Return an intrinsic, as a function with so many parameters: Numba counts them."""
    names = ", ".join(f"x{i}" for i in range(arity))
    scope = {"signature": signature, "generate": generate}
    exec(f"def typed(context, {names}):\n    return signature({names}), generate", scope)
    return intrinsic(scope["typed"])


# -- matrix products ------------------------------------------------------------------------------
def _mma(half):
    """D = A B + C, 16 × 8 × 16: mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) -> (d0, d1, d2, d3)."""
    return instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        [U32] * 6 + [F32] * 4,
        [F32] * 4,
    )


def _pack(half):
    """Round two floats to halves in one register: pack(low, high)."""
    return instruction(f"cvt.rn.{half}x2.f32 $0, $2, $1;", [F32, F32], [U32])


mma_f16, mma_bf16 = _mma("f16"), _mma("bf16")
pack_f16, pack_bf16 = _pack("f16"), _pack("bf16")

# two halves of a register as floats: unpack(pair) -> (low, high)
unpack_f16 = instruction(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    [U32],
    [F32] * 2,
)
unpack_bf16 = instruction(  # the upper half of a float is a bfloat16
    "{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a; and.b32 a, $2, 0xffff0000; mov.b32 $1, a; }",
    [U32],
    [F32] * 2,
)

# -- shared memory: ldmatrix(address) -> (r0, r1, r2, r3) -----------------------------------------
ldmatrix = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", [U32], [U32] * 4, True
)
ldmatrix_trans = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", [U32], [U32] * 4, True
)
# 16 bytes, aligned: load_shared4(address) -> four floats
load_shared4 = instruction("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", [U32], [F32] * 4, True)
store_shared = instruction("st.shared.b32 [$0], $1;", [U32, U32], (), True)  # (address, value)

# -- asynchronous copies from device to shared memory: copy16(to, from, bytes) --------------------
# 16 bytes are written, `bytes` of them read (16, or 0 for zeros): nothing waits until `copy_wait`
copy16 = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", [U32, U64, U32], (), True)
# the same with 8 bytes, for threads whose guard is not 0: copy8(to, from, bytes, do_it)
copy8 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.ca.shared.global [$0], [$1], 8, $2; }",
    [U32, U64, U32, I32],
    (),
    True,
)
copy_commit = instruction("cp.async.commit_group;", touches_memory=True)
copy_wait = instruction("cp.async.wait_group 0;", touches_memory=True)  # for all groups so far


# -- loads with a guard, else zeros: load(address, do_it) -> numbers ------------------------------
def _guarded_load(kind, vector):
    """Load a vector of 32-bit numbers, aligned to its size."""
    outputs = [f"${i}" for i in range(vector)]
    several = f".v{vector}" if vector > 1 else ""
    zeros = " ".join(f"mov.b32 {x}, 0;" for x in outputs)
    return instruction(
        f"{{ .reg .pred p; setp.ne.b32 p, ${vector + 1}, 0; {zeros} "
        f"@p ld.global{several}.{kind} {'{' + ','.join(outputs) + '}' if several else '$0'}, "
        f"[${vector}]; }}",
        [U64, I32],
        [U32 if kind == "b32" else F32] * vector,
        True,
    )


load_b32x4, load_f32x2 = _guarded_load("b32", 4), _guarded_load("f32", 2)
load_f32, load_f32x4 = _guarded_load("f32", 1), _guarded_load("f32", 4)

# -- stores with a guard: store(address, value, do_it) --------------------------------------------
_GUARDED = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.%s [$0], $1; }"
store_b32 = instruction(_GUARDED % "b32", [U64, U32, I32], (), True)
store_f32 = instruction(_GUARDED % "f32", [U64, F32, I32], (), True)


# -- the same with four values, aligned to 16 bytes: store(address, x0, x1, x2, x3, do_it) --------
_GUARDED4 = "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.%s [$0], {$1,$2,$3,$4}; }"
store_b32x4 = instruction(_GUARDED4 % "b32", [U64, U32, U32, U32, U32, I32], (), True)
store_f32x4 = instruction(_GUARDED4 % "f32", [U64, F32, F32, F32, F32, I32], (), True)

# -- additions that memory does itself, so that none is lost: add(address, x0, x1, x2, x3) --------
# four neighbours in one instruction, aligned to 16 bytes; from compute capability 9.0 on
add_f32x4 = instruction("red.global.add.v4.f32 [$0], {$1,$2,$3,$4};", [U64, *[F32] * 4], (), True)
# four floats 128 bytes apart: where the 32 lanes of a warp have neighbours, they fill whole lines
add_f32_128_apart = instruction(
    " ".join(f"red.global.add.f32 [$0+{128 * i}], ${i + 1};" for i in range(4)),
    [U64, *[F32] * 4],
    (),
    True,
)

# -- arithmetic: one instruction each -------------------------------------------------------------
fmax = instruction("max.f32 $0, $1, $2;", [F32, F32], [F32])  # ignores a NaN
exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", [F32], [F32])
log2 = instruction("lg2.approx.ftz.f32 $0, $1;", [F32], [F32])


# -- addresses and vectors ------------------------------------------------------------------------
def _data(context, builder, signature, arguments):
    """Return the pointer to the first element of the array that is the first argument."""
    return context.make_array(signature.args[0])(context, builder, value=arguments[0]).data


def _to_shared(builder, pointer):
    """Return a generic pointer as one into shared memory."""
    if pointer.type.is_opaque:
        target = ir.PointerType(addrspace=3)
    else:
        target = ir.PointerType(pointer.type.pointee, 3)
    return builder.addrspacecast(pointer, target)


if intrinsic is not None:

    @intrinsic
    def shared_address(typing, array):
        """Return the 32-bit shared-memory address of an array's first element."""

        def generate(context, builder, signature, arguments):
            data = _data(context, builder, signature, arguments)
            return builder.ptrtoint(_to_shared(builder, data), ir.IntType(32))

        return U32(array), generate

    @intrinsic
    def global_address(typing, array):
        """Return the 64-bit address of an array's first element."""

        def generate(context, builder, signature, arguments):
            return builder.ptrtoint(_data(context, builder, signature, arguments), ir.IntType(64))

        return U64(array), generate

    VECTOR = ir.VectorType(ir.FloatType(), 4)

    def _vector_at(builder, array, offset, space):
        """Return the pointer to four floats, `offset` bytes into an array; all 16-byte aligned."""
        byte = ir.IntType(8)
        if array.data.type.is_opaque:
            data, target = array.data, ir.PointerType(addrspace=space)
            data = builder.addrspacecast(data, target)
            return builder.gep(data, [offset], source_etype=byte)
        data = builder.addrspacecast(array.data, ir.PointerType(ir.FloatType(), space))
        first = builder.gep(builder.bitcast(data, ir.PointerType(byte, space)), [offset])
        return builder.bitcast(first, ir.PointerType(VECTOR, space))

    def _load4(context, builder, pointer):
        typ = {"typ": VECTOR} if pointer.type.is_opaque else {}
        value = builder.load(pointer, align=16, **typ)
        lanes = [builder.extract_element(value, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        return context.make_tuple(builder, types.UniTuple(F32, 4), lanes)

    def _product(builder, a, b):
        return builder.mul(a, ir.Constant(a.type, b) if isinstance(b, int) else b)

    @intrinsic
    def load4(typing, array, index):
        """Return the floats index … index + 3 of a shared array: one 16-byte load."""

        def generate(context, builder, signature, arguments):
            array = context.make_array(signature.args[0])(context, builder, value=arguments[0])
            offset = _product(builder, arguments[1], 4)
            return _load4(context, builder, _vector_at(builder, array, offset, 3))

        return types.UniTuple(F32, 4)(array, types.int64), generate

    @intrinsic
    def store4(typing, array, index, x0, x1, x2, x3):
        """Store the floats index … index + 3 of a shared array: one 16-byte store."""

        def generate(context, builder, signature, arguments):
            array = context.make_array(signature.args[0])(context, builder, value=arguments[0])
            offset = _product(builder, arguments[1], 4)
            value = ir.Constant(VECTOR, ir.Undefined)
            for i, x in enumerate(arguments[2:]):
                value = builder.insert_element(value, x, ir.Constant(ir.IntType(32), i))
            builder.store(value, _vector_at(builder, array, offset, 3), align=16)
            return context.get_dummy_value()

        return types.void(array, types.int64, F32, F32, F32, F32), generate

    @intrinsic
    def load4_global(typing, matrix, row, column):
        """Return the floats column … column + 3 of a row of a matrix: one 16-byte load."""

        def generate(context, builder, signature, arguments):
            array = context.make_array(signature.args[0])(context, builder, value=arguments[0])
            down = _product(builder, arguments[1], builder.extract_value(array.strides, 0))
            offset = builder.add(down, _product(builder, arguments[2], 4))
            return _load4(context, builder, _vector_at(builder, array, offset, 1))

        return types.UniTuple(F32, 4)(matrix, types.int64, types.int64), generate

else:

    def load4(array, index):
        """Return the floats index … index + 3 of a shared array."""
        return array[index], array[index + 1], array[index + 2], array[index + 3]

    def load4_global(matrix, row, column):
        """Return the floats column … column + 3 of a row of a matrix."""
        return tuple(matrix[row, column + e] for e in range(4))

    def store4(array, index, *values):
        """Store the floats index … index + 3 of a shared array."""
        for e in range(4):
            array[index + e] = values[e]
