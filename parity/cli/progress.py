"""Progress of a training run in one backend; imports neither framework."""

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diptych.plans.training import StepResult


def training_progress(
    console: Console, steps: Iterable[StepResult], total: int, interval: int, note: Callable[[int], str] = lambda _: ""
) -> list[StepResult]:
    """Consume the steps of a run and show loss and speed.

    On a terminal: one bar with loss, tokens per second and time left. Elsewhere: one line every ``interval`` steps.

    Args:
        console: printed to.
        steps: results of the steps.
        total: number of steps.
        interval: steps between lines.
        note: returns additional text every ``interval`` steps, given the number of steps since its last call.
    """
    columns = (
        TextColumn("loss {task.fields[loss]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} tok/s{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("train", total=total, loss="-", speed="-", note="")
        last_note = ""
        num_noted = 0
        for result in steps:
            results.append(result)
            loss = f"{result.loss:.4f}"
            speed = f"{result.tokens / result.seconds:,.0f}"
            is_due = result.step % interval == 0 or result.step == total - 1
            if is_due:
                last_note = note(len(results) - num_noted)
                num_noted = len(results)
            progress.update(task, advance=1, loss=loss, speed=speed, note=last_note)
            if is_due and not console.is_terminal:
                norm = f"grad norm {result.grad_norm:.3f}"
                console.print(f"step {result.step:>6}  loss {loss}  {norm}  {speed} tok/s{last_note}")
    return results
