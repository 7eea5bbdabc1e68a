import sys

from tools.gpu_day.options import Options


def run(options: Options) -> dict[str, object]:
    for _ in range(1 << 10):
        print("x" * (1 << 13))
        print("y" * (1 << 13), file=sys.stderr)
    (options.folder / "more.log").write_text("z" * (1 << 20))
    return {"passed": True}
