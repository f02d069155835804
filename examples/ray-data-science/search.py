"""Scores one setting of a model by cross-validation; Ray runs the folds side by side.

The model is a polynomial of degree 9 through noisy measurements (samples.csv), fitted with a penalty on its weights.
Without a penalty the model follows the noise; with a large one it ignores the samples. Only Python and Ray are needed.
"""

import csv
import os
from pathlib import Path

import ray

DEGREE = 9
FOLDS = 3


def score(task):
    penalty = float(task.payload["penalty"])
    samples = read_samples()
    # Large data would be stored once for all folds, with ray.put.
    folds = [fold_error.remote(samples, number, penalty) for number in range(FOLDS)]
    found = ray.get(folds)
    task.progress(1.0, f"{FOLDS} folds")
    error = sum(each["error"] for each in found) / FOLDS
    fold_processes = sorted({each["process"] for each in found})
    return {"penalty": penalty, "error": error, "process": os.getpid(), "fold_processes": fold_processes}


@ray.remote(num_cpus=1)
def fold_error(samples, number, penalty):
    """The mean squared error on every third sample, of a model that was fitted to the others."""
    kept = [sample for index, sample in enumerate(samples) if index % FOLDS != number]
    held_out = samples[number::FOLDS]
    weights = fit(kept, penalty)
    errors = [(value(weights, x) - y) ** 2 for x, y in held_out]
    return {"error": sum(errors) / len(errors), "process": os.getpid()}


def read_samples():
    with Path(__file__).with_name("samples.csv").open() as file:
        return [(float(row["x"]), float(row["y"])) for row in csv.DictReader(file)]


def value(weights, x):
    return sum(weight * x**power for power, weight in enumerate(weights))


def fit(samples, penalty):
    """The weights of least squares with a penalty: (X'X + penalty I) w = X'y, by elimination."""
    size = DEGREE + 1
    rows = [[x**power for power in range(size)] for x, _ in samples]
    matrix = [
        [sum(row[i] * row[j] for row in rows) + (penalty if i == j else 0.0) for j in range(size)]
        + [sum(row[i] * y for row, (_, y) in zip(rows, samples, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[row][size] / matrix[row][row] for row in range(size)]
