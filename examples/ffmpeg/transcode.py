"""Transcodes one file: the payload as JSON on standard input, the result as JSON on standard output.

    {"input": "in.avi", "output": "out.mp4"}

Exit code 0 means complete. Everything that ffmpeg prints goes to standard error, which is the log of the task.
"""

import json
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 3600

payload = json.load(sys.stdin)
# Names are file names of this folder: an option, a URL or a path of another folder is not transcoded.
source, target = Path(payload["input"]), Path(payload["output"])
for name in (source, target):
    if name.name != str(name) or str(name).startswith("-"):
        sys.exit(f"{name} is not a file name")
# ffmpeg finds the format by the name, so the unfinished file has the same ending.
unfinished = target.with_name(f"unfinished-{target.name}")
command = ["ffmpeg", "-nostdin", "-y", "-loglevel", "error", "-i", f"file:{source}", f"file:{unfinished}"]
subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
unfinished.replace(target)  # a repeated attempt never leaves half a file
print(json.dumps({"output": str(target), "bytes": target.stat().st_size}))
