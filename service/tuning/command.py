"""reprise tune: measures a checkpoint's GEMMs on this machine's GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from models.interfaces.errors import CheckpointError

if TYPE_CHECKING:
    from models.layers.kernels.gpu import Gpu
    from service.tuning.run import Task


def tune(
    model: Annotated[
        list[str], typer.Option("--model", metavar="<str>", help="Directory or hub id; may be given several times.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and exit.")] = False,
) -> None:
    """Measure GEMM configurations of models on this GPU, which `serve` then uses. Weights are not read."""
    _need("torch")
    _need("triton")
    tasks = _tasks_of(model)
    shapes = dict.fromkeys(task.shape for task in tasks)
    typer.echo(f"{len(shapes)} shapes, {len(tasks)} measurements of several configurations each")
    if dry_run:
        for task in tasks:
            typer.echo(f"  {task}")
    gpu = _supported_gpu(required=not dry_run)
    if gpu is None:
        return

    from models.layers.kernels import gemm_configs

    known = gemm_configs.table_of(gpu)
    tasks = [task for task in tasks if task.shape not in known]
    if skipped := sum(shape in known for shape in shapes):
        typer.echo(f"{skipped} shapes have configurations measured on this kind of GPU, which come with the package")
    if tasks and not dry_run:
        _measure(tasks, gpu)


def _tasks_of(names: list[str]) -> list[Task]:
    """What is to be measured for these models, each once. Exits if one cannot be located or read."""
    from service.hub import locate
    from service.tuning.run import tasks_of

    try:
        found = [task for name in names for task in tasks_of(Path(locate(name, load_format="random").directory))]
    except CheckpointError as error:
        _fail(str(error))
    return list(dict.fromkeys(found))


def _supported_gpu(*, required: bool) -> Gpu | None:
    """This machine's GPU. Exits if the kernels do not support it, and if there is none that is required."""
    import torch

    from models.layers.kernels.gpu import LEAST_CAPABILITY, current_gpu, named

    if not torch.cuda.is_available():
        if not required:
            return None
        _fail("tune: torch finds no CUDA device, and there is nothing to measure on a CPU; see `reprise doctor`")
    gpu = current_gpu()
    if gpu.capability < LEAST_CAPABILITY:
        _fail(f"tune: {gpu.name} is {named(gpu.capability)}; {named(LEAST_CAPABILITY)} is the least that is supported")
    return gpu


def _measure(tasks: list[Task], gpu: Gpu) -> None:
    """Measures the tasks and keeps the choices for `serve`. Exits if these cannot be written."""
    import torch

    from models.layers.kernels.gemm_store import TableError, save
    from models.layers.kernels.gpu import named
    from service.tuning import run

    typer.echo(f"compiling for {gpu.name} ({named(gpu.capability)})")
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        run.compile_all(tasks, gpu)
        table = run.tune(tasks, gpu, run.GpuTimer(), typer.echo)
    try:
        path = save(table, gpu)
    except (OSError, TableError) as error:
        _fail(f"tune: {error}")
    typer.echo(f"{path}: `reprise serve` takes it from its next start on")


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        _fail(f"tune: {package} is not installed; see `reprise doctor`")


def _fail(message: str) -> NoReturn:
    typer.echo(f"reprise: {message}", err=True)
    raise typer.Exit(2)
