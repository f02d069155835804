"""`nvidia-smi` inside an emulated pod: its table, `-L`, and `--query-gpu=… --format=csv[,noheader][,nounits]`."""

import sys
from typing import Any

import readings

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running."
)
NO_DRIVER_STATUS, NO_DEVICE_STATUS, BAD_QUERY_STATUS = 9, 6, 2


def main(words: list[str]) -> int:
    found = readings.read()
    if not found["has_driver"]:
        print(NO_DRIVER)
        return NO_DRIVER_STATUS
    if not found["gpus"]:
        print("No devices were found")
        return NO_DEVICE_STATUS
    options = {name: value for name, _, value in (word.lstrip("-").partition("=") for word in words)}
    if "L" in options:
        for number, gpu in enumerate(found["gpus"]):
            print(f"GPU {number}: {gpu['name']} (UUID: GPU-{number:08x})")
        return 0
    if "query-gpu" in options:
        return _query(found, options["query-gpu"].split(","), options.get("format", "csv").split(","))
    print(f"NVIDIA-SMI {found['driver']}   Driver Version: {found['driver']}   CUDA Version: {found['cuda']}")
    for number, gpu in enumerate(found["gpus"]):
        print(f"| {number}  {gpu['name']}  {gpu['used_mb']}MiB / {gpu['total_mb']}MiB |")
    return 0


def _query(found: dict[str, Any], fields: list[str], formats: list[str]) -> int:
    unit = "" if "nounits" in formats else " MiB"
    rows = [
        {
            "index": str(number),
            "name": gpu["name"],
            "gpu_name": gpu["name"],
            "uuid": f"GPU-{number:08x}",
            "count": str(len(found["gpus"])),
            "driver_version": found["driver"],
            "memory.total": f"{gpu['total_mb']}{unit}",
            "memory.used": f"{gpu['used_mb']}{unit}",
            "memory.free": f"{gpu['total_mb'] - gpu['used_mb']}{unit}",
            "utilization.gpu": "0" if "nounits" in formats else "0 %",
        }
        for number, gpu in enumerate(found["gpus"])
    ]
    names = [field.strip() for field in fields]
    if unknown := [name for name in names if name not in rows[0]]:
        print(f'Field "{unknown[0]}" is not a valid field to query.')
        return BAD_QUERY_STATUS
    if "noheader" not in formats:
        heads = [f"{name} [MiB]" if name.startswith("memory.") else name for name in names]
        print(", ".join(heads))
    for row in rows:
        print(", ".join(row[name] for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
