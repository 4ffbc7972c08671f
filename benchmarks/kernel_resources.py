"""Resource usage of each GPU kernel, from the compiler's assembly, checked against our rules.

    python benchmarks/kernel_resources.py            (or: make kernels-check)

Compiles csrc/kernels/ for gfx90a, gfx942 and gfx950, as far as hipcc knows them, and prints
registers, LDS and occupancy of every kernel. It fails on spills, scratch memory, registers above
the budget declared beside a kernel, and accesses of less than 16 bytes that are not declared there.
The head of csrc/kernels/launch.h describes these declarations. The output names the GPUs that could
not be checked.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import parser
from megatron.config.option import integer
from megatron.errors import print_error
from megatron.kernels.build import (
    DEFAULT_ARCHS,
    SOURCES,
    BuildError,
    compile_flags,
    compiler,
    known_archs,
    no_compiler,
)

TUNED_FOR = "gfx90a"
STAND_INS = {"gfx942": "gfx940"}
"""Engineering samples, which older compilers know instead: same registers and instructions."""
REGISTERS = 512
"""Vector registers of a SIMD per lane, for all its waves together (CDNA2 ISA, section 3.6.4; the
same in CDNA3 and CDNA4).
"""
MOST_REGISTERS = 256
"""Registers that a wave can use without the accumulation half, which only matrix instructions read
in place.
"""
WIDE = 16
"""Bytes that a lane should load or store at once."""
UNROLLED = 4
"""Copies that the compiler may make of a streaming kernel's loop body; the value of ITEMS in the
declarations of such kernels.
"""

_BYTES = {
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
}
_BYTES |= {"ubyte": 1, "sbyte": 1, "byte": 1}
_ACCESS = re.compile(r"^\s+(?:global|flat|buffer)_(?:load|store)_([a-z0-9]+)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """Compiled kernel, by demangled name; `narrow` accesses are those of less than 16 bytes."""

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    spills: int
    occupancy: int
    narrow: int
    wide: int

    @property
    def function(self) -> str:
        """The name of the __global__ function."""
        return re.sub(r"^void ", "", self.name).partition("<")[0].partition("(")[0]

    @property
    def arguments(self) -> list[str]:
        """Its template arguments."""
        start = self.name.find("<")
        return _split(self.name[start:]) if start >= 0 else []

    @property
    def words(self) -> list[str]:
        """Every identifier among the template arguments, in order."""
        return re.findall(r"[A-Za-z_]\w*", " ".join(self.arguments))


@dataclass
class ResourceRules:
    """Declarations of kernels in the sources.

    waves       WAVES of each struct: a number, "condition ? 4 : 8", or "Op::WAVES" where another
                struct decides
    parameters  template parameters of each __global__ function
    decides     what MK_OCCUPANCY of each function names: "Op::WAVES", "Name<..>::WAVES" or a number
    allowed     declared narrow accesses of each struct or __global__ function
    """

    waves: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)
    decides: dict[str, str] = field(default_factory=dict)
    allowed: dict[str, str] = field(default_factory=dict)


def read_rules(folder: Path = SOURCES) -> ResourceRules:
    """Read budgets and declarations of all sources. Raises BuildError for an invalid declaration."""
    rules = ResourceRules()
    for file in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
        _read_file(file, rules)
    return rules


def _read_file(file: Path, rules: ResourceRules) -> None:
    lines = file.read_text().splitlines()
    struct = ""
    template = ""
    pending = ""
    for number, line in enumerate(lines, 1):
        if head := re.search(r"\bstruct (?:alignas\(.*\) )?(\w+)[^;]*\{", line):
            struct = head[1]
        if waves := re.search(r"static constexpr int (?:.*\b)?WAVES = ([^,;]+)", line):
            rules.waves.setdefault(struct, waves[1])
        if start := re.search(r"template <(.*)>", line):
            template = start[1]
        if note := re.match(r"\s*// narrow:(.*)", line):
            parsed = re.fullmatch(r" (all|[\dVITEMS*+ ]+) \((.+)\)", note[1])
            if parsed is None:
                where = f"{file.name}:{number}: `// narrow:{note[1]}`"
                raise BuildError(f"{where} must be `// narrow: COUNT (why)`, see launch.h")
            if re.match(
                r"\s*(template|__global__|static __global__)",
                lines[number] if number < len(lines) else "",
            ):
                pending = parsed[1]
            else:
                rules.allowed[struct] = parsed[1]
        if kernel := re.search(r"__global__ .*MK_OCCUPANCY\(\w+, (.+)\) (\w+)\(", line):
            decides = kernel[1]
            name = kernel[2]
            rules.decides[name] = decides.strip("()")
            rules.parameters[name] = (
                [p.split()[-1] for p in _split(f"<{template}>")] if template else []
            )
            if pending:
                rules.allowed[name] = pending
            template = pending = ""


def waves_wanted(kernel: Kernel, rules: ResourceRules) -> int | None:
    """Return WAVES of the kernel's operation; None without a declaration."""
    decides = rules.decides.get(kernel.function, "")
    if decides.isdigit():
        return int(decides)
    named = re.match(r"(\w+)<", decides)
    for word in [named[1]] if named else kernel.words:
        value = rules.waves.get(word, "").rpartition("?")[2].replace(":", " ").split()
        if value and all(number.isdigit() for number in value):
            # the looser value of a condition: only the compiler knows which one applies
            return min(map(int, value))
    return None


def sizes(kernel: Kernel, rules: ResourceRules) -> dict[str, int]:
    """Return V (elements of a pack) and ITEMS (packs per lane), if template arguments have them."""
    values = {"V": 0, "ITEMS": 1}
    for name, value in zip(
        rules.parameters.get(kernel.function, []), kernel.arguments, strict=False
    ):
        if name in values and value.isdigit():
            values[name] = int(value)
        if group := re.match(r"\w+Group<\d+, (\d+)(?:, (\d+))?", value):
            values |= {"V": int(group[1]), "ITEMS": int(group[2] or UNROLLED)}
    return values


def narrow_allowed(kernel: Kernel, rules: ResourceRules) -> int | None:
    """Return the number of narrow loads and stores declared for a kernel; None: any number.

    Kernels with one element per lane (V = 1) handle unaligned data, and are always narrow.
    """
    known = sizes(kernel, rules)
    owners = dict.fromkeys([kernel.function, *_structs(kernel, rules)])
    notes = [rules.allowed[name] for name in owners if name in rules.allowed]
    if known["V"] == 1 or "all" in notes:
        return None
    return sum(_evaluate(note, known) for note in notes)


def _structs(kernel: Kernel, rules: ResourceRules) -> list[str]:
    named = re.match(r"(\w+)<", rules.decides.get(kernel.function, ""))
    return [*([named[1]] if named else []), *kernel.words]


def _evaluate(note: str, known: dict[str, int]) -> int:
    total = 0
    for term in note.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.strip().isdigit() else known[factor.strip()]
        total += product
    return total


def check(kernel: Kernel, rules: ResourceRules, arch: str = TUNED_FOR) -> list[str]:
    """Return the rules that the kernel breaks.

    Scalar registers that are spilled to vector registers, not to memory, are accepted on GPUs that
    the kernels are not tuned for, where compilers use more scalar registers.
    """
    wrong = []
    waves = waves_wanted(kernel, rules)
    if kernel.scratch_bytes or (kernel.spills and arch == TUNED_FOR):
        scratch = f"{kernel.scratch_bytes} bytes of scratch"
        where = scratch if kernel.scratch_bytes else "scalar ones, to vector registers"
        wrong.append(f"{kernel.spills} spilled registers, {where}")
    if kernel.agprs:
        wrong.append(f"{kernel.agprs} accumulation registers")
    if waves is None:
        wrong.append("no WAVES beside it")
    else:
        if kernel.vgprs > (budget := min(REGISTERS // waves, MOST_REGISTERS)):
            wrong.append(f"{kernel.vgprs} registers, budget {budget} (WAVES = {waves})")
        if kernel.occupancy < waves:
            wrong.append(f"occupancy {kernel.occupancy}, WAVES = {waves}")
    allowed = narrow_allowed(kernel, rules)
    # scratch is narrow, too
    if allowed is not None and kernel.narrow > allowed and not kernel.scratch_bytes:
        wrong.append(f"{kernel.narrow} narrow accesses, {allowed} announced")
    if allowed is not None and not kernel.wide:
        wrong.append("no access of 16 bytes")
    return wrong


def check_all(kernels: Sequence[Kernel], rules: ResourceRules, arch: str = TUNED_FOR) -> list[str]:
    """Return a line for each broken rule, and for each declaration that no kernel fully uses."""
    wrong = [f"{kernel.name}: {what}" for kernel in kernels for what in check(kernel, rules, arch)]
    for owner, note in rules.allowed.items():
        of_owner = [k for k in kernels if owner in (k.function, *_structs(k, rules))]
        limits = [(narrow_allowed(k, rules), k.narrow) for k in of_owner]
        if note == "all":
            used = any(k.narrow for k in of_owner)
        else:
            used = any(limit is not None and narrow >= limit for limit, narrow in limits)
        if of_owner and not used:
            most = max((narrow for limit, narrow in limits if limit is not None), default=0)
            wrong.append(
                f"{owner}: `narrow: {note}` allows more than any of its kernels has, which is "
                f"{most}"
            )
    return wrong


# ---- from the compiler ---------------------------------------------------------------------------


def parse_assembly(text: str) -> list[Kernel]:
    """Parse kernels of an AMDGPU assembly file (LLVM AMDGPUUsage, "Code Object V3 Metadata")."""
    spills = {
        name: sum(map(int, re.findall(r"\.[sv]gpr_spill_count: +(\d+)", entry)))
        for entry in text.partition("amdhsa.kernels:")[2].split("\n  - .")
        for name in re.findall(r"\.symbol: +(\S+)\.kd", entry)
    }
    kernels = []
    for body in re.finditer(
        r"^(\w+): +; @\1\n(.*?)^; WaveLimiterHint", text, re.MULTILINE | re.DOTALL
    ):
        if body[1] not in spills:
            continue  # a function that was not inlined
        widths = [_BYTES[name] for name in _ACCESS.findall(body[2])]
        number = functools.partial(_number, body[2])
        kernels.append(
            Kernel(
                body[1],
                number("NumVgprs"),
                number("NumAgprs"),
                number("(?:Total)?NumSgprs"),  # LLVM 20 renamed it
                number("LDSByteSize"),
                number("ScratchSize"),
                spills[body[1]],
                number("Occupancy"),
                sum(w < WIDE for w in widths),
                sum(w >= WIDE for w in widths),
            )
        )
    return kernels


def _number(text: str, key: str) -> int:
    """Return a value from the compiler's comment on a kernel. Raises BuildError if missing."""
    match = re.search(rf"^; {key}: (\d+)", text, re.MULTILINE)
    if match is None:
        raise BuildError(
            f"hipcc's assembly does not contain {key}: only assembly for gfx9 can be read"
        )
    return int(match[1])


def demangle(names: Iterable[str]) -> list[str]:
    """Return the C++ names of symbols. Raises BuildError without c++filt or llvm-cxxfilt."""
    names = list(names)
    tool = next(
        (
            t
            for t in ("c++filt", "llvm-cxxfilt", "/opt/rocm/llvm/bin/llvm-cxxfilt")
            if shutil.which(t)
        ),
        None,
    )
    if tool is None:
        raise BuildError(
            "neither c++filt (binutils) nor llvm-cxxfilt is installed to read the kernels' names"
        )
    done = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[: len(names)]


def compile_kernels(
    arch: str = "gfx90a", folder: Path = SOURCES, only: Sequence[str] = (), jobs: int = 2
) -> list[Kernel]:
    """Compile all kernels of csrc/kernels/*.cpp with hipcc for `arch`.

    Raises BuildError with the compiler's output.
    """
    tool = compiler("hip")
    if tool is None:
        raise BuildError(no_compiler("hip"))
    flags = [flag for flag in compile_flags("hip", [arch]) if flag != "-fPIC"]
    files = [p for p in sorted(folder.glob("*.cpp")) if not only or p.stem in only]

    def compile_one(file: Path) -> list[Kernel]:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "kernels.s")
            _run([tool, *flags, "--cuda-device-only", "-S", file.name, "-o", str(out)], folder)
            return parse_assembly(out.read_text())

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        kernels = [kernel for of_file in pool.map(compile_one, files) for kernel in of_file]
    named = demangle(kernel.name for kernel in kernels)
    unique = dict(zip(named, kernels, strict=True))  # a template may be in several files
    return [Kernel(**{**vars(kernel), "name": name}) for name, kernel in sorted(unique.items())]


def parse_ptxas(text: str) -> list[str]:
    """Return lines of `nvcc -Xptxas -v` on spills or stack frames, with their kernel's name."""
    wrong = []
    name = ""
    for line in text.splitlines():
        if start := re.search(
            r"(?:Compiling entry function|Function properties for) '?(\w+)'?", line
        ):
            name = start[1]
        numbers = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        )
        if numbers and any(int(n) for n in numbers.groups()):
            wrong.append(f"{name}: {line.strip()}")
    return wrong


def cuda_spills(arch: str = "sm_90", folder: Path = SOURCES, only: Sequence[str] = ()) -> list[str]:
    """Return nvcc's lines on kernels that spill or have a stack frame. Raises BuildError."""
    tool = compiler("cuda")
    if tool is None:
        raise BuildError(no_compiler("cuda"))
    wrong = []
    for file in sorted(folder.glob("*.cpp")):
        if only and file.stem not in only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            out = str(Path(scratch, "kernels.cubin"))
            flags = [*compile_flags("cuda", [arch]), "-Xptxas", "-v", "-x", "cu", "-cubin"]
            wrong += parse_ptxas(_run([tool, *flags, file.name, "-o", out], folder))
    return wrong


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, "HIP_PLATFORM": "amd"},
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    return done.stderr


# ---- for people ----------------------------------------------------------------------------------


def _split(template: str) -> list[str]:
    """Return the outermost arguments of `<a, b<c, d>, e>...`: a, b<c, d> and e."""
    arguments = []
    depth = 0
    current = ""
    for letter in template:
        depth += (letter == "<") - (letter == ">")
        if depth == 0:
            break
        if depth == 1 and letter in "<,":
            arguments.append(current.strip())
            current = ""
        else:
            current += letter
    return [argument for argument in [*arguments, current.strip()] if argument]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all kernels keep the rules."""
    made = parser(__doc__)
    archs = "AMD's names of GPUs (default: %(default)s)"
    made.add_argument("--arch", nargs="+", default=DEFAULT_ARCHS["hip"], help=archs)
    files = "names in csrc/kernels/, without .cpp"
    made.add_argument("--only", nargs="+", default=(), metavar="FILE", help=files)
    jobs = "parallel compilers (default: %(default)s)"
    made.add_argument("--jobs", type=integer(1, 512), default=2, help=jobs)
    chosen = made.parse_args(arguments)
    there = sorted(p.stem for p in SOURCES.glob("*.cpp"))
    if unknown := sorted(set(chosen.only) - set(there)):
        made.error(f"--only {' '.join(unknown)}: there are {', '.join(there) or 'no kernels'}")
    try:
        broken = [_check_arch(arch, chosen.only, chosen.jobs) for arch in chosen.arch]
    except BuildError as error:
        print_error(error)
        return 1
    checked = [number for number in broken if number is not None]
    return 1 if any(checked) or not checked else 0


def _check_arch(arch: str, only: Sequence[str], jobs: int) -> int | None:
    """Print a GPU's kernels; return how often they break rules, None if hipcc does not know it."""
    tool = compiler("hip")
    if tool is None:
        raise BuildError(no_compiler("hip"))
    names = [name for name in (arch, STAND_INS.get(arch)) if name]
    built = next(iter(known_archs(tool, names)), None)
    if built is None:
        print(f"{arch}: not checked, {tool} does not know it; a newer one may be named by $HIPCC")
        return None
    rules = read_rules()
    kernels = compile_kernels(built, only=only, jobs=jobs)
    for kernel in kernels:
        used = f"{kernel.vgprs:4} VGPRs {kernel.sgprs:4} SGPRs {kernel.lds_bytes:6} bytes of LDS"
        used += f" {kernel.spills:2} spilled {kernel.occupancy:2} waves"
        print(f"{used} {kernel.narrow:3} narrow accesses  {kernel.name}")
    wrong = check_all(kernels, rules, arch)
    for line in wrong:
        print(line)
    label = arch if built == arch else f"{arch}, compiled for its sample {built}"
    print(f"{len(kernels)} kernels for {label}: {len(wrong) or 'no'} rule(s) broken")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
