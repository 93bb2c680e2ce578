"""An operation: plain PyTorch that defines what is computed, and the name of the CUDA kernel that computes the same.

    @op(cuda="models.layers.kernels.norms:rms_norm")
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ...plain PyTorch...

    rms_norm(x, weight, eps)              the kernel where x is on a GPU, else plain PyTorch
    rms_norm.reference(x, weight, eps)    plain PyTorch on any device, for tests to compare with

An operation may call others; in a reference they run as references, too. Kernels are imported at their first use, so
that nothing here depends on them or on Triton.
"""

from __future__ import annotations

import logging
import pkgutil
import threading
from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, cast

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
Result = TypeVar("Result")


class CannotLaunch(Exception):
    """A kernel's configuration asks for more than the GPU has, or does not compile for it.

    A launch is refused before anything reaches the device, so that a capture can go on with the launches of the
    reference. Captures follow eager runs of the same shapes and kernel precompilation, so by then it is known which
    kernels are refused.
    """

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(f"kernel {kernel} cannot be launched on this GPU: {reason}")
        self.kernel = kernel


class Fallbacks:
    """Reports operations that ran as their reference, and names each kernel once in the log."""

    def __init__(self) -> None:
        self.listener: Callable[[str], None] | None = None
        """Called with the kernel's name at each fallback."""
        self._named: set[str] = set()

    def report(self, error: CannotLaunch) -> None:
        if error.kernel not in self._named:
            self._named.add(error.kernel)
            log.warning("%s; plain PyTorch runs instead, which is slower", error)
        if self.listener is not None:
            self.listener(error.kernel)


FALLBACKS = Fallbacks()


class _References(threading.local):
    """Number of references that run in this thread, one inside the other."""

    depth = 0


_REFERENCES = _References()


class Op(Generic[Params, Result]):
    """A callable with the signature of its definition. `is_cuda` of the first argument decides where it runs."""

    def __init__(
        self,
        definition: Callable[Params, Result],
        cuda: str,
        cpu: Callable[..., Result] | None,
        takes: Callable[..., bool] | None,
    ) -> None:
        self._definition = definition
        self._cuda = cuda
        self._cpu = cpu or definition
        self._takes = takes
        update_wrapper(self, definition)

    def reference(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Plain PyTorch on any device, in all operations that it calls too."""
        _REFERENCES.depth += 1
        try:
            return self._definition(*args, **kwargs)
        finally:
            _REFERENCES.depth -= 1

    @cached_property
    def kernel(self) -> Callable[..., Result]:
        """The function that launches the CUDA kernel, or without a GPU runs it in Triton's interpreter. Some have
        further options that the reference has no use for, such as a tile."""
        return cast("Callable[..., Result]", pkgutil.resolve_name(self._cuda))

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        first: Any = args[0]
        if _REFERENCES.depth:
            return self._definition(*args, **kwargs)
        if not first.is_cuda:
            return self._cpu(*args, **kwargs)
        if self._takes is not None and not self._takes(*args, **kwargs):
            return self.reference(*args, **kwargs)
        return self.launch(*args, **kwargs)

    def launch(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """The kernel; the reference where the GPU refuses it."""
        try:
            return self.kernel(*args, **kwargs)
        except CannotLaunch as error:
            FALLBACKS.report(error)
        return self.reference(*args, **kwargs)


def op(
    *, cuda: str, cpu: Callable[..., Any] | None = None, takes: Callable[..., bool] | None = None
) -> Callable[[Callable[Params, Result]], Op[Params, Result]]:
    """Decorates a reference. It must not read a tensor on the host, so that it can be captured.

    cuda: "module:function" of the kernel's launcher, which takes the same arguments. If it makes several launches, the
    reference must be able to write again what those before the last one wrote. cpu: what runs on a CPU, if the
    definition is slow there. takes: whether the kernel supports given arguments; for others the reference runs on the
    GPU, too.
    """

    def decorate(reference: Callable[Params, Result]) -> Op[Params, Result]:
        return Op(reference, cuda, cpu, takes)

    return decorate
