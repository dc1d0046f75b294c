"""Facts about a compiled kernel from its text: widths of its accesses, words that are polled, source locations, spilled
bytes."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator

Place = tuple[str, int, int]
"""File, line and column of the source."""

FULL_WIDTH = 16
"""Bytes of the widest access of every supported GPU; rows must be moved with it."""

_BITS = {"i1": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_POLL = re.compile(r"\btt\.load .*isVolatile = true.* : tensor<((?:\d+x)+)!tt\.ptr<(\w+)>, (#\w+)> loc\((#loc\d*)\)$")
_ACCESS = re.compile(r"\b(ld|st)\.(?:\w+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bufs](\d+)\b")


def _places(ttgir: str) -> dict[str, Place]:
    """The source place of each `#loc` alias of the IR, in the innermost function."""
    direct: dict[str, Place] = {}
    alias: dict[str, str] = {}
    for name, body in re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE):
        if match := re.fullmatch(r'"(.*)":(\d+):(\d+)', body):
            direct[name] = (match[1], int(match[2]), int(match[3]))
        elif match := re.match(r'(?:"[^"]*"\(|callsite\()(#loc\d*)', body):
            alias[name] = match[1]
    resolved = {}
    for name in [*direct, *alias]:
        target = name
        while target in alias:
            target = alias[target]
        if target in direct:
            resolved[name] = direct[target]
    return resolved


def tiles(ttgir: str, num_threads: int) -> Iterator[tuple[str, Place, str]]:
    """Loads and stores ("ld", "st") with at least 16 bytes per thread: their place and tensor type.

    Volatile accesses are left out: they poll flags, and each flag must be read by one access of its own width.
    """
    places = _places(ttgir)
    for op, operands, shape, element, loc in re.findall(
        r"\btt\.(load|store) (.*) : tensor<((?:\d+x)+)!tt\.ptr<(\w+)>.* loc\((#loc\d*)\)$", ttgir, re.MULTILINE
    ):
        if "isVolatile = true" in operands:
            continue
        count = 1
        for size in shape.rstrip("x").split("x"):
            count *= int(size)
        bits = 8 if element.startswith("f8") else _BITS[element]
        if count * bits // 8 >= FULL_WIDTH * num_threads:
            place = places.get(loc, ("unknown", 0, 0))
            yield "ld" if op == "load" else "st", place, f"{shape}{element}"


def shared_polls(ttgir: str) -> list[str]:
    """Loads that loops repeat until words have come, and of whose words several threads hold the same, as text.

    Threads load a word at different times: if one of them finds that it has come, others may hold an older value, and
    use that. Scalars, which one instruction loads for all threads of a warp, are left out.
    """
    places, held = _places(ttgir), _held(ttgir)
    found: dict[str, None] = {}
    loops: list[int] = []  # depths at which loops with a condition began
    depth = 0
    for line in ttgir.splitlines():
        text = re.sub(r'"[^"]*"', "", line)
        if re.match(r"\s*(%\S+ = )?scf\.while\b", text):
            loops.append(depth)
        match = _POLL.search(line)
        if match and loops:
            shape, element, layout, loc = match.groups()
            sizes = [int(size) for size in shape.rstrip("x").split("x")]
            if layout not in held or any(size < most for size, most in zip(sizes, held[layout], strict=True)):
                file, row, _ = places.get(loc, ("unknown", 0, 0))
                found[f"{shape}{element} at {'/'.join(file.split('/')[-3:])}:{row}"] = None
        depth += text.count("{") - text.count("}")
        while loops and depth <= loops[-1]:
            loops.pop()
    return list(found)


def _held(ttgir: str) -> dict[str, list[int]]:
    """Elements along each dimension of a block that all threads together hold, for each blocked layout of the IR; a
    smaller block is held several times."""
    layouts = re.findall(
        r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], warpsPerCTA = \[(.*?)\]",
        ttgir,
        re.MULTILINE,
    )
    return {name: [math.prod(map(int, dim)) for dim in zip(*(part.split(", ") for part in parts), strict=True)]
            for name, *parts in layouts}  # fmt: skip


def accesses(ptx: str) -> dict[tuple[str, Place], set[int]]:
    """Widths in bytes of the global loads and stores of each source place."""
    files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"(.*)"', ptx, re.MULTILINE)}
    found: dict[tuple[str, Place], set[int]] = defaultdict(set)
    place: Place | None = None
    places_to_take = None  # inside inline assembly: number of places still to accept; None outside
    for line in ptx.splitlines():
        code, _, comment = line.partition("//")
        if comment.strip() == "begin inline asm":
            places_to_take = 1
        elif comment.strip() == "end inline asm":
            places_to_take = None
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)", code):
            # Triton 3.9 numbers the lines of the assembly text from the statement's line on; only the first is real.
            if places_to_take != 0:
                place = (files[int(match[1])], int(match[2]), int(match[3]))
            places_to_take = None if places_to_take is None else 0
        elif re.match(r"\s*(\.visible\s+|\.weak\s+)*\.(func|entry)\b", code):
            place = None  # functions of the bitcode have no places
        elif place is not None and (match := _ACCESS.search(code)):
            found[match[1], place].add(int(match[2] or 1) * int(match[3]) // 8)
    return found


def narrow_accesses(ttgir: str, ptx: str, num_threads: int) -> tuple[list[str], int]:
    """Tile accesses narrower than 16 bytes, as text, and the number of wide stores.

    Tiles come from `tiles`. A tile without an instruction in the PTX counts as narrow, so that a change in Triton's
    output cannot blind this check.
    """
    seen = accesses(ptx)
    narrow: dict[str, None] = {}
    wide_stores = 0
    for kind, place, tensor in tiles(ttgir, num_threads):
        widths = seen.get((kind, place), set())
        if not widths or min(widths) < FULL_WIDTH:
            what = "store" if kind == "st" else "load"
            shown = f"{sorted(widths)} bytes wide" if widths else "not found in the PTX"
            narrow[f"{what} of {tensor} at {'/'.join(place[0].split('/')[-3:])}:{place[1]}: {shown}"] = None
        elif kind == "st":
            wide_stores += 1
    return list(narrow), wide_stores


def memory_bytes(resource_usage: str) -> tuple[int, int]:
    """Stack and local memory per thread, spills included, and static shared memory per program, from
    `cuobjdump -res-usage`.

    Raises:
        ValueError: the text names no function.
    """
    found = re.findall(r"\bSTACK:(\d+)\b.*\bSHARED:(\d+)\b.*\bLOCAL:(\d+)\b", resource_usage)
    if not found:
        raise ValueError(f"cuobjdump -res-usage names no function: {resource_usage!r}")
    return max(int(stack) + int(local) for stack, _, local in found), max(int(shared) for _, shared, _ in found)


def carried_values(ir: str) -> int:
    """Number of values that the loops of Triton's IR carry from one iteration to the next."""
    carried = re.findall(r"\bscf\.for .*? iter_args\((.*?)\) ->|\bscf\.while \((.*?)\) :", ir)
    return sum(values.count(" = ") for loop in carried for values in loop)


def without_places(ptx: str) -> str:
    """The PTX without source locations and debug sections, whose paths differ between machines."""
    lines, inside = [], False
    for line in ptx.splitlines():
        word = line.strip()
        if word.startswith(".section") and ".debug" in word:
            inside = True
        elif inside:
            inside = not word.startswith("}")
        elif not re.match(r"\.(loc|file)\b", word):
            lines.append(line)
    return "\n".join(lines) + "\n"
