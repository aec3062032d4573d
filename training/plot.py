"""Curves of a training run as a PNG: `python -m training.plot LOG OUT`. Needs matplotlib."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

LOSSES = ("answer_loss", "index_loss")
NOT_ACCURACY = (*LOSSES, "step", "stage", "samples", "seconds", "grad_norm")


def draw_curves(log: Path, out: Path) -> None:
    """Losses above, accuracies (teacher-forced answers, cells) below, over steps."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 9), sharex=True)
    for name in LOSSES:
        points = [(row["step"], row[name]) for row in rows if name in row]
        above.plot(*zip(*points, strict=True), label=name)
    for name in sorted({key for row in rows for key in row} - set(NOT_ACCURACY)):
        points = [(row["step"], row[name]) for row in rows if name in row]
        below.plot(*zip(*points, strict=True), label=name, linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel("accuracy in training")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend(fontsize=8, ncols=3)
        axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    draw_curves(arguments.log, arguments.out)


if __name__ == "__main__":
    main()
