"""The registry of operations, and the selection of their implementations.

For each operation it selects what the configuration pins, else what was measured to be fastest (`ops.kernel_table`),
else the first kernel that the device has, that supports the shapes, and that gives correct results. A kernel that fails
validation is rejected for the whole process, in training, evaluation, generation and benchmarks; then the next kernel,
or the reference, is used.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import PLATFORMS, Tuned
from zaya_jax.config import ModelConfig
from zaya_jax.config.table import Table
from zaya_jax.errors import InputError, did_you_mean
from zaya_jax.ops import LOCAL, Ops
from zaya_jax.ops.attention import ATTENTION, PARTIAL_ATTENTIONS
from zaya_jax.ops.cca_mix import CCA_MIX, CCA_MIX_STEP
from zaya_jax.ops.experts import EXPERTS
from zaya_jax.ops.gram_polynomial import GRAM_POLYNOMIAL
from zaya_jax.ops.grouped_matmul import GROUPED_PRODUCTS
from zaya_jax.ops.kernel_table import REFERENCE, Choice, KernelTable, nearest
from zaya_jax.ops.operation import TOLERANCE, Kernel, Operation
from zaya_jax.ops.orthogonalize import ORTHOGONALIZE
from zaya_jax.ops.residual_norm import RESIDUAL_NORM
from zaya_jax.ops.router import ROUTER, ROUTER_STEP
from zaya_jax.ops.selfcheck import LARGE, compare, compare_large, free_memory, host_cpu, repeats
from zaya_jax.ops.target import GPU_PLATFORMS, Target
from zaya_jax.ops.vendor_attention import LIBRARIES

_ATTENTION = dataclasses.replace(ATTENTION, kernels=(*ATTENTION.kernels, *LIBRARIES))
_MIXING = (RESIDUAL_NORM, CCA_MIX, _ATTENTION, *PARTIAL_ATTENTIONS, ROUTER, EXPERTS, *GROUPED_PRODUCTS)
# Operations come before those that they use.
_OWN: dict[str, Operation] = {x.name: x for x in (*_MIXING, CCA_MIX_STEP, ROUTER_STEP, ORTHOGONALIZE, GRAM_POLYNOMIAL)}


def _with_installed(operations: dict[str, Operation]) -> dict[str, Operation]:
    """Add the kernels of other packages, which declare each as an entry point of the group `zaya_jax.kernels`.

    The entry point has the name of the operation and refers to a `Kernel`, which comes last in the order of preference.
    """
    extended = dict(operations)
    for entry in entry_points(group="zaya_jax.kernels"):
        where = f"the entry point {entry.name} = {entry.value} of {entry.dist.name if entry.dist else 'a package'}"
        if (operation := extended.get(entry.name)) is None:
            raise InputError(f"There is no operation for {where}. There are: {', '.join(operations)}.")
        try:
            kernel = entry.load()
        except Exception as error:  # whatever the package's modules raise
            raise InputError(f"Importing {where} raised {type(error).__name__}: {error}") from error
        if not isinstance(kernel, Kernel) or kernel.name in (REFERENCE, *(each.name for each in operation.kernels)):
            raise InputError(f"There must be a Kernel with a new name at {where}, not {str(kernel)[:100]}.")
        kernels = (*operation.kernels, dataclasses.replace(kernel, module=entry.module))
        extended[entry.name] = dataclasses.replace(operation, kernels=kernels)
    return extended


OPERATIONS = _with_installed(_OWN)
Pins = Mapping[str, str]  # the configuration's `ops`: name of the implementation by operation
_rejected: dict[tuple[Target, str, str], str] = {}  # (target, operation, `Choice.variant`) → why
_passed: dict[tuple[Any, ...], bool] = {}  # what was validated → whether on large arrays, too


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """The implementation of each operation on one kind of device."""

    target: Target  # the kind of device
    # name of the kernel, by operation; other operations use their references
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # a sentence why a preferred kernel is not used, by operation and kernel
    reasons: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    untried: tuple[str, ...] = ()  # operations whose kernel was not checked on arrays above 4 GiB
    # what was measured to be fastest, by operation and size; takes the place of `chosen`
    measured: Mapping[str, tuple[Choice, ...]] = dataclasses.field(default_factory=dict)
    table: KernelTable | None = dataclasses.field(default=None, compare=False)  # with the measurements
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # on measurements that cannot be used
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)  # implementations, by operation

    @functools.cached_property
    def ops(self) -> Ops:
        """The implementations that the model and the optimizer call."""
        able = (x for x in OPERATIONS.keys() & _FIELDS if x in self.chosen or getattr(LOCAL, x) is not None)
        return Ops(**{name: self.implementation(name) for name in able})

    def implementation(self, name: str) -> Callable[..., Any]:
        """Return the implementation of an operation."""
        if name not in self.measured:
            return self.variant(name, Choice(1, self.chosen.get(name, REFERENCE)))
        choices, operation = self.measured[name], OPERATIONS[name]
        if len({choice[1:] for choice in choices}) == 1:
            return self.variant(name, choices[0])

        def by_size(*arguments: Any, **options: Any) -> Any:
            choice = nearest(choices, operation.shape(*arguments, **options)[0])
            return self.variant(name, choice)(*arguments, **options)

        return by_size

    def variant(self, name: str, choice: Choice) -> Callable[..., Any]:
        """Return an implementation of an operation; a reference uses the selected implementations of its parts."""
        operation = OPERATIONS[name]
        if choice.kernel != REFERENCE:
            return functools.partial(_run, operation.kernel(choice.kernel), self.target, choice)
        used = {part: self.implementation(part) for part in operation.uses if part in self.chosen}
        return functools.partial(operation.reference, **used) if used else operation.reference

    def without(self, names: Collection[str]) -> "KernelSelection":
        """Return the selection with references for the named operations."""
        chosen = {name: kernel for name, kernel in self.chosen.items() if name not in names}
        measured = {name: choices for name, choices in self.measured.items() if name not in names}
        return dataclasses.replace(self, chosen=chosen, measured=measured)

    def without_libraries(self) -> tuple["KernelSelection", str]:
        """Return the selection without kernels that are compiled on their GPU only, and a sentence on what it has.

        The sentence is '' if it had none.
        """
        ran = ((name, OPERATIONS[name].kernel(x.kernel)) for name in self.chosen for x in self.variants(name))
        libraries = {name: kernel for name, kernel in ran if kernel.stand_in}
        chosen = {**self.chosen, **{name: kernel.stand_in for name, kernel in libraries.items()}}
        measured = {name: choices for name, choices in self.measured.items() if name not in libraries}
        listed = ", ".join(f"{kernel.stand_in} for {kernel.name} ({name})" for name, kernel in libraries.items())
        sentence = f"Libraries choose their kernels on a GPU. Here others stand in: {listed}." if listed else ""
        return dataclasses.replace(self, chosen=chosen, measured=measured), sentence

    def variants(self, name: str) -> list[Choice]:
        """Return the distinct kernels with their tiles that an operation may run."""
        every = self.measured.get(name) or (Choice(1, self.chosen[name]),)
        return list({choice.variant: choice for choice in every if choice.kernel != REFERENCE}.values())

    @property
    def digest(self) -> str | None:
        """Digest of the measurements; None without any."""
        return None if self.table is None else self.table.digest

    @property
    def kernels(self) -> dict[str, str]:
        """`chosen`, without operations that only a replaced reference would use."""
        whole = [name for name in self.chosen if all(x.kernel != REFERENCE for x in self.measured.get(name, ()))]
        parts = {part for name in whole for part in OPERATIONS[name].uses}
        return {name: kernel for name, kernel in self.chosen.items() if name not in parts}

    def __str__(self) -> str:
        """Describe the selection in one line."""
        if self.target.platform not in PLATFORMS:
            return f"There are no kernels for {self.target.platform}: XLA runs all operations."
        several = {name for name in self.kernels if len(OPERATIONS[name].kernels_for(self.target.platform)) > 1}
        named = (f"{name} ({kernel})" if name in several else name for name, kernel in self.kernels.items())
        lines = [f"Kernels for {self.target.device_kind}: {', '.join(named) or 'none'}."]
        if self.pinned:
            lines.append(f"Pinned: {', '.join(f'{name}={kernel}' for name, kernel in self.pinned.items())}.")
        if self.table is not None:
            lines.append(f"Measured in {self.table.source}: {', '.join(self.measured) or 'none of these'}.")
        lines += [f"No {kernel} kernel for {name}: {reason}" for (name, kernel), reason in self.reasons.items()]
        if self.untried:
            lines.append(f"Not checked on arrays above 4 GiB, for lack of memory: {', '.join(self.untried)}.")
        if self.notes:
            lines.append(f"{'; '.join(self.notes)}: there the default runs. Measure again with {TUNE}.")
        return " ".join(lines)


_FIELDS = {field.name for field in dataclasses.fields(Ops)}
TUNE = "python -m zaya_jax.machine kernels --tune"


def preferred_kernels(target: Target) -> KernelSelection:
    """Select the first kernel of each operation for the platform, without checking shapes or results."""
    kernels = {name: operation.kernels_for(target.platform) for name, operation in OPERATIONS.items()}
    return KernelSelection(target, {name: of_platform[0].name for name, of_platform in kernels.items() if of_platform})


def select_kernels(
    target: Target, model: ModelConfig, dtype: str, table: KernelTable | None = None, pinned: Pins | None = None
) -> KernelSelection:
    """Select an implementation of each operation that supports the shapes of `model` and was not rejected.

    Nothing is compiled. `dtype` is that of activations; 'float64' always uses the references. `table` holds the
    measurements on this kind of device; None takes each operation's first kernel. `pinned` implementations go before
    what was measured; `InputError` if one does not exist, or cannot be used.
    """
    chosen, reasons, measured, notes = dict[str, str](), dict[tuple[str, str], str](), {}, dict[str, str]()
    pinned = pinned or {}
    check_pinned(pinned)
    for name, operation in OPERATIONS.items():
        kernels = operation.kernels_for(target.platform)
        why = {kernel.name: _unsupported(operation, kernel, target, model, dtype) for kernel in kernels}
        why |= {kernel: _rejected[target, name, kernel] for kernel in why if (target, name, kernel) in _rejected}
        able = [kernel for kernel in why if not why[kernel]]
        # A pin holds for operations that are the pinned one with other outputs or in decode steps, if they have it.
        inherited = pinned.get(operation.measured_as or operation.step_of)
        pin = pinned.get(name) or (inherited if inherited in (REFERENCE, *why) else None)
        if pin:
            if name in pinned and pin not in (REFERENCE, *able):
                reason = why.get(pin, f"{target.device_kind} has no such kernel.")
                advice = f"Set ops.{name}={REFERENCE}, or leave it out."
                raise InputError(f"ops.{name}={pin} cannot be used: {reason} {advice}")
            able = [kernel for kernel in able if kernel == pin]
        elif table is not None and why:
            modules, sizes = OPERATIONS[operation.measured_as or name].modules, widths(operation, model, dtype)
            choices, notes[name] = table.choices(operation, modules, target, dtype, sizes)
            # A choice whose tiles were rejected has the default tiles.
            usable = [choice._replace(tiles=()) if (target, name, choice.variant) in _rejected else choice
                      for choice in choices if choice.kernel in (REFERENCE, *able)]  # fmt: skip
            if usable:
                measured[name] = tuple(usable)
                able = [kernel for kernel in able if kernel in {choice.kernel for choice in usable}]
        if able:
            chosen[name] = able[0]
        preferred = itertools.takewhile(why.get, why)
        reasons |= {(name, kernel): why[kernel] for kernel in preferred}
    selection = KernelSelection(target, chosen, reasons, (), measured, table, (), pinned)
    used = (notes.get(name) for name in selection.kernels)
    return dataclasses.replace(selection, notes=tuple(dict.fromkeys(filter(None, used))))


def pins_on(platform: str, pinned: Pins) -> Table[str]:
    """Return a run's pins that devices of another platform have, too: to the reference, and to its kernels."""
    every = {name: [REFERENCE, *(kernel.name for kernel in x.kernels_for(platform))] for name, x in OPERATIONS.items()}
    return Table({name: pin for name, pin in pinned.items() if pin in every.get(name, ())})


def check_pinned(pinned: Pins) -> None:
    """Raise `InputError` if the configuration's `ops` names an operation or an implementation that does not exist."""
    able = {x.name: [REFERENCE, *(kernel.name for kernel in x.kernels)] for x in OPERATIONS.values() if x.kernels}
    for name, pin in pinned.items():
        if name not in able:
            hint = f"{did_you_mean(name, able, 'ops.')} There are: {', '.join(able)}."
            raise InputError(f"ops.{name} is no operation with several implementations.{hint}")
        if pin not in able[name]:
            hint = f"{', '.join(able[name])}.{did_you_mean(pin, able[name])}"
            raise InputError(f"ops.{name} is {pin!r}, but must be one of {hint}")


def widths(operation: Operation, model: ModelConfig, dtype: str) -> tuple[int, ...]:
    """Return the widths of an operation in a model, from the arguments of its first check."""
    shapes = _of_checks(operation, operation.shape, model, dtype)
    return shapes[0][1:] if shapes else ()


def _unsupported(operation: Operation, kernel: Kernel, target: Target, model: ModelConfig, dtype: str) -> str:
    """Return why the kernel does not support the arguments of the operation's checks; '' if it does."""
    supports = functools.partial(kernel.supports, target.architecture)
    return next(filter(None, _of_checks(operation, supports, model, dtype)), "")


def _of_checks(operation: Operation, function: Callable[..., Any], model: ModelConfig, dtype: str) -> list[Any]:
    """Return the result of `function` for the arguments of each check, which are traced."""
    results = []

    def implementation(*arguments: Any, **options: Any) -> Any:
        results.append(function(*arguments, **options))
        return operation.reference(*arguments, **options)

    with jax.enable_x64(dtype == "float64"):
        for check in operation.checks(model, True).values():
            arrays = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)) for x in check.inputs]
            jax.eval_shape(functools.partial(check.run, implementation), *arrays)
    return results


def _run(kernel: Kernel, target: Target, choice: Choice, *arguments: Any, **options: Any) -> Any:
    if reason := kernel.supports(target.architecture, *arguments, **options):
        raise ValueError(reason)
    architecture = Tuned(target.architecture, choice.tiles, choice.dtype) if choice.tiles else target.architecture
    return kernel.run(architecture, *arguments, **options)


def validate_kernels(
    selection: KernelSelection, model: ModelConfig, dtype: str, *, training: bool = True, large: int | None = None
) -> KernelSelection:
    """Check each selected kernel once in this process, on its first device, at the widths of `model`.

    A kernel must agree with the reference in double precision, forward and with `training` backward, with itself on
    arrays above 4 GiB, if they fit, and on GPUs bit by bit with itself in a second run. A kernel that does not, or that
    fails to compile or run, is rejected with a `UserWarning`, and the operation's next kernel is checked. `large` are
    the bytes of the large arrays, 0 for none; None for `selfcheck.LARGE` on GPUs and 0 in emulation. Returns the
    selection of kernels that passed, with `training` without those for decode steps, which have no gradient.
    `InputError` if JAX_PLATFORMS excludes the CPU, which computes the reference.
    """
    if training:
        selection = selection.without([x.name for x in OPERATIONS.values() if x.step_of])
    if selection.kernels:
        host_cpu()
    large = (LARGE if selection.target.platform != "interpret" else 0) if large is None else large
    while True:
        trials = {(selection.target, name, choice.variant, model, dtype, training, large): choice
                  for name in selection.kernels for choice in selection.variants(name)}  # fmt: skip
        for trial, choice in trials.items():
            if trial in _passed:
                continue
            reason, fits = check_kernel(selection, trial[1], choice, model, dtype, training, large)
            if reason:
                reject(*trial[:3], reason)
            else:
                _passed[trial] = fits
        if _passed.keys() >= trials.keys():
            untried = tuple(dict.fromkeys(trial[1] for trial in trials if not _passed[trial]))
            return dataclasses.replace(selection, untried=untried)
        left = select_kernels(selection.target, model, dtype, selection.table, selection.pinned)
        selection = left.without(OPERATIONS.keys() - selection.chosen.keys())


def check_kernel(
    selection: KernelSelection, name: str, choice: Choice, model: ModelConfig, dtype: str, training: bool, large: int
) -> tuple[str, bool]:
    """Check one kernel; returns why it is wrong ('' if it is not), and whether it was checked on large arrays."""
    operation, implementation, fits = OPERATIONS[name], selection.variant(name, choice), True
    try:
        for check in operation.checks(model, training).values():
            tried = check if training else check._replace(gradient=False)
            errors = {"": compare(tried, dtype, implementation, operation.reference)}
            apart = compare_large(tried, dtype, implementation, large, free_memory()) if large else 0.0
            errors[" on arrays above 4 GiB"], fits = apart or 0.0, fits and apart is not None
            for where, error in errors.items():
                if not error <= check.tolerance[dtype]:  # written so that NaN fails
                    return f"its error{where} is {error:.2g}, above the tolerance {check.tolerance[dtype]:g}.", fits
            if selection.target.platform in GPU_PLATFORMS and not repeats(tried, dtype, implementation):
                return "two runs with the same arrays gave different bits, so no run could be repeated.", fits
    except Exception as problem:  # of compiler or driver: whatever it is, the reference still works
        return _failure(problem), fits
    return "", fits


def _failure(problem: Exception) -> str:
    return f"it failed with {type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def reject(target: Target, operation: str, kernel: str, reason: str) -> None:
    """Exclude a kernel, named by `Choice.variant`, from all later selections in this process, with a `UserWarning`."""
    if (target, operation, kernel) not in _rejected:
        _rejected[target, operation, kernel] = reason
        rejected = f"The {kernel} kernel for {operation} will not be used on this {target.device_kind}"
        warnings.warn(f"{rejected}: {reason}", stacklevel=3)


def rejections(target: Target) -> list[list[str]]:
    """Return [operation, kernel, reason] of each kernel that this process has rejected."""
    return [[*key[1:], reason] for key, reason in _rejected.items() if key[0] == target]


def check_operations(
    target: Target, model: ModelConfig, dtypes: Sequence[str] = (*TOLERANCE,), names: Collection[str] = (*OPERATIONS,)
) -> dict[str, Any]:
    """Compare all kernels of the named operations with double precision on the host; without a kernel, the reference.

    Returns `errors`: relative `error` and `tolerance` by check, kernel and dtype. `refused`: by operation, kernel and
    dtype, why a kernel does not take them, if there are any. `failed`: a sentence, if an error is above its tolerance.
    """
    errors, wrong, refused = {}, [], {}
    for operation, dtype in itertools.product((OPERATIONS[name] for name in names), dtypes):
        selection, kernels = select_kernels(target, model, dtype), operation.kernels_for(target.platform)
        why = {kernel.name: _unsupported(operation, kernel, target, model, dtype) for kernel in kernels}
        refused |= {f"{operation.name} by {kernel} {dtype}": reason for kernel, reason in why.items() if reason}
        for kernel in [kernel for kernel in why if not why[kernel]] or [REFERENCE]:
            implementation = selection.variant(operation.name, Choice(1, kernel))
            by = "" if kernel == REFERENCE else f" by {kernel}"
            for name, check in (operation.checks(model, False) | operation.checks(model, True)).items():
                limit = check.tolerance[dtype]
                try:
                    error = compare(check, dtype, implementation, operation.reference)
                except Exception as problem:  # of compiler, driver or library: the others are still checked
                    wrong.append(f"{name}{by} in {dtype}: {_failure(problem)}")
                    continue
                errors[f"{name}{by} {dtype}"] = {"error": float(f"{error:.3g}"), "tolerance": limit}
                if not error <= limit:
                    wrong.append(f"{name}{by} in {dtype} has error {error:.2g}, tolerance {limit:g}")
    more = {"refused": refused, "failed": "; ".join(wrong) + "." if wrong else ""}
    return {"errors": errors, **{key: value for key, value in more.items() if value}}
