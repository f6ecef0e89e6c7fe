"""Command line: replay fixture files, print what is not yet covered and every difference, exit 1 on failures."""

import sys
from pathlib import Path

from shoal.engines.core.golden.outcome import MalformedError, Outcome
from shoal.engines.core.golden.replay import replay_file


def main(arguments: list[str]) -> int:
    """Exit status: 0 all compared entries agree, 1 some differ, 2 wrong usage or an unreadable file."""
    if not arguments or any(one.startswith("-") for one in arguments):
        print("usage: python -m shoal.engines.core.golden FILE…", file=sys.stderr)
        return 2
    counts = dict.fromkeys(Outcome, 0)
    for name in arguments:
        try:
            verdicts = list(replay_file(Path(name)))
        except (OSError, ValueError, MalformedError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        for verdict in verdicts:
            counts[verdict.outcome] += 1
            if verdict.outcome is Outcome.NOT_YET:
                print(f"not yet: {verdict.kind} {verdict.entry_id} ({'; '.join(verdict.differences)})")
            elif verdict.outcome is Outcome.FAILED:
                print(f"FAILED: {verdict.kind} {verdict.entry_id}")
                for line in verdict.differences:
                    print(f"  {line}")
    failed = f", {counts[Outcome.FAILED]} failed" if counts[Outcome.FAILED] else ""
    print(f"{counts[Outcome.PASSED]} passed, {counts[Outcome.NOT_YET]} not yet{failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
