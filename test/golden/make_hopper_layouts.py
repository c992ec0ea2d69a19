#!/usr/bin/env python3
"""
Writes hopper_layouts.json beside this script: which thread holds which element of the matrices that tensor cores
multiply, where elements lie in swizzled shared memory, and the descriptors of matrices there.

    python3 test/golden/make_hopper_layouts.py

It is independent of kernels/ptx.cuh, kernels/ptx_hopper.cuh and the simulated device: everything is derived from tables
and formulas as NVIDIA publishes them, and nothing from the code that is compared with it.
Running the script again gives the same bytes.
"""

import json
from pathlib import Path

# PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": the row and the column of element i of a lane.
# group stands for groupID = laneid >> 2, member for threadID_in_group = laneid % 4.
MMA = {
    "a": (8, lambda group, member, i: (group if 0 <= i < 2 or 4 <= i < 6 else group + 8,
                                       member * 2 + (i & 1) if i < 4 else member * 2 + (i & 1) + 8)),
    "b": (4, lambda group, member, i: (member * 2 + (i & 1) if i < 2 else member * 2 + (i & 1) + 8, group)),
    "d": (4, lambda group, member, i: (group if i < 2 else group + 8, member * 2 + (i & 1))),
}

# The register fragments of wgmma.m64nNk16 as CUTLASS publishes them (CLayout_64xN, and the layout of A from registers,
# which is that of 64 x 16 results). A number is written in mixed radix, the first digit running fastest, and each digit
# counts for its stride; the sum over the digits of thread and value is row + 64 column.
WGMMA_THREAD = [(4, 128), (8, 1), (4, 16)]  # (digits, stride)
WGMMA_VALUE = [(2, 64), (2, 8), (None, 512)]

# PTX ISA, "Swizzling Modes": the places of the eight 16-byte chunks of each 128-byte line of shared memory. Lines beyond
# those of a table repeat it.
SWIZZLE = {
    32: ["01234567", "10325476"],
    64: ["01234567", "10325476", "23016745", "32107654"],
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
}

# PTX ISA, "Matrix Descriptor Format" of wgmma: the first bit of each field. Fields of bytes have 14 bits.
START, LEADING, STRIDE, MODE = 0, 16, 32, 62
MODE_OF_WIDTH = {128: 1, 64: 2, 32: 3}


def fragment(name):
    count, place = MMA[name]
    return [[place(lane >> 2, lane % 4, i) for i in range(count)] for lane in range(32)]


def mixed_radix(number, digits):
    total = 0
    for count, stride in digits:
        digit = number if count is None else number % count
        number = 0 if count is None else number // count
        total += digit * stride
    return total


def row_and_column(place):
    return [place % 64, place // 64]


# The place of unit (row, unit) in a box that is as wide as its swizzle, in bytes: boxes lie in lines of 128 bytes.
def chunk_place(width, row, unit):
    chunk = row * (width // 16) + unit
    line, within = chunk // 8, chunk % 8
    table = SWIZZLE[width]
    return line * 128 + int(table[line % len(table)][within]) * 16


def encoded(bytes_):
    return (bytes_ & 0x3FFFF) >> 4


# The offsets of a tile of `rows` rows in panels as wide as a swizzle. along "k": the product sums over columns, and rows
# are those of m or n; "mn": it sums over rows. From the ISA's definitions of both offsets:
#   stride    from the first 8 rows to the next 8 rows, in either case
#   leading   along k it is not used with a swizzle; along mn it leads from one repeating pattern of the swizzle to the
#             next, which is a panel
def descriptor(rows, width, along, row, column):
    panel = rows * width
    start = column * 2 // width * panel + row * width + column * 2 % width
    bits = encoded(start) << START | encoded(8 * width) << STRIDE | MODE_OF_WIDTH[width] << MODE
    return bits | (encoded(panel) << LEADING if along == "mn" else 0)


def descriptors(rows, columns, width):
    along_k = [("k", row, column) for row in (0, 8, 64, 120) for column in range(0, columns, 16)]
    along_mn = [("mn", row, column) for column in range(0, columns, width // 2) for row in (0, 16, 64, 112)]
    return [{"along": along, "row": row, "column": column, "bits": hex(descriptor(rows, width, along, row, column))}
            for along, row, column in along_k + along_mn]


result = {
    "mma": {name: fragment(name) for name in MMA},
    "wgmma": {
        "thread": [row_and_column(mixed_radix(t, WGMMA_THREAD)) for t in range(128)],
        "value": [row_and_column(mixed_radix(v, WGMMA_VALUE)) for v in range(64)],  # the first 8 are those of A
    },
    "swizzle": {str(width): [[chunk_place(width, row, unit) for unit in range(width // 16)] for row in range(16)]
                for width in SWIZZLE},
    "tiles": [{"columns": columns, "width": width, "descriptors": descriptors(128, columns, width)}
              for columns, width in ((128, 128), (96, 64))],
}
text = json.dumps(result, separators=(",", ":"))
(Path(__file__).parent / "hopper_layouts.json").write_text(text + "\n")
