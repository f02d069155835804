"""Finds the processes that a test started, by a variable that they inherit."""

import psutil


def live_processes(mark: str) -> list[psutil.Process]:
    """Processes with this variable in their environment, such as a unique name, except ended ones."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
