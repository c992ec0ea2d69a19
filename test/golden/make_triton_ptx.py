"""Makes triton/: kernels that Triton compiles to PTX, for test/nocard/test_ptx_triton.cu.

The interpreter of PTX in test/nocard/ must do what cards do. So it runs kernels that were not written for it, as cards run
them every day: matrix products and attention, forward and backward, for compute capability 8.0 and 9.0. Triton needs no
card to compile.

    python3 -m venv venv && venv/bin/pip install triton==3.9.0 && venv/bin/python test/golden/make_triton_ptx.py

Each file begins with a comment that says what a launch needs: warps of a block and bytes of shared memory.
"""

import gzip
import os
import pathlib
import re

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


# c (M, N) = a (M, K) @ b (K, N), of which one stride each is 1.
@triton.jit
def product(a, b, c, K, sam, sak, sbk, sbn, scn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    at_a = a + rm[:, None] * sam + rk[None, :] * sak
    at_b = b + rk[:, None] * sbk + rn[None, :] * sbn
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        sums = tl.dot(tl.load(at_a), tl.load(at_b), sums)
        at_a += BK * sak
        at_b += BK * sbk
    tl.store(c + rm[:, None] * scn + rn[None, :], sums)


# This product loads by the copy engine: a (M, K), b (N, K), c (M, N) in bf16.
@triton.jit
def product_of_boxes(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        sums = tl.dot(a.load([m, k]), b.load([n, k]).T, sums)
    c.store([m, n], sums.to(tl.bfloat16))


# Causal attention of one head a program: q, k, v, out (T, D), and the logarithms of the sums, to base 2.
@triton.jit
def attention_forward(q, k, v, out, logs, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1) * T * D
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    query = tl.load(q + head + rm[:, None] * D + rd[None, :])
    most = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    for n in range(0, (tl.program_id(0) + 1) * BM, BN):
        rn = n + tl.arange(0, BN)
        key = tl.load(k + head + rn[:, None] * D + rd[None, :])
        scores = tl.dot(query, key.T) * scale
        scores = tl.where(rm[:, None] >= rn[None, :], scores, -1e30)
        now = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(most - now)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(v + head + rn[:, None] * D + rd[None, :])
        sums = tl.dot(p.to(tl.bfloat16), value, sums * shrink[:, None])
        most = now
    tl.store(logs + tl.program_id(1) * T + rm, most + tl.log2(total))
    tl.store(out + head + rm[:, None] * D + rd[None, :], (sums / total[:, None]).to(tl.bfloat16))


# Its gradients, a block of keys a program; those of queries are added up in memory.
@triton.jit
def attention_backward(q, k, v, dout, logs, delta, dq, dk, dv, T, scale, log_scale, D: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr):
    head = tl.program_id(1) * T * D
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rd = tl.arange(0, D)
    key = tl.load(k + head + rn[:, None] * D + rd[None, :])
    value = tl.load(v + head + rn[:, None] * D + rd[None, :])
    dkey = tl.zeros((BN, D), tl.float32)
    dvalue = tl.zeros((BN, D), tl.float32)
    for m in range(tl.program_id(0) * BN, T, BM):
        rm = m + tl.arange(0, BM)
        query = tl.load(q + head + rm[:, None] * D + rd[None, :])
        dresult = tl.load(dout + head + rm[:, None] * D + rd[None, :])
        log = tl.load(logs + tl.program_id(1) * T + rm)
        p = tl.exp2(tl.dot(query, key.T) * log_scale - log[:, None])
        p = tl.where(rm[:, None] >= rn[None, :], p, 0.0)
        dvalue = tl.dot(p.to(tl.bfloat16).T, dresult, dvalue)
        dp = tl.dot(dresult, value.T)
        ds = (p * (dp - tl.load(delta + tl.program_id(1) * T + rm)[:, None]) * scale).to(tl.bfloat16)
        dkey = tl.dot(ds.T, query, dkey)
        tl.atomic_add(dq + head + rm[:, None] * D + rd[None, :], tl.dot(ds, key), sem="relaxed")
    tl.store(dk + head + rn[:, None] * D + rd[None, :], dkey.to(tl.bfloat16))
    tl.store(dv + head + rn[:, None] * D + rd[None, :], dvalue.to(tl.bfloat16))


folder = pathlib.Path(__file__).parent / "triton"


def compile_to(name, kernel, types, constants, capability, warps=4, stages=2):
    signature = {n: types[n] if n in types else "constexpr" for n in kernel.arg_names}
    names = list(signature)
    divisible = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
                 if signature[n].startswith("*") or signature[n] == "i32"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()},
                       attrs=divisible)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": warps, "num_stages": stages})
    text = re.sub(r"\n\t\.section.*", "\n", made.asm["ptx"], flags=re.S)
    text = f"// warps {made.metadata.num_warps} shared {made.metadata.shared}\n" + text
    # gzip writes the same bytes whenever it is made.
    with open(folder / f"{name}.ptx.gz", "wb") as file:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as zipped:
            zipped.write(text.encode())
    print(name, len(text), "bytes,", made.metadata.shared, "of shared memory")


def products():
    pointers = dict(a="*bf16", b="*bf16", c="*fp32")
    sizes = dict(K="i32", scn="i32")
    tile = dict(BM=64, BN=64, BK=32)
    # The letters say whether a, b lie along k: n as they are multiplied, t transposed.
    for name, strides, ones in (
        ("nn", dict(sam="i32", sbk="i32"), dict(sak=1, sbn=1)),
        ("nt", dict(sam="i32", sbn="i32"), dict(sak=1, sbk=1)),
        ("tn", dict(sak="i32", sbk="i32"), dict(sam=1, sbn=1)),
    ):
        for capability in (80, 90):
            compile_to(f"product_{name}_{capability}", product, pointers | sizes | strides,
                       tile | (dict(BK=64) if capability == 90 else {}) | ones, capability, stages=3)
    for kind in ("fp8e4nv", "fp8e5"):
        compile_to(f"product_{kind}_90", product, dict(a=f"*{kind}", b=f"*{kind}", c="*fp32", sam="i32", sbn="i32") | sizes,
                   dict(BM=64, BN=64, BK=64, sak=1, sbk=1), 90)
    compile_to("product_fp8e5_80", product, dict(a="*fp8e5", b="*fp8e5", c="*fp32", sam="i32", sbn="i32") | sizes,
               dict(BM=64, BN=64, BK=32, sak=1, sbk=1), 80)
    boxes = dict(a="tensordesc<bf16[64, 64]>", b="tensordesc<bf16[128, 64]>", c="tensordesc<bf16[64, 128]>", K="i32")
    compile_to("product_boxes_90", product_of_boxes, boxes, dict(BM=64, BN=128, BK=64), 90, stages=3)
    narrow = dict(a="tensordesc<bf16[64, 32]>", b="tensordesc<bf16[32, 32]>", c="tensordesc<bf16[64, 32]>", K="i32")
    compile_to("product_narrow_boxes_90", product_of_boxes, narrow, dict(BM=64, BN=32, BK=32), 90)


def attention():
    forward = dict(q="*bf16", k="*bf16", v="*bf16", out="*bf16", logs="*fp32", T="i32", scale="fp32")
    backward = dict(q="*bf16", k="*bf16", v="*bf16", dout="*bf16", logs="*fp32", delta="*fp32", dq="*fp32", dk="*bf16",
                    dv="*bf16", T="i32", scale="fp32", log_scale="fp32")
    for capability in (80, 90):
        compile_to(f"attention_forward_{capability}", attention_forward, forward, dict(D=64, BM=64, BN=64), capability)
        compile_to(f"attention_backward_{capability}", attention_backward, backward, dict(D=64, BM=64, BN=64), capability,
                   stages=1)


folder.mkdir(exist_ok=True)
products()
attention()
