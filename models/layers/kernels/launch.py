"""What all kernels share: their launch, programmatic dependent launch, tile sizes, precision of matrix products.

Under programmatic dependent launch (Hopper and later) a kernel's programs start while the kernel before still runs.
They may read weights at once, but must call `wait_for_previous` before they touch anything that an earlier kernel
writes or reads, and every program must call it, also one that has nothing to do: the kernel after relies on it. So
no step may write a weight that these kernels read. One that is dequantised in each step is read by torch's. So is
the embedding, which waits for all before it: what nothing behind it writes earlier in the step, such as a layer's
recurrent state and the numbers of its rows, may be read at once, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.errors import OutOfResources, PTXASError

from models.layers.kernels.gpu import current_gpu, interpreted
from models.layers.op import CannotLaunch

_UNFIT = (OutOfResources, CompilationError, PTXASError)
_refused: dict[Any, str] = {}
"""Why the GPU or the compiler does not take a configuration, by `configuration_of` it."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), as a dependent launch where kernel and GPU know it. An empty grid does nothing.

    Raises CannotLaunch for a configuration that this GPU or its compiler does not take; it is asked once only.
    """
    if 0 in grid:
        return
    if "PDL" in kernel.arg_names:
        options["PDL"] = dependent_launch()
        if options["PDL"]:
            options["launch_pdl"] = True
    if _refused and (reason := _refused.get(configuration_of(kernel, args, options))):
        raise CannotLaunch(kernel.__name__, reason)
    try:
        kernel[grid](*args, **options)
    except Exception as error:
        if not unfit(error):
            raise
        refuse(configuration_of(kernel, args, options), error)
        raise CannotLaunch(kernel.__name__, str(error)) from error


def unfit(error: BaseException) -> bool:
    """Whether an error of a launch says that the configuration does not fit, and nothing else is wrong."""
    if isinstance(error, RuntimeError):
        return "PassManager" in str(error)  # Triton's passes have no error of their own
    return isinstance(error, _UNFIT)


def configuration_of(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """What a kernel is compiled by, but for sizes that Triton specializes on: a key."""
    dtypes = tuple(arg.dtype for arg in args if isinstance(arg, Tensor))
    return kernel.__name__, dtypes, tuple(sorted((name, str(value)) for name, value in options.items()))


def refuse(configuration: Any, error: BaseException) -> None:
    """Launches of this configuration raise CannotLaunch from now on."""
    _refused[configuration] = str(error) or type(error).__name__


def dependent_launch() -> bool:
    return not interpreted() and current_gpu().has_dependent_launch


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


def dot_precision(x: Tensor) -> str:
    """Full float32 products for float32 operands; 16-bit operands are exact in any mode."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def row_strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(0) for tensor in tensors]
