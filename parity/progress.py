"""Progress of a training run in one backend; imports neither framework."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from plans.training import StepResult


def training_progress(console: Console, steps: Iterable[StepResult], total: int, interval: int) -> list[StepResult]:
    """Consume the steps of a run, showing loss and speed as they come.

    On a terminal: one bar with loss, tokens per second and time left. Elsewhere: a line every
    ``interval`` steps.

    Returns:
        All results.
    """
    columns = (
        TextColumn("loss {task.fields[loss]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} tok/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("train", total=total, loss="-", speed="-")
        for result in steps:
            results.append(result)
            loss, speed = f"{result.loss:.4f}", f"{result.tokens / result.seconds:,.0f}"
            progress.update(task, advance=1, loss=loss, speed=speed)
            if not console.is_terminal and (result.step % interval == 0 or result.step == total - 1):
                console.print(f"step {result.step:>6}  loss {loss}  grad norm {result.grad_norm:.3f}  {speed} tok/s")
    return results
