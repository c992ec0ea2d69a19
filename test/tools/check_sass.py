#!/usr/bin/env python3
"""Checks the machine code of the kernels for Hopper (sm_90a) in an object file or a program:

    test/tools/check_sass.py build/cuda-bf16/train_gpt.o

  - no kernel uses local memory, for spilled registers or for indexed arrays;
  - no kernel calls a division of 64-bit integers, which takes about a hundred instructions;
  - kernels load and store vectors whole, 8 or 16 bytes at a time;
  - the loops of attention have the products of their source, in the same shapes;
  - nothing touches the registers of a warpgroup's product (wgmma) before a wait for it;
  - the kernel that rounds to fp8 moves whole words of shared memory;
  - the kernels that most of a step's time is spent in, besides products, use no more issue slots, and move no more bytes
    of shared memory, per iteration of their loops and in all their code, than sass_loops.json records. These counts hold
    for one version of ptxas; with another version this is not checked. After an intended change, record them again with

    test/tools/check_sass.py --record build/cuda-bf16/train_gpt.o

cuobjdump and nvdisasm of the CUDA Toolkit must be on the PATH. Prints what is wrong; exit code 1 if anything is.
"""
import collections
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# ----------------------------------------------------------------------------
# invariants

# Vectorized instances: a number among their template arguments is the count of elements in 8 or 16 bytes.
vectorised = r'[<,] ?(4|8)[,>]'

# Vectorized instances: the most loads and stores of less than 8 bytes; those that are not listed may have none.
scalars = {
    r'attention_stats_kernel': 3,         # lse, where a document begins; the first key that is seen
    r'classifier_part_kernel': 6,         # the target, its logit, the last logits; three results
    r'embedding_forward_kernel': 2,       # the token, the position
    r'elementwise_kernel': 1,             # the largest element so far, as in all others that compute it
    r'ngram_gate_(for|back)ward_kernel': 2,  # score and rstd
    r'fp8_quantize_kernel': 2,            # the largest element; the scale
    r'kv_cache_append_kernel': 1,         # the number of earlier tokens
    r'amax_kernel': 1,         # the largest element so far
    r'norm_backward_kernel': 9,           # mean, rstd; at the end, partial sums and the largest element
    r'norm_forward_kernel': 3,            # mean, rstd; the largest element
    r'qk_norm_backward_kernel': 8,        # the position, rstd; partial sums, at the end
    r'qk_norm_forward_kernel': 2,         # the position, rstd
    r'rope_kernel': 2,                    # the position; the largest element
    r'sum_columns_kernel': 1,             # a sum, at the end
    r'sum_squares_kernel': 1,             # a sum, at the end
    r'swiglu_(for|back)ward_kernel': 1,   # the largest element
    r'causal_conv_(for|back)ward_kernel': 1,  # where a document begins
}

# Kernels whose scalars cannot be counted, because compilers unroll loops over them: ends of parts of arrays, lists, odd
# sizes. The least numbers of loads and of stores of 8 or 16 bytes.
vectors = {
    r'accumulate_kernel<4>': (2, 1),
    r'attention_backward_kernel': (0, 4),
    r'attention_dq_kernel': (2, 1),
    **{rf'attention_forward_kernel<ForwardTiles<{width}, ': (0, stores)
       for width, stores in {32: 4, 64: 8, 96: 12, 128: 16, 192: 12, 256: 16}.items()},
    **{rf'attention_hopper_backward_kernel<{width}>': (0, width // 8) for width in (64, 96, 128)},
    **{rf'attention_hopper_forward_kernel<{width}>': (0, width // 16) for width in (64, 96, 128)},
    r'classifier_kernel<8>': (2, 2),
    r'fetch_rows_kernel<8>': (1, 1),
    r'kv_cache_attention_kernel<8>': (2, 0),
    r'optimizer_pass_kernel<false, 4, AdamWFormula>': (4, 3),
    r'optimizer_pass_kernel<true, 4, AdamWFormula>': (4, 4),
    r'optimizer_pass_kernel<(false|true), 4, LambUpdate>': (4, 3),
    r'optimizer_pass_kernel<(false|true), 4, MuonUpdate>': (2, 2),
    r'optimizer_pass_kernel<false, 4, (Lamb|Muon)Step>': (2, 1),
    r'optimizer_pass_kernel<true, 4, (Lamb|Muon)Step>': (2, 2),
    r'sum_rows_kernel<4,': (2, 2),
}

# The products in the innermost loop that has any: how many, their shape, and where the left operand is.
products = {
    r'attention_hopper_forward_kernel<64>': [(4, '64x128x16', 'shared'), (8, '64x64x16', 'registers')],
    r'attention_hopper_forward_kernel<96>': [(6, '64x128x16', 'shared'), (8, '64x96x16', 'registers')],
    r'attention_hopper_forward_kernel<128>': [(8, '64x128x16', 'registers'), (8, '64x128x16', 'shared')],
    r'attention_hopper_backward_kernel<64>':
        [(8, '64x128x16', 'shared'), (8, '64x64x16', 'shared'), (16, '64x64x16', 'registers')],
    r'attention_hopper_backward_kernel<96>': [(8, '64x96x16', 'registers'), (20, '64x64x16', 'shared')],
    r'attention_hopper_backward_kernel<128>': [(8, '64x128x16', 'registers'), (24, '64x64x16', 'shared')],
}


# Kernels whose loops are counted.
counted = (r'attention_hopper_(for|back)ward_kernel<(64|128)>|attention_stats_kernel<8>|classifier_kernel<8>|'
           r'fp8_quantize_kernel<.*8>|norm_(for|back)ward_kernel<8[,>]|optimizer_pass_kernel<.*, 4, AdamWFormula>')
records = Path(__file__).parent / 'sass_loops.json'

# ----------------------------------------------------------------------------
# machine code

class Instruction:
    """As nvdisasm prints it: `@P0 OPCODE.WITH.MODIFIERS operands`; .target is the label that it may jump to."""

    def __init__(self, text):
        self.text = text
        predicate, self.operation, self.operands = re.match(r'(@!?U?P\w+ +)?(\S+) *(.*)', text).groups()
        self.conditional = predicate is not None or bool(re.match(r'!?U?P\d,', self.operands))
        self.name, *self.modifiers = self.operation.split('.')
        label = re.search(r'`\(([^)]+)\)', self.operands)
        self.target = label and label[1]

    def bytes(self):
        """Bytes that a load or store moves per thread."""
        for modifier in self.modifiers:
            if modifier in ('64', '128'):
                return int(modifier) // 8
            if modifier in ('U16', 'S16', '16', 'U8', 'S8', '8'):
                return int(modifier.strip('US')) // 8
        return 4

    def registers(self):
        """The registers that it may read or write. An address is two registers if so marked; data are as many as their width."""
        address = ' '.join(re.findall(r'\[([^]]*)\]', self.operands))
        data = re.sub(r'\[[^]]*\]', '', self.operands)
        wide = self.bytes() // 4 if self.name != 'SYNCS' else 1
        if 'WIDE' in self.modifiers or self.operation == 'CS2R':
            wide = 2
        found = set()
        for first, pair in re.findall(r'\bR(\d+)(\.64)?', address):
            found |= set(range(int(first), int(first) + (2 if pair else 1)))
        for first in re.findall(r'\bR(\d+)', data):
            found |= set(range(int(first), int(first) + max(wide, 1)))
        return found


class Kernel:
    def __init__(self, symbol):
        self.symbol = self.name = symbol
        self.code = []    # instructions
        self.labels = {}  # their positions in the code

    def successors(self, at):
        """The instructions that may run next. A function that is called returns."""
        instruction = self.code[at]
        after = [at + 1] if at + 1 < len(self.code) else []
        if instruction.name in ('EXIT', 'RET'):
            return after if instruction.conditional else []
        if instruction.name in ('CALL', 'BSSY') or instruction.target not in self.labels:
            return after
        there = self.labels[instruction.target]
        return [there] if instruction.name == 'BRA' and not instruction.conditional else after + [there]

    def loops(self):
        """The loops, each as the set of its instructions. A branch closes a loop if it jumps back to an instruction that
        every path to the branch has passed; jumps back from code that the compiler moved to the end do not."""
        before = [[] for _ in self.code]
        for at in range(len(self.code)):
            for there in self.successors(at):
                before[there].append(at)
        everywhere = (1 << len(self.code)) - 1
        passed = [1] + [everywhere] * (len(self.code) - 1)  # bits of the instructions on every path to this one
        changed = True
        while changed:
            changed = False
            for at in range(1, len(self.code)):
                paths = everywhere
                for earlier in before[at]:
                    paths &= passed[earlier]
                paths |= 1 << at
                changed |= paths != passed[at]
                passed[at] = paths
        bodies = {}
        for at in range(len(self.code)):
            for head in self.successors(at):
                if head > at or not passed[at] >> head & 1:
                    continue
                body, waiting = bodies.setdefault(head, {head}), [at]
                while waiting:
                    inside = waiting.pop()
                    if inside not in body:
                        body.add(inside)
                        waiting += before[inside]
        return list(bodies.values())


def kernels_of(path):
    """All kernels of sm_90a in an object file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(['cuobjdump', '-xelf', 'sm_90a', Path(path).resolve()], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        text = ''.join(subprocess.run(['nvdisasm', '-c', cubin], check=True, capture_output=True, text=True).stdout
                       for cubin in sorted(Path(folder).iterdir()))
    kernels = []
    for line in text.splitlines():
        if section := re.match(r'\s*\.section\s+(\S+?),', line):
            kernel = Kernel(section[1].removeprefix('.text.'))
            if section[1].startswith('.text.'):
                kernels.append(kernel)
        elif label := re.match(r'(\S+):$', line):
            kernel.labels[label[1]] = len(kernel.code)
        elif code := re.match(r'\s*/\*[0-9a-f]{4,}\*/\s*(.*?)\s*;', line):
            kernel.code.append(Instruction(code[1]))
    names = subprocess.run(['c++filt', '-p'], input='\n'.join(k.symbol for k in kernels), capture_output=True,
                           check=True, text=True).stdout.splitlines()
    for kernel, name in zip(kernels, names):
        kernel.name = re.sub(r"\(\w+\)(?=\d)", "", name.removeprefix("void "))  # enumerators without their type
    return kernels


# ----------------------------------------------------------------------------
# checks: each yields what is wrong with a kernel

def row_of(table, kernel):
    """The entry of a table for a kernel. Adds the entry's name to `used`."""
    for name in table:
        if re.match(name, kernel.name):
            used.add(name)
            return table[name]
    return None


def local_memory(kernel):
    count = sum(i.name in ('LDL', 'STL') for i in kernel.code)
    if count:
        yield f'{count} accesses to local memory'


def divisions(kernel):
    count = sum(i.name == 'CALL' and bool(re.search(r'(div|rem)_[us]64', i.operands)) for i in kernel.code)
    if count:
        yield f'{count} divisions of 64-bit integers'


def widths(kernel):
    accesses = [i for i in kernel.code if i.name in ('LDG', 'STG', 'LD', 'ST')]
    least = row_of(vectors, kernel)
    if least:
        for kind, count in zip(('LDG', 'STG'), least):
            whole = sum(i.name == kind and i.bytes() >= 8 for i in accesses)
            if whole < count:
                yield f'{whole} times {kind} of 8 bytes or more, and it has {count} vectors'
        return
    if not re.search(vectorised, kernel.name):
        return
    most = row_of(scalars, kernel) or 0
    narrow = [i for i in accesses if i.bytes() < 8]
    if len(narrow) > most:
        yield f'{len(narrow)} accesses of less than 8 bytes, and it has {most} scalars: {narrow[-1].text}'


def shared_words(kernel):
    count = sum(i.name in ('LDS', 'STS') and i.bytes() < 4 for i in kernel.code)
    if count and kernel.name.startswith('fp8_quantize_kernel'):
        yield f'{count} accesses to less than a word of shared memory'


def product(instruction):
    """(shape, where the left side is, registers of the sums, registers of the left side) of an HGMMA."""
    shape = instruction.modifiers[0]
    sums, left = re.match(r'R(\d+), (?:R(\d+), )?gdesc', instruction.operands).groups()
    columns = int(shape.split('x')[1])
    return (shape, 'registers' if left else 'shared', set(range(int(sums), int(sums) + columns // 2)),
            set(range(int(left), int(left) + 4)) if left else set())


def products_in_loops(kernel):
    if not any(i.name == 'HGMMA' for i in kernel.code):
        return
    innermost, found = [], []
    for loop in sorted(kernel.loops(), key=len):
        shapes = collections.Counter(product(kernel.code[at])[:2] for at in loop if kernel.code[at].name == 'HGMMA')
        if shapes and not any(other <= loop for other in innermost):
            innermost.append(loop)
            found.append(sorted((count, *shape) for shape, count in shapes.items()))
    want = row_of(products, kernel)
    if want is None:
        yield f'has products of warpgroups, {found}, and no row in the table of these'
    elif found != [sorted(want)]:
        yield f'has loops with the products {found}; there must be one, with {sorted(want)}'


most_groups = 8  # of products in flight; if more pile up because nothing waits for them, the oldest are merged


def registers_in_flight(kernel):
    """Follows all paths. A state lists the groups of products in flight, the oldest first and the uncommitted one last,
    each as the set of its registers: (number, whether it belongs to a left side). Where paths meet, groups of the same
    age are merged."""
    if not any(i.name == 'HGMMA' for i in kernel.code):
        return

    def together(a, b):
        longest = max(len(a), len(b))
        return tuple(x | y for x, y in zip(*(((frozenset(),) * (longest - len(s))) + s for s in (a, b))))

    states, wrong, waiting = {0: (frozenset(),)}, {}, [0]
    while waiting:
        at = waiting.pop()
        state, instruction = states[at], kernel.code[at]
        under_way = frozenset().union(*state)
        if instruction.name == 'HGMMA':
            _, _, sums, left = product(instruction)
            touched = {n for n, of_left in under_way if n in (sums if of_left else left)}
            mine = {(n, False) for n in sums} | {(n, True) for n in left}
            state = (*state[:-1], state[-1] | mine)
            if 'gsb0' in instruction.operands:
                state = (*state, frozenset())
            if len(state) > most_groups:
                state = (state[0] | state[1], *state[2:])
        elif wait := re.match(r'WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)', instruction.text):
            touched = set()
            state = state[max(len(state) - 1 - int(wait[1], 16), 0):]
        else:
            touched = {n for n, _ in under_way} & instruction.registers()
        if touched:
            wrong[at] = f'R{min(touched)} of a product under way is touched: {instruction.text}'
        for there in kernel.successors(at):
            merged = together(state, states[there]) if there in states else state
            if merged != states.get(there):
                states[there] = merged
                waiting.append(there)
    yield from list(wrong.values())[:3]


# ----------------------------------------------------------------------------

# counts, which are compared with what was recorded

def ptxas_version():
    """The version of the ptxas on the PATH, or None."""
    if not shutil.which('ptxas'):
        return None
    text = subprocess.run(['ptxas', '--version'], capture_output=True, check=True, text=True).stdout
    return re.search(r'V([\d.]+)', text)[1]


def shared_bytes(instruction):
    """Bytes of shared memory that a warp moves: a quarter of a warpgroup's operands, or its threads' loads and stores."""
    if instruction.name == 'HGMMA':
        rows, columns, sums = map(int, instruction.modifiers[0].split('x'))
        _, left, _, _ = product(instruction)
        return 2 * sums * (columns + (rows if left == 'shared' else 0)) // 4
    if instruction.name in ('LDS', 'STS'):
        return 32 * instruction.bytes()
    return 32 * 4 * int(instruction.modifiers[-1]) if instruction.name in ('LDSM', 'STSM') else 0


def working_loops(kernel):
    """(issue slots, bytes of shared memory) of each innermost loop that multiplies (or, if none does, that moves vectors
    from or to global memory), in the order of the code; the last pair is for the whole code."""
    def with_any(wanted):
        loops = [loop for loop in kernel.loops() if any(wanted(kernel.code[at]) for at in loop)]
        return [loop for loop in loops if not any(other < loop for other in loops)]

    loops = with_any(lambda i: i.name == 'HGMMA') or with_any(lambda i: i.name in ('LDG', 'STG') and i.bytes() >= 8)
    loops = sorted(loops, key=min) + [range(len(kernel.code))]
    return [[len(loop), sum(shared_bytes(kernel.code[at]) for at in loop)] for loop in loops]


def more_than_recorded(loops):
    """Yields each count above sass_loops.json, if that is for this ptxas. A few slots more or less are tolerated."""
    recorded = json.loads(records.read_text())
    if ptxas_version() != recorded['ptxas']:
        return
    remedy = f'if that is meant, {Path(__file__).name} --record'
    for name in sorted(loops.keys() | recorded['loops'].keys()):
        had, has = recorded['loops'].get(name), loops.get(name)
        if had is None or has is None or len(had) != len(has):
            yield f'{name}: has the loops {has}, and {had} are recorded; {remedy}'
            continue
        for (slots_had, bytes_had), (slots, bytes_) in zip(had, has):
            if slots > 1.03 * slots_had + 2 or bytes_ > bytes_had:
                yield (f'{name}: a loop of {slots_had} issue slots and {bytes_had} bytes of shared memory has '
                       f'{slots} and {bytes_}; {remedy}')


# ----------------------------------------------------------------------------

used = set()


def main():
    record = sys.argv[1:2] == ['--record']
    if len(sys.argv) != (3 if record else 2):
        sys.exit(__doc__)
    kernels = kernels_of(sys.argv[-1])
    loops = {kernel.name: working_loops(kernel) for kernel in kernels if re.match(counted, kernel.name)}
    if record:
        rows = ',\n'.join(f'    {json.dumps(name)}: {json.dumps(loops[name])}' for name in sorted(loops))
        records.write_text(f'{{\n  "ptxas": "{ptxas_version()}",\n  "loops": {{\n{rows}\n  }}\n}}\n')
    failures = [f'{kernel.name}: {failure}'
                for kernel in kernels
                for check in (local_memory, divisions, widths, shared_words, products_in_loops, registers_in_flight)
                for failure in check(kernel)]
    failures += [f'{sys.argv[-1]} has no kernel {name}' for table in (scalars, vectors, products) for name in table
                 if name not in used]
    failures += more_than_recorded(loops)
    print('\n'.join(failures) or f'{len(kernels)} kernels are as they must be')
    sys.exit(bool(failures))


if __name__ == '__main__':
    main()
