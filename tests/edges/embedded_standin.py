"""A stand-in for a hub service: says that it is ready, then waits for SIGTERM. Run as a script; `STANDIN` says what goes wrong.

`dies`: ends at once with a line on stderr · `mute`: never says that it is ready · `stubborn`: ignores SIGTERM.
"""

import json
import os
import signal
import sys
import threading

service = sys.argv[1]
trouble = os.environ.get(f"STANDIN_{service.upper()}", "")
if trouble == "dies":
    sys.exit("the table of moves is missing")
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: None if trouble == "stubborn" else over.set())
with open(os.environ["INTERTIE_DATA_DIR"] + "/starts", "a", encoding="utf-8") as starts:
    starts.write(f"{service} {os.getpid()}\n")
if trouble != "mute":
    with open(os.environ["INTERTIE_READY_FILE"], "w", encoding="utf-8") as mark:
        json.dump({"pid": os.getpid(), "service": service, "ready_at": "now"}, mark)
while not over.wait(60):
    pass
with open(os.environ["INTERTIE_DATA_DIR"] + "/starts", "a", encoding="utf-8") as starts:
    starts.write(f"{service} ended\n")
