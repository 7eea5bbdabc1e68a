import os
import signal

from tools.gpu_day.options import Options


def run(options: Options) -> dict[str, object]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {"passed": True}
