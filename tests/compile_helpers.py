"""The options of XLA under which the quick run compiles."""

import os

# Most of a test's time is compilation. LLVM's optimizations are left out, and fusions are emitted without MLIR, which
# takes half the time of what remains; that is an extra option, as jaxlib 0.12 no longer has it, and other options that
# are unknown end the process. A program is given to LLVM whole: in parts, for several cores, it takes a seventh more.
_CHEAP = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)
_given = os.environ.get("XLA_FLAGS", "")
# Flags given from outside come last, and XLA takes the last of a name. Processes that tests start inherit both.
CHEAP = _given if _CHEAP in _given else f"{_CHEAP} {_given}".strip()
